"""Kept KV blocks serve the sample they are of and nobody else."""

import asyncio

from recipe.partial_rollout.engine.admitting_engine import AdmittingEngine
from recipe.partial_rollout.engine.hold import request_id_of, salt_of
from tests.unit.test_admitting_engine import PARAMS, Engine, read


def salts(*request_ids, version=3):
    """Of requests to an engine with the weights of ``version``."""
    engine = Engine("last")
    salted = AdmittingEngine(engine, lambda name: salt_of(name, version))
    for name in request_ids:
        asyncio.run(read(salted.generate(prompt={"tokens": [1]}, sampling_params=PARAMS, request_id=name, priority=7)))
    assert [(name, options) for name, _, _, options in engine.added] == [
        (name, {"priority": 7}) for name in request_ids
    ]
    assert all(prompt["tokens"] == [1] for _, prompt, _, _ in engine.added)
    return [prompt["cache_salt"] for _, prompt, _, _ in engine.added]


def test_siblings_that_start_under_the_same_weights_share_their_blocks_with_no_other_group():
    new = request_id_of("0/4", None)
    first, sibling, other = salts(new, request_id_of("0/4", None), request_id_of("0/5", None))
    assert first == sibling != other
    resumed, late = salts(request_id_of("0/4", 3), request_id_of("0/4", None), version=4)
    assert resumed == first != late, "a resumed sample finds the blocks of the weights that it began with"
    assert salts(request_id_of("0/4", 4), version=5) == [late]


def test_other_requests_find_blocks_of_the_same_weights_only():
    assert salts("a", "b", version=3) == salts("c", "d", version=3) != salts("a", "b", version=4)
    assert salt_of("a", None) != salt_of("a", 0)
