"""Separate placement: what it sets and needs; what cannot work is in ``test_config``, where its engines start in e2e."""

import pytest

from recipe.partial_rollout.config import releases
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight import check_settings
from recipe.partial_rollout.preflight.inputs import check_cluster

ROLLOUT = "actor_rollout_ref.rollout"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
COLOCATED = "partial_rollout.placement=colocated"
ONE_NODE = (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", f"{BACKEND}=shm")


@pytest.fixture
def placed(resolved_config):
    """``placed(*overrides)``: a config with separate placement, unless they say otherwise."""
    return lambda *overrides: resolved_config("quickstart_cpu", "partial_rollout.placement=separate", *overrides)


def test_placement_is_one_override_and_a_small_overlap_is_warned_of(placed, capsys):
    config = placed("partial_rollout.overlap=0.5")
    check_settings(config)
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "shm"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: partial_rollout.overlap=0.5: at least 1 if partial_rollout.placement=separate")


def test_more_devices_than_ray_has_and_a_vllm_that_cannot_hold_are_refused(placed, monkeypatch):
    config = placed(*ONE_NODE, f"{ROLLOUT}.n_gpus_per_node=3", "trainer.n_gpus_per_node=2")
    check_cluster(config, {"CPU": 99, "GPU": 5})
    with pytest.raises(ConfigError, match=r"n_gpus_per_node=3: .* the run needs 5 devices in Ray, which has 4"):
        check_cluster(config, {"CPU": 99, "GPU": 4})
    check_cluster(placed(COLOCATED, "trainer.n_gpus_per_node=8"), {"CPU": 99, "GPU": 1})
    monkeypatch.setattr(releases, "vllm", lambda: "0.30.0")
    with pytest.raises(ConfigError, match=r"placement=separate: must be colocated: .* is tested only with vLLM"):
        check_settings(config)
    with pytest.raises(ConfigError, match=r"resume_kv=keep: must be recompute: .* is tested only with vLLM"):
        check_settings(placed(COLOCATED, "partial_rollout.resume_kv=keep"))
