"""Kept KV blocks serve the sample they are of and nobody else."""

from types import SimpleNamespace

from recipe.partial_rollout.engine.kept_kv import SaltedEngine, request_id_of, salt_of


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
