"""The model of the engine and the simulations against figures worked out by hand and against the recipe's own promises."""

import numpy as np
import pytest
from msgspec import structs

from recipe.partial_rollout.config.settings import Scheduling, SchedulingPolicy
from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.tools.planner.engine_curve import Cluster, EngineCurve, fit
from recipe.partial_rollout.tools.planner.lengths import LengthTrace
from recipe.partial_rollout.tools.planner.replica_model import Decoding, ReplicaModel
from recipe.partial_rollout.tools.planner.rounds import Simulation, forecast, smallest_worthwhile
from tests.unit.shared import settings_of

LENGTHS = LengthTrace.lognormal(median=100, mean=160, cap=1600, samples_per_group=4)
POLICIES = [Scheduling(policy) for policy in SchedulingPolicy]


def call(replica, start, end, tokens, resumed_tokens=0, context_tokens=0):
    return EngineCall(str(replica), start, end, tokens, 0, resumed_tokens, context_tokens)


def sized(batch=4, n=2, overlap=1.0, max_staleness=4, scheduling=Scheduling()):  # noqa: B008 - frozen
    return settings_of(batch, n, overlap=overlap, max_staleness=max_staleness, scheduling=scheduling)


def run_all(replica):
    """(clock, id) of every end."""
    ends = []
    while len(replica):
        ends += [(round(replica.clock, 9), sample_id) for sample_id in replica.run_to_event()]
    return ends


def test_replica_decodes_by_its_curve_and_prefills_a_context_whose_blocks_were_not_kept():
    replica = ReplicaModel(EngineCurve(step_s=1.0, sample_s=0.5))
    for name, length in (("a", 2), ("b", 5)):
        replica.add(Decoding(name, 10, length))
    # Two steps of 2.0 s with both, then three of 1.5 s.
    assert run_all(replica) == [(4.0, "a"), (8.5, "b")]
    for reads, seconds in ((True, 1.0 + 2.0), (False, 2.0)):
        replica = ReplicaModel(EngineCurve(step_s=1.0, sample_s=0.0, prefill_s=0.1))
        replica.add(Decoding("a", 10, 2), reads=reads)
        assert run_all(replica) == [(seconds, "a")]


def test_interruption_lets_the_running_step_end_and_gives_back_what_is_left():
    # Contexts that grow make steps longer.
    curve = EngineCurve(step_s=1.0, sample_s=0.2, context_s=0.01)
    for steps in (1, 7, 40):
        timed, cut = ReplicaModel(curve), ReplicaModel(curve)
        timed.add(Decoding("a", 5, steps))
        cut.add(Decoding("a", 5, 100))
        timed.run_to_event()
        (sample,) = cut.interrupt(timed.clock - 1e-6)
        assert (sample.context, sample.left, len(cut)) == (5 + steps, 100 - steps, 0)


def test_samples_that_do_not_fit_wait_and_the_youngest_makes_room():
    replica = ReplicaModel(EngineCurve(step_s=1.0, sample_s=0.0, kv_tokens=30))
    for name in ("old", "young", "waits"):
        replica.add(Decoding(name, 10, 8))
    ends = run_all(replica)
    # Both contexts grow to 15 in five steps; the young one then waits until the old one is through.
    assert [name for _, name in ends] == ["old", "young", "waits"]
    assert ends[0][0] == 8.0 and ends[1][0] == pytest.approx(8.0 + 3.0)


def play_calls(curve, rng, *, rounds, samples, mu=5.0, most_context=0):
    """(round, end, tokens, context) of every call of ``rounds`` rounds whose samples all start at once."""
    for round_ in range(rounds):
        engine, made = ReplicaModel(curve), {}
        for i in range(samples):
            context = int(rng.integers(0, most_context)) if most_context else 0
            made[f"s{i}"] = int(rng.lognormal(mu, 1) + 1), context
            engine.add(Decoding(f"s{i}", context, made[f"s{i}"][0]))
        for end, name in run_all(engine):
            yield round_, end, *made[name]


@pytest.mark.parametrize(
    ("curve", "load"),
    [
        (EngineCurve(2e-3, 1e-4), {"rounds": 2, "samples": 64}),
        (EngineCurve(5e-3, 0.0), {"rounds": 2, "samples": 64}),
        (EngineCurve(1e-9, 3e-4), {"rounds": 2, "samples": 64}),
        (EngineCurve(3e-3, 1e-4, context_s=2e-7), {"rounds": 8, "samples": 48, "most_context": 800}),
        (EngineCurve(2e-3, 1e-4, prefill_s=5e-5), {"rounds": 48, "samples": 8, "most_context": 2000}),
    ],
)
def test_curve_is_recovered_from_the_calls_of_an_engine_that_follows_it(curve, load):
    played = play_calls(curve, np.random.default_rng(0), **load)
    calls = [call(0, 100.0 * at, 100.0 * at + end, made, read, read) for at, end, made, read in played]
    found = fit(calls)
    for name, least in (("step_s", 1e-6), ("sample_s", 1e-7), ("context_s", 1e-8), ("prefill_s", 1e-6)):
        assert getattr(found, name) == pytest.approx(getattr(curve, name), rel=0.1, abs=least), name
    # Had the calls waited in the engine's queue before, it would have run no sample more.
    queued = [structs.replace(each, start=each.start - 3.0, queued_s=3.0) for each in calls]
    assert fit(queued).step_s == pytest.approx(found.step_s, rel=1e-6)


def test_calls_that_waited_for_a_compilation_do_not_bend_the_curve():
    curve = EngineCurve(2e-3, 1e-4)
    # The first round took fifty times as long; least squares alone is off by half.
    found = fit(
        [
            call(0, 100.0 * at, 100.0 * at + 10.0 * (at == 0) + end, tokens)
            for at, end, tokens, _ in play_calls(curve, np.random.default_rng(0), rounds=24, samples=48, mu=4.0)
        ]
    )
    for running in (12, 24, 48):
        assert found.decode_s(running, 0) == pytest.approx(curve.decode_s(running, 0), rel=0.15)


def test_calls_under_one_load_show_no_curve():
    with pytest.raises(ValueError, match="all engine calls ran beside 1 samples"):
        fit([call(0, 0.0, 1.0, 10), call(0, 1.0, 3.0, 20)])


# -- rounds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduling", [*POLICIES, Scheduling(overtake=0)], ids=str)
def test_simulation_trains_every_group_once_within_the_bound(scheduling):
    lengths = LengthTrace.lognormal(median=60, mean=100, cap=900, samples_per_group=2, groups=40)
    cluster = Cluster(EngineCurve(1e-2, 1e-4, kv_tokens=2_000), replicas=2, slots_per_replica=4)
    settings = sized(max_staleness=2, scheduling=scheduling)
    simulation = Simulation(settings, cluster, lengths, seed=None, groups=40)
    rounds = list(simulation.rounds(100))
    assert list(simulation.rounds(100)) == []
    trained = np.concatenate([round_.lengths for round_ in rounds])
    assert len(rounds) == 10 and sorted(map(tuple, trained)) == sorted(map(tuple, lengths.groups))
    assert max(round_.staleness.max() for round_ in rounds) <= 2


@pytest.mark.parametrize("scheduling", POLICIES, ids=str)
def test_mean_staleness_is_the_overlap_while_every_sample_has_a_slot(scheduling):
    # Little's law. With overtake 0 rounds can be complete at once, and what they admit has not started yet.
    cluster = Cluster(EngineCurve(3e-3, 1e-4), replicas=2, slots_per_replica=96)
    for overlap in (0.5, 2.0):
        settings = sized(16, 4, overlap, max_staleness=12, scheduling=scheduling)
        made = forecast(settings, cluster, LENGTHS, rounds=40)
        assert made.staleness_mean == pytest.approx(overlap, rel=0.15)


def test_smallest_overlap_whose_next_step_does_not_pay():
    speeds = [(0.0, 100.0), (0.5, 150.0), (1.0, 160.0), (2.0, 161.0)]
    assert [smallest_worthwhile(speeds, least) for least in (0.05, 0.10, 0.001)] == [1.0, 0.5, 2.0]
