"""Kept KV blocks serve the sample they are of and nobody else, and what they change is measured."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from recipe.partial_rollout.engine.kept_kv import SaltedEngine, kv_gap, request_id_of, salt_of


def salts(*request_ids, version=3):
    """Of requests to an engine with the weights of ``version``."""
    engine = SimpleNamespace(generate=lambda *, prompt, **options: (prompt, options))
    salted = SaltedEngine(engine, lambda: version)
    made = [salted.generate(prompt={"tokens": [1]}, request_id=name, priority=7) for name in request_ids]
    assert all(
        options == {"request_id": name, "priority": 7} for name, (_, options) in zip(request_ids, made, strict=True)
    )
    assert all(prompt["tokens"] == [1] for prompt, _ in made)
    return [prompt["cache_salt"] for prompt, _ in made]


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


@pytest.mark.parametrize(
    ("versions", "behaviour", "proximal", "figures"),
    [
        (
            [[1, 2, 2, -1], [2, 2, 2, 2]],
            [[-1.0, -2.0, -3.0, 0.0], [-9.0, -9.0, -9.0, -9.0]],
            [[-7.0, -2.5, -3.1, -5.0], [-1.0, -1.0, -1.0, -1.0]],
            {"mismatch/kv_gap_mean": 0.3},
        ),
        ([[2, 2]], [[-1.0, -1.0]], [[-2.0, -2.0]], {}),
    ],
)
def test_gap_is_of_the_newest_tokens_of_older_samples(versions, behaviour, proximal, figures):
    columns = {"rollout_versions": torch.tensor(versions), "rollout_log_probs": torch.tensor(behaviour)}
    found = kv_gap(TensorDict(columns, len(versions)), torch.tensor(proximal), 2)
    assert found == pytest.approx(figures)
