"""Replays of runs with separate placement: what is measured from batch to batch, and what the simulation makes of it."""

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import Cluster, EngineCurve
from recipe.partial_rollout.records.run import load_run
from recipe.partial_rollout.tools.replay import measured_steps, play_separate, replay, trainer_of
from tests.unit.runs import PHASES, separate_run

ADMISSION = Admission(Mode.WINDOW, 2, 2, 1.0, 4, 8, 4)


def build(path, *, more=()):
    return load_run(separate_run(path, phases=[*PHASES, *more]))


def test_trainer_works_from_batch_to_batch_but_for_waits_staging_and_holds(tmp_path):
    steps = measured_steps(build(tmp_path / "a"))
    assert steps.whole_s == pytest.approx([12, 20]) and steps.train_s == pytest.approx([7, 7])
    assert steps.trained_tokens == [200, 200]
    assert (steps.update.stage_s, steps.update.hold_s) == (pytest.approx(2), pytest.approx(1))


def test_validations_and_stops_for_checkpoints_are_left_out(tmp_path):
    steps = measured_steps(build(tmp_path / "a", more=[("validate", 1, 12, 14), ("flush", 2, 24, 25)]))
    assert steps.whole_s == pytest.approx([10, 19]) and steps.train_s == pytest.approx([5, 6])


def test_trainer_takes_what_its_batches_took(tmp_path):
    train_s = trainer_of(measured_steps(build(tmp_path / "a")))
    assert train_s(200) == pytest.approx(7)


def test_engines_that_are_fast_leave_the_trainers_time(tmp_path):
    # 7 s of training, 2 s of staging and a hold of 1 s for each of the two steps between the batches.
    fast = Cluster(EngineCurve(0.001, 0.0), 2, 8, True)
    measured_s, simulated_s, batches = play_separate(build(tmp_path / "a"), ADMISSION, Scheduling(), fast, groups=6)
    assert measured_s == pytest.approx(32) and simulated_s == pytest.approx(20, abs=0.01)
    assert [batch.tokens for batch in batches] == [200, 200]


def test_engines_that_are_slow_make_the_trainer_wait(tmp_path):
    # 50 steps of 1 s for every batch of two groups, which run beside those of the next batch.
    slow = Cluster(EngineCurve(1.0, 0.0), 2, 2, True)
    _, simulated_s, _ = play_separate(build(tmp_path / "a"), ADMISSION, Scheduling(), slow, groups=6)
    assert simulated_s > 2 * 45


def test_replay_of_a_run_without_its_config_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"config\.yaml is missing: it says how the run was scheduled"):
        replay(build(tmp_path / "a"))


def test_replay_takes_a_run_in_the_placement_that_it_had(tmp_path, monkeypatch):
    run = build(tmp_path / "a")
    OmegaConf.save({}, tmp_path / "a" / "config.yaml")
    settings = type("Settings", (), {"enable": True, "adapts_overlap": False, "group_filter": None, "drain": True})()
    settings.scheduling, settings.slots_per_replica, settings.resume_kv = Scheduling(), 8, "keep"
    monkeypatch.setattr("recipe.partial_rollout.tools.replay.PartialRolloutConfig.from_config", lambda _: settings)
    monkeypatch.setattr("recipe.partial_rollout.tools.replay.Admission.of", lambda _: ADMISSION)
    monkeypatch.setattr("recipe.partial_rollout.tools.replay.fit", lambda calls: EngineCurve(0.001, 0.0))
    found = replay(run)
    assert (found.measured_ms, found.forecast_ms) == (pytest.approx(80e3), pytest.approx(50e3, rel=0.01))
