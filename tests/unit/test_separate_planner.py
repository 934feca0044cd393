"""Separate placement's simulation against figures worked out by hand, and its forecasts against the recipe's promises."""

import numpy as np
import pytest

from recipe.partial_rollout.config.choices import Mode, SchedulingPolicy
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import Cluster, EngineCurve
from recipe.partial_rollout.planner.replica_model import Decoding, ReplicaModel
from recipe.partial_rollout.planner.rounds import SeparateTrainer, Simulation, WeightUpdate
from recipe.partial_rollout.planner.samples import LengthTrace, lognormal
from recipe.partial_rollout.planner.separate import (
    Devices,
    TrainerRate,
    balanced,
    best_split,
    forecast_separate,
)

FREE = WeightUpdate(0.0, 0.0)
LENGTHS = lognormal(median=100, mean=160, cap=1600, samples_per_group=4)


def build_admission(*, batch=4, n=2, overlap=1.0, max_staleness=4):
    return Admission(Mode.WINDOW, batch, n, overlap, 2 * batch, batch * n, max_staleness)


def play(lengths, count, *, batch=1, n=1, overlap=1.0, max_staleness=4, replicas=1, train_s=0.0, update=FREE, **engine):
    """Steps of 1 s a decoding step, with lengths in their order."""
    curve = EngineCurve(1.0, 0.0, prefill_s=engine.pop("prefill_s", 0.0))
    cluster = Cluster(curve, replicas, engine.pop("slots", 8), **engine)
    admission = build_admission(batch=batch, n=n, overlap=overlap, max_staleness=max_staleness)
    trace = LengthTrace(np.array(lengths))
    trainer = SeparateTrainer(lambda tokens: train_s, update)
    simulation = Simulation(admission, Scheduling(), cluster, trace, trainer, seed=None, groups=len(lengths))
    return list(simulation.rounds(count))


def test_engines_decode_while_the_trainer_trains():
    # 0/0 and 0/1 start at 0 s; 0/0 is taken at 4 s, trains until 9 s, and 0/1 has ended by then.
    first, second = play([[4], [8]], 2, train_s=5.0)
    assert (first.seconds, first.waiting_s) == (9.0, 4.0)
    assert (second.seconds, second.waiting_s) == (5.0, 0.0)
    assert second.batch.staleness.tolist() == [[1]] and second.batch.token_ages == 8


def test_all_engines_stand_still_for_the_weights_once_their_step_has_ended():
    # 0/0 ends at 4 s and trains until 6.5 s; the step of 0/1 ends at 7 s, and the load at 9 s.
    first, second = play([[4], [10]], 2, train_s=2.0, update=WeightUpdate(0.5, 2.0))
    assert (first.seconds, first.held_s) == (9.0, 2.0)
    # 3 tokens are left of 0/1.
    assert second.waiting_s == 3.0 and second.batch.token_ages == 7


def test_cleared_cache_is_prefilled_after_the_load():
    kept, cleared = (
        play([[4], [10]], 2, train_s=2.0, update=WeightUpdate(0.5, 2.0), prefill_s=1.0, keeps_kv=keeps)
        for keeps in (True, False)
    )
    assert cleared[1].waiting_s == kept[1].waiting_s + 7, "seven tokens of context"


def test_held_samples_know_what_they_have_made():
    replica = ReplicaModel(EngineCurve(1.0, 0.0, prefill_s=0.5))
    sample = Decoding("a", context=10, left=6)
    replica.add(sample, reads=False)
    replica.advance(3.5)
    replica.hold(9.0, reads=True)
    assert (sample.context, sample.left, replica.clock) == (14, 2, 16.0)
    assert replica.run_to_event() == ["a"] and replica.clock == 18.0


@pytest.mark.parametrize("policy", SchedulingPolicy)
@pytest.mark.parametrize("train_s", [0.1, 3.0])
def test_every_group_is_trained_once_within_the_bound(policy, train_s):
    lengths = lognormal(median=60, mean=100, cap=900, samples_per_group=2, groups=40)
    cluster = Cluster(EngineCurve(1e-2, 1e-4, kv_tokens=2_000), replicas=2, slots_per_replica=4)
    admission = build_admission(max_staleness=2)
    trainer = SeparateTrainer(lambda _: train_s, WeightUpdate(0.1, 0.1))
    simulation = Simulation(admission, Scheduling(policy), cluster, lengths, trainer, seed=None, groups=40)
    steps = list(simulation.rounds(100))
    trained = np.concatenate([step.batch.lengths for step in steps])
    assert len(steps) == 10 and sorted(map(tuple, trained)) == sorted(map(tuple, lengths.groups))
    assert max(step.batch.staleness.max() for step in steps) <= 2


def test_without_staleness_the_sides_take_turns():
    steps = play([[3], [5], [2]], 3, overlap=0.0, max_staleness=0, train_s=4.0, update=WeightUpdate(0.0, 1.0))
    assert [step.seconds for step in steps] == [3 + 4 + 1, 5 + 4 + 1, 2 + 4 + 1]
    assert not any(step.batch.token_ages for step in steps)


def build_devices(*, replicas=8, token_s=1e-3, fixed_s=0.0, update=FREE):
    return Devices(replicas, 1, TrainerRate(fixed_s, token_s), update)


def made_with(devices, *, overlap=1.0, steps=12):
    cluster = Cluster(EngineCurve(3e-3, 1e-4), devices.replicas, 64)
    admission = build_admission(batch=16, n=4, overlap=overlap, max_staleness=8)
    return lambda engines: forecast_separate(
        admission, Scheduling(), cluster, LENGTHS, devices, engines, warmup=4, steps=steps
    )


def test_mean_staleness_is_the_overlap_here_too():
    made = made_with(build_devices(), steps=40)
    assert made(4).staleness_mean == pytest.approx(1.0, rel=0.15)
    assert made_with(build_devices(), overlap=2.0, steps=40)(4).staleness_mean == pytest.approx(2.0, rel=0.15)


def test_slow_trainer_leaves_engines_idle_and_a_fast_one_waits():
    slow, fast = (made_with(build_devices(token_s=token_s))(4) for token_s in (5e-3, 1e-5))
    assert slow.trainer_idle < 0.01 and slow.engine_idle > 0.5
    assert fast.trainer_idle > 0.9 and fast.engine_idle < 0.1
    assert slow.step_s == pytest.approx(slow.train_s, rel=0.01)


def test_best_split_is_the_fastest_of_all():
    devices = build_devices(token_s=4e-4)
    made = made_with(devices)
    speeds = {engines: made(engines).trained_tokens_per_s for engines in range(1, 8)}
    for start in (1, 7, balanced(devices, 2.0, 10_000)):
        best, seen = best_split(made, start, 7)
        assert speeds[best.engines] == max(speeds.values())
        assert best in seen and best.engines + best.trainers == 8
