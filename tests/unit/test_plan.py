"""The model of the engine, and the simulations, against figures worked out by hand and the recipe's promises; ``plan``."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from recipe.partial_rollout.config.settings import Scheduling, SchedulingPolicy
from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.tools import plan
from recipe.partial_rollout.tools.plan import Option, advice
from recipe.partial_rollout.tools.planner.engine_curve import Cluster, EngineCurve, fit
from recipe.partial_rollout.tools.planner.lengths import LengthTrace
from recipe.partial_rollout.tools.planner.replica_model import Decoding, ReplicaModel
from recipe.partial_rollout.tools.planner.rounds import Forecast, Simulation, forecast
from recipe.partial_rollout.tools.run_record import load_run
from tests.studies.replay import TOLERANCE
from tests.unit.runs import build_group, build_round, build_run, interrupted_run, separate_run
from tests.unit.shared import settings_of

RNG = np.random.default_rng
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
        ends += [(round(replica.clock, 9), sample_id) for sample_id in replica.run_to_end()]
    return ends


def test_replica_decodes_by_its_curve_and_prefills_what_was_not_kept():
    replica = ReplicaModel(EngineCurve(step_s=1.0, sample_s=0.5))
    for name, length in (("a", 2), ("b", 5)):
        replica.add(Decoding(name, 10, length))
    # Two steps of 2.0 s with both, then three of 1.5 s.
    assert run_all(replica) == [(4.0, "a"), (8.5, "b")]
    for reads, seconds in ((True, 1.0 + 2.0), (False, 2.0)):
        replica = ReplicaModel(EngineCurve(step_s=1.0, sample_s=0.0, prefill_s=0.1))
        replica.add(Decoding("a", 10, 2), reads=reads)
        assert run_all(replica) == [(seconds, "a")]


def played(curve, *, rounds, samples, mu=5.0, most_context=0, late_s=0.0):
    """The calls of ``rounds`` rounds whose samples all start at once; the first round's take ``late_s`` longer."""
    calls, rng = [], RNG(0)
    for start in range(0, 100 * rounds, 100):
        engine, made = ReplicaModel(curve), {}
        for i in range(samples):
            context = int(rng.integers(0, most_context)) if most_context else 0
            made[f"s{i}"] = int(rng.lognormal(mu, 1) + 1), context
            engine.add(Decoding(f"s{i}", context, made[f"s{i}"][0]))
        for end, name in run_all(engine):
            tokens, context = made[name]
            calls.append(call(0, start, start + end + late_s * (start == 0), tokens, context, context))
    return calls


def test_calls_that_waited_for_a_compilation_do_not_bend_the_curve():
    curve = EngineCurve(2e-3, 1e-4)
    # The first round took fifty times as long; least squares alone is off by half.
    found = fit(played(curve, rounds=24, samples=48, mu=4.0, late_s=10.0))
    assert found.decode_s(24, 0) == pytest.approx(curve.decode_s(24, 0), rel=0.15)


@pytest.mark.parametrize(
    ("curve", "load"),
    [
        (EngineCurve(2e-3, 1e-4), {"rounds": 2, "samples": 64}),
        (EngineCurve(3e-3, 1e-4, context_s=2e-7), {"rounds": 8, "samples": 48, "most_context": 800}),
    ],
)
def test_curve_is_recovered_from_the_calls_of_an_engine_that_follows_it(curve, load):
    calls = played(curve, **load)
    found = fit(calls)
    for name, least in (("step_s", 1e-6), ("sample_s", 1e-7), ("context_s", 1e-8)):
        assert getattr(found, name) == pytest.approx(getattr(curve, name), rel=0.1, abs=least), name
    # Had the calls waited in the engine's queue before, it would have run no sample more.
    queued = [structs.replace(each, start=each.start - 3.0, queued_s=3.0) for each in calls]
    assert fit(queued).step_s == pytest.approx(found.step_s, rel=1e-6)


def scattered():
    """Calls whose durations have nothing to do with their tokens."""
    rng = RNG(0)
    starts = np.cumsum(rng.exponential(1.0, 200))
    return [call(0, at, at + rng.lognormal(1, 2), int(rng.lognormal(4, 2)) + 1) for at in starts]


DEGENERATE = {
    "at least 16 are needed": [call(0, 0.0, 1.0, 10), call(0, 1.0, 3.0, 20)],
    "all with 4 to 4 samples running": [call(0, 2.0 * (i // 4), 2.0 * (i // 4) + 1, 10) for i in range(40)],
    "would decode no more tokens a second than": played(EngineCurve(1e-9, 3e-4), rounds=2, samples=64),
    "would take no longer for a step than": played(EngineCurve(5e-3, 0.0), rounds=2, samples=64),
    "half of them took over": scattered(),
}


@pytest.mark.parametrize("why", DEGENERATE)
def test_degenerate_fit_is_refused_with_its_reason_and_a_remedy(why):
    remedy = "Give --run a longer noPR run of this job, or --curve"
    with pytest.raises(ValueError, match=rf"^no engine curve from \d+ engine calls.*{why}.*{remedy}$"):
        fit(DEGENERATE[why])


# -- rounds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduling", [*POLICIES, Scheduling(overtake=0)], ids=str)
def test_simulation_trains_every_group_once_within_the_bound(scheduling):
    lengths = LengthTrace.lognormal(median=60, mean=100, cap=900, samples_per_group=2, groups=40)
    cluster = Cluster(EngineCurve(1e-2, 1e-4), replicas=2, slots_per_replica=4)
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


# -- what it recommends, prints and refuses ----------------------------------------------------------------------------

SMOLLM = Path(__file__).parents[2] / "tests" / "studies" / "results" / "smollm_noPR"
LOGNORMAL = ["--lognormal", "300", "360", "1838", "--batch", "8", "--group", "4", "--slots", "16"]


def test_plan_from_a_distribution_calls_a_preset_and_a_given_curve_assumed(capsys, tmp_path):
    saved = tmp_path / "curve.json"
    saved.write_text('{"step_s": 0.008, "sample_s": 0.00007}')
    for curve in ("h100-qwen3-4b", str(saved)):
        assert plan.main([*LOGNORMAL, "--replicas", "2", "--overlaps", "1", "--curve", curve]) == 0
        out = capsys.readouterr().out
        assert f"engine curve: ASSUMED ({curve}), not measured" in out
        assert "recommended: partial_rollout.overlap=1, " in out and " of noPR's rollout time" in out
        assert "rollout / noPR" in out and "step / noPR" not in out


def test_plan_of_a_run_forecasts_what_its_pr_run_measured(capsys):
    """tests/studies/results/log.md, SmolLM2: PR took 70 of noPR's 134 s for the same groups, at a staleness of .92."""
    record = load_run(SMOLLM)
    settings, cluster, lengths, _ = plan.inputs(plan.parser().parse_args(["--run", str(SMOLLM)]), record)
    outside_s = plan.seconds_outside_rollout(record)
    nopr, pr = plan.plans_of(settings, cluster, lengths, [1.0], outside_s)
    assert (nopr.rollout, nopr.step) == (1, 1)
    assert pr.rollout == pytest.approx(70 / 134, rel=TOLERANCE)
    assert pr.forecast.staleness_mean == pytest.approx(0.92, rel=TOLERANCE)
    # The update is most of this run's step, and stays.
    alone = 1 / nopr.forecast.trained_tokens_per_s
    assert pr.step == pytest.approx((pr.rollout * alone + outside_s) / (alone + outside_s)) and pr.step > 0.85
    assert plan.main(["--run", str(SMOLLM), "--overlaps", "1"]) == 0
    out = capsys.readouterr().out
    assert f"engine curve: fitted to the engine calls of {SMOLLM}" in out and "ASSUMED" not in out
    assert " of noPR's step time; it is the largest" in out


def options(times):
    """noPR and plans by overlap, with the relative times of their steps."""
    made = {0.0: 1.0, **times}
    return [Option(overlap, Forecast(1.0, 1.0, overlap, 2 * overlap), time, time) for overlap, time in made.items()]


def test_smallest_overlap_that_no_tested_one_beats_by_much_is_recommended():
    said = advice(options({0.5: 0.8, 1.0: 0.62, 1.5: 0.6, 3.0: 0.3}), 8)
    assert said.startswith(
        "recommended: partial_rollout.overlap=1, max_staleness=8: 0.62 of noPR's step time; a larger "
    )
    assert "a mean staleness of 1.00" in said
    # A first overlap that saves little does not hide that a larger one pays.
    said = advice(options({0.5: 0.99, 1.0: 0.8, 1.5: 0.7}), 4)
    assert "overlap=1.5, max_staleness=4: 0.70" in said and "the largest of --overlaps" in said
    assert advice(options({1.0: 0.97}), 4).startswith("recommended: noPR (partial_rollout.enable=False)")
    for times, bound in (({2.0: 0.5, 3.0: 0.4}, 8), ({1.0: 0.5}, 9)):
        assert advice(options(times), bound).startswith("nothing to recommend: ")


@pytest.mark.parametrize(
    ("option", "values", "least"),
    [
        ("overlaps", ("-1", "0", "inf", "many"), "above 0"),
        *((size, ("0",), "an integer of at least 1") for size in ("batch", "group", "replicas", "slots")),
    ],
)
def test_number_that_is_none_is_refused(capsys, option, values, least):
    for value in values:
        with pytest.raises(SystemExit) as caught:
            plan.main([*LOGNORMAL, f"--{option}={value}"])
        assert caught.value.code == 2
        assert f"error: argument --{option}: {value}: {least}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "4"], "no lengths: give --run or --lognormal"),
        ([], "--group is missing: set it, or give --run RUN_DIR"),
        ([*LOGNORMAL, "--replicas", "2"], "no engine curve: give --run or --curve"),
        ([*LOGNORMAL, "--replicas", "2", "--curve", __file__], f"{__file__} is no engine curve"),
        (["--run", "/nowhere"], "/nowhere: no such directory"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_line(capsys, arguments, message):
    assert plan.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_configuration_that_a_dying_process_left_torn_is_named(tmp_path, capsys):
    path = interrupted_run(tmp_path / "run")
    for content in (b"partial_rollout: [1,", b"\xff\xfe\xfd", b"partial_rollout: {max_staleness: x}"):
        (path / "config.yaml").write_bytes(content)
        assert plan.main(["--run", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {path}/config.yaml cannot be read (")


def test_run_that_the_simulation_cannot_play_is_refused(tmp_path, capsys):
    assert plan.main(["--run", str(separate_run(tmp_path / "separate"))]) == 2
    assert "give a run with placement=colocated" in capsys.readouterr().err
    calls = [(0, start, start + 2, 20, 0, 0, 10, 0.0, "0/0#0", False) for start in (0, 6)]
    rounds = [build_round(1, start=0, end=10, calls=calls, trained=[build_group(0, [20])])]
    assert plan.main(["--run", str(build_run(tmp_path / "a", rounds=rounds))]) == 2
    assert "samples waited 4 s between turns and decoded 4 s; the simulation plays no tools" in capsys.readouterr().err
    # Of 30 conversations four wait 1 s: too little to matter.
    record = load_run(interrupted_run(tmp_path / "b"))
    assert LengthTrace.of_run(record).groups.shape == (6, 4)
