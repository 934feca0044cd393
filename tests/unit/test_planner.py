"""The model of the engine against figures worked out by hand, and the simulation against the recipe's own promises."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from recipe.partial_rollout.config.choices import Mode, SchedulingPolicy
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import PRESETS, Cluster, CurveError, EngineCurve, fit
from recipe.partial_rollout.planner.replica_model import Decoding, ReplicaModel
from recipe.partial_rollout.planner.rounds import Simulation, baseline, forecast, smallest_worthwhile
from recipe.partial_rollout.planner.samples import LengthTrace, lognormal
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.tools.plan import main as plan


def call(replica, start, end, tokens, resumed_tokens=0, context_tokens=0):
    return EngineCall(str(replica), start, end, tokens, 0, resumed_tokens, context_tokens)


def build_admission(*, batch=4, n=2, overlap=1.0, max_staleness=4):
    return Admission(Mode.WINDOW, batch, n, overlap, 2 * batch, batch * n, max_staleness)


def run_all(replica):
    """(clock, id) of every end."""
    ends = []
    while len(replica):
        ends += [(round(replica.clock, 9), sample_id) for sample_id in replica.run_to_event()]
    return ends


def test_replica_decodes_by_its_curve():
    replica = ReplicaModel(EngineCurve(step_s=1.0, sample_s=0.5))
    for name, length in (("a", 2), ("b", 5)):
        replica.add(Decoding(name, 10, length))
    # Two steps of 2.0 s with both, then three of 1.5 s.
    assert run_all(replica) == [(4.0, "a"), (8.5, "b")]


def test_context_is_prefilled_unless_its_blocks_were_kept():
    for reads, seconds in ((True, 1.0 + 2.0), (False, 2.0)):
        replica = ReplicaModel(EngineCurve(step_s=1.0, sample_s=0.0, prefill_s=0.1))
        replica.add(Decoding("a", 10, 2), reads=reads)
        assert run_all(replica) == [(seconds, "a")]


def test_interruption_lets_the_running_step_end_and_gives_back_what_is_left():
    replica = ReplicaModel(EngineCurve(step_s=1.0, sample_s=0.0))
    replica.add(Decoding("a", 3, 10))
    (sample,) = replica.interrupt(4.5)
    assert (sample.context, sample.left, replica.clock, len(replica)) == (3 + 5, 10 - 5, 5.0, 0)


def test_interruption_with_growing_contexts_agrees_with_the_time_of_its_steps():
    curve = EngineCurve(step_s=1.0, sample_s=0.2, context_s=0.01)
    for steps in (1, 7, 40):
        timed, cut = ReplicaModel(curve), ReplicaModel(curve)
        for replica in (timed, cut):
            replica.add(Decoding("a", 5, steps if replica is timed else 100))
        timed.run_to_event()
        (sample,) = cut.interrupt(timed.clock - 1e-6)
        assert sample.left == 100 - steps


def test_samples_that_do_not_fit_wait_and_the_youngest_makes_room():
    replica = ReplicaModel(EngineCurve(step_s=1.0, sample_s=0.0, kv_tokens=30))
    for name in ("old", "young", "waits"):
        replica.add(Decoding(name, 10, 8))
    ends = run_all(replica)
    # Both contexts grow to 15 in five steps; the young one then waits until the old one is through.
    assert [name for _, name in ends] == ["old", "young", "waits"]
    assert ends[0][0] == 8.0 and ends[1][0] == pytest.approx(8.0 + 3.0)


@pytest.mark.parametrize("curve", [EngineCurve(2e-3, 1e-4), EngineCurve(5e-3, 0.0), EngineCurve(1e-9, 3e-4)])
def test_curve_is_recovered_from_the_calls_of_an_engine_that_follows_it(curve):
    rng = np.random.default_rng(0)
    calls = []
    for replica in range(2):
        engine = ReplicaModel(curve)
        lengths = {f"s{i}": int(length) for i, length in enumerate(rng.lognormal(5, 1, 64) + 1)}
        for name, length in lengths.items():
            engine.add(Decoding(name, 0, length))
        calls += [call(replica, 0.0, end, lengths[name]) for end, name in run_all(engine)]
    found = fit(calls)
    assert found.step_s == pytest.approx(curve.step_s, rel=0.01, abs=1e-6)
    assert found.sample_s == pytest.approx(curve.sample_s, rel=0.01, abs=1e-7)
    # Had the calls waited in the engine's queue before, it would have run no sample more.
    queued = [replace(each, start=each.start - 3.0, queued_s=3.0) for each in calls]
    assert fit(queued).step_s == pytest.approx(found.step_s, rel=1e-6)


def test_delay_beside_next_to_nothing_read_is_no_cost_of_reading():
    """With kept blocks a resumption reads a few tokens, and takes some milliseconds for other reasons."""
    ends = np.cumsum(np.full(40, 0.5))
    calls = [call(0, end - 0.5, end, 100 if i % 2 else 90, 0 if i % 2 else 3) for i, end in enumerate(ends)]
    calls += [call(0, end - 0.5, end - 0.2, 50, 0) for end in ends[:20]]
    assert fit(calls).prefill_s == 0.0


def test_cost_of_reading_again_is_recovered_too():
    curve = EngineCurve(2e-3, 1e-4, prefill_s=5e-5)
    rng = np.random.default_rng(0)
    contexts = {f"s{i}": int(context) for i, context in enumerate(rng.integers(0, 2000, 48))}
    engine, starts, calls = ReplicaModel(curve), {}, []
    for i, (name, context) in enumerate(contexts.items()):
        # Half of them start at once, the others as those end.
        if i < 24:
            starts[name] = engine.clock
            engine.add(Decoding(name, context, int(rng.integers(50, 400))))
    waiting = list(contexts)[24:]
    lengths = {}
    while len(engine):
        for name in engine.run_to_event():
            calls.append((name, starts[name], engine.clock))
            if waiting:
                follower = waiting.pop()
                starts[follower] = engine.clock
                lengths[follower] = int(rng.integers(50, 400))
                engine.add(Decoding(follower, contexts[follower], lengths[follower]))
    rng = np.random.default_rng(0)
    rng.integers(0, 2000, 48)
    first = {f"s{i}": int(rng.integers(50, 400)) for i in range(24)}
    spans = [call(0, start, end, (first | lengths)[name], contexts[name]) for name, start, end in calls]
    found = fit(spans)
    assert found.prefill_s == pytest.approx(curve.prefill_s, rel=0.15)
    assert found.step_s + 24 * found.sample_s == pytest.approx(curve.step_s + 24 * curve.sample_s, rel=0.1)


@pytest.mark.parametrize("noted", [True, False])
def test_cost_of_long_contexts_is_told_apart_where_calls_say_how_long_theirs_were(noted):
    curve, rng, calls = EngineCurve(3e-3, 1e-4, context_s=2e-7), np.random.default_rng(0), []
    for round_ in range(8):
        engine = ReplicaModel(curve)
        samples = {f"s{i}": tuple(map(int, (rng.integers(0, 800), rng.lognormal(5, 1) + 1))) for i in range(48)}
        for name, (context, length) in samples.items():
            engine.add(Decoding(name, context, length))
        for end, name in run_all(engine):
            context, length = samples[name]
            resumed = 10 if context > 400 else 0
            calls.append(call(0, 100.0 * round_, 100.0 * round_ + end, length, resumed, context if noted else None))
    found = fit(calls)
    assert found.context_s == (pytest.approx(2e-7, rel=0.1) if noted else 0.0)
    if noted:
        assert found.step_s == pytest.approx(3e-3, rel=0.05) and found.sample_s == pytest.approx(1e-4, rel=0.05)


def test_calls_that_waited_for_a_compilation_do_not_bend_the_curve():
    curve, rng, calls = EngineCurve(2e-3, 1e-4), np.random.default_rng(0), []
    for round_ in range(24):
        engine = ReplicaModel(curve)
        lengths = {f"s{i}": int(length) for i, length in enumerate(rng.lognormal(4, 1, 48) + 1)}
        for name, length in lengths.items():
            engine.add(Decoding(name, 0, length))
        late = 10.0 * (round_ == 0)
        calls += [call(0, 100.0 * round_, 100.0 * round_ + late + end, lengths[name]) for end, name in run_all(engine)]
    # The first round took fifty times as long; least squares alone is off by half.
    for running in (12, 24, 48):
        assert fit(calls).decode_s(running, 0) == pytest.approx(curve.decode_s(running, 0), rel=0.15)


def test_calls_under_one_load_show_no_curve():
    with pytest.raises(CurveError, match="all engine calls ran beside 1 samples"):
        fit([call(0, 0.0, 1.0, 10), call(0, 1.0, 3.0, 20)])
    with pytest.raises(CurveError, match="fewer than two"):
        fit([])


def test_lognormal_lengths_have_the_median_and_mean_that_were_asked_for():
    trace = lognormal(median=300, mean=400, cap=100_000, samples_per_group=8, seed=1)
    assert np.median(trace.groups) == pytest.approx(300, rel=0.05) and trace.mean == pytest.approx(400, rel=0.05)
    logs = np.log(trace.groups)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.5, abs=0.05)
    assert lognormal(median=300, mean=400, cap=500, samples_per_group=2).groups.max() == 500
    with pytest.raises(ValueError, match="0 < median < mean"):
        lognormal(median=400, mean=300, cap=500, samples_per_group=2)


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_simulation_trains_every_group_once_within_the_bound(policy):
    lengths = lognormal(median=60, mean=100, cap=900, samples_per_group=2, groups=40)
    cluster = Cluster(EngineCurve(1e-2, 1e-4, kv_tokens=2_000), replicas=2, slots_per_replica=4)
    simulation = Simulation(build_admission(), Scheduling(policy), cluster, lengths, seed=None, groups=40)
    rounds = list(simulation.rounds(100))
    trained = np.concatenate([round_.batch.lengths for round_ in rounds])
    assert len(rounds) == 10 and sorted(map(tuple, trained)) == sorted(map(tuple, lengths.groups))
    assert max(round_.batch.staleness.max() for round_ in rounds) <= 4


def test_without_overlap_a_round_takes_as_long_as_its_slowest_sample():
    lengths = LengthTrace(np.array([[3, 9], [1, 2]]))
    cluster = Cluster(EngineCurve(1.0, 0.0), replicas=1, slots_per_replica=8)
    simulation = Simulation(baseline(build_admission(batch=2)), Scheduling(), cluster, lengths, seed=None)
    (first, second) = simulation.rounds(2)
    assert first.seconds == second.seconds == 9.0
    assert first.batch.on_policy_tokens == 15 and not first.batch.staleness.any()


@pytest.mark.parametrize("policy", [SchedulingPolicy.BOUNDED, SchedulingPolicy.SEED])
def test_mean_staleness_is_the_overlap_while_every_sample_has_a_slot(policy):
    # Little's law. Under in_order rounds can be complete at once, and what they admit has not started yet.
    lengths = lognormal(median=100, mean=160, cap=1600, samples_per_group=4)
    cluster = Cluster(EngineCurve(3e-3, 1e-4), replicas=2, slots_per_replica=96)
    for overlap in (0.5, 1.0, 2.0):
        admission = build_admission(batch=16, n=4, overlap=overlap, max_staleness=12)
        made = forecast(admission, Scheduling(policy), cluster, lengths, rounds=40)
        assert made.staleness_mean == pytest.approx(overlap, rel=0.15)


def test_overlap_pays_and_kept_blocks_pay_more():
    lengths = lognormal(median=100, mean=160, cap=1600, samples_per_group=4)
    curve = EngineCurve(3e-3, 1e-5, prefill_s=1e-4)
    cluster, kept = (Cluster(curve, 1, 256, keeps_kv=keeps) for keeps in (False, True))
    admission = build_admission(batch=16, n=4)
    speeds = [
        forecast(a, Scheduling(), c, lengths).trained_tokens_per_s
        for a, c in ((baseline(admission), cluster), (admission, cluster), (admission, kept))
    ]
    assert speeds[0] * 1.3 < speeds[1] < speeds[2]


def test_in_order_trains_without_length_bias():
    lengths = lognormal(median=100, mean=160, cap=1600, samples_per_group=4)
    cluster = Cluster(EngineCurve(3e-3, 1e-4), 1, 128)
    first = {
        policy: forecast(build_admission(batch=16, n=4), Scheduling(policy), cluster, lengths).first_length
        for policy in (SchedulingPolicy.BOUNDED, SchedulingPolicy.IN_ORDER)
    }
    assert first[SchedulingPolicy.BOUNDED] < 0.95 and first[SchedulingPolicy.IN_ORDER] == 1.0


def test_age_of_tokens_counts_each_by_its_own_version():
    # 0/0 makes 4 of its 8 tokens in round 0, 4 in round 1, and is trained at version 1; 0/1 and 0/2 are never stale.
    lengths = LengthTrace(np.array([[8], [4], [9]]))
    cluster = Cluster(EngineCurve(1.0, 0.0), replicas=1, slots_per_replica=4)
    simulation = Simulation(build_admission(batch=1, n=1, overlap=1.0), Scheduling(), cluster, lengths, seed=None)
    first, second = simulation.rounds(2)
    assert (first.batch.tokens, first.batch.token_ages) == (4, 0)
    assert (second.batch.tokens, second.batch.token_ages) == (8, 4)


def test_last_token_of_an_interrupted_step_ends_its_sample():
    # Both replicas end a sample in the same step; the first to be looked at completes the round.
    lengths = LengthTrace(np.array([[4], [4], [9], [9]]))
    cluster = Cluster(EngineCurve(1.0, 0.0), replicas=2, slots_per_replica=4)
    simulation = Simulation(build_admission(batch=1, n=1, overlap=1.0), Scheduling(), cluster, lengths, seed=None)
    first, second = simulation.rounds(2)
    assert first.seconds == 4.0 and first.batch.tokens == 4
    assert second.seconds == 0.0 and second.batch.on_policy_tokens == 0 and second.batch.lengths.tolist() == [[4]]


def test_rounds_end_with_the_data_however_often_they_are_asked_for():
    lengths = LengthTrace(np.array([[4], [9]]))
    cluster = Cluster(EngineCurve(1.0, 0.0), replicas=1, slots_per_replica=4)
    simulation = Simulation(build_admission(batch=1, n=1), Scheduling(), cluster, lengths, seed=None, groups=2)
    assert len(list(simulation.rounds(5))) == 2 and list(simulation.rounds(5)) == []


def test_smallest_overlap_whose_next_step_does_not_pay():
    speeds = [(0.0, 100.0), (0.5, 150.0), (1.0, 160.0), (2.0, 161.0)]
    assert smallest_worthwhile(speeds, 0.05) == 1.0
    assert smallest_worthwhile(speeds, 0.10) == 0.5
    assert smallest_worthwhile(speeds, 0.001) == 2.0


def test_group_size_of_lengths_must_be_the_runs():
    with pytest.raises(ValueError, match=r"groups of 4, rollout\.n is 2"):
        Simulation(
            build_admission(),
            Scheduling(),
            Cluster(EngineCurve(1, 1), 1, 1),
            LengthTrace(np.ones((3, 4), int)),
        )


PLAN = ["--lognormal", "300", "400", "3000", "--batch", "8", "--group", "4", "--replicas", "2", "--slots", "32"]


def test_plan_recommends_from_a_distribution_and_a_preset(capsys, tmp_path):
    arguments = [*PLAN, "--curve", "h100-qwen3-4b", "--overlaps", "0.5", "1", "--policies", "bounded"]
    assert plan([*arguments, "--json", str(tmp_path / "plan.json"), "--save-curve", str(tmp_path / "curve.json")]) == 0
    out = capsys.readouterr().out
    assert "recommended: partial_rollout.overlap=" in out and "noPR" in out
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert [(plan["policy"], plan["overlap"]) for plan in plans] == [("noPR", 0.0), ("bounded", 0.5), ("bounded", 1.0)]
    assert json.loads((tmp_path / "curve.json").read_text()) == asdict(PRESETS["h100-qwen3-4b"])
    again = [*arguments, "--curve", str(tmp_path / "curve.json"), "--json", str(tmp_path / "again.json")]
    assert plan(again) == 0
    assert json.loads((tmp_path / "again.json").read_text())["plans"] == plans


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --group is missing: give it, or --run"),
        (["--group", "4"], "error: no lengths: give --run or --lognormal"),
        (PLAN, "error: no engine curve: give --run or --curve"),
        (["--run", "/nowhere"], "error: /nowhere: no such directory"),
        (["--validate", "/nowhere"], "error: /nowhere: no such directory"),
    ],
)
def test_plan_without_its_input_ends_in_one_line(capsys, arguments, message):
    assert plan(arguments) == 2
    assert capsys.readouterr().out.startswith(message)


def test_plan_shows_speed_beside_the_bias_of_each_limit_on_overtaking(capsys, tmp_path):
    options = ["--overlaps", "1", "--policies", "in_order", "--overtake", "null", "0.5", "--rounds", "6"]
    arguments = [*PLAN, "--curve", "h100-qwen3-4b", *options, "--json", str(tmp_path / "plan.json")]
    assert plan(arguments) == 0
    out = capsys.readouterr().out
    assert "in_order 1, overtake 0.5" in out and "first 5 length" in out
    no_pr, in_order, limited = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert [no_pr["overtake"], in_order["overtake"], limited["overtake"]] == [None, None, 0.5]
    first, kept, overtaken = (option["forecast"]["first_length"] for option in (no_pr, in_order, limited))
    assert overtaken < kept == first == 1


@pytest.mark.parametrize("text", ["{}", "[1]", '{"step": 1}', "no json"])
def test_file_that_is_no_curve_ends_in_one_line(capsys, tmp_path, text):
    (tmp_path / "curve.json").write_text(text)
    assert plan([*PLAN, "--curve", str(tmp_path / "curve.json")]) == 2
    assert capsys.readouterr().out.startswith(f"error: {tmp_path / 'curve.json'} is no engine curve: ")
