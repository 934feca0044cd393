"""``overlap=auto`` finds the window that a known engine and known lengths call for, a notch at a time.

``python -m pytest tests/unit/test_overlap_search.py -m benchmarks -s`` prints the figures in docs/tuning.md: beside
hill-climbing on measured speed, in the planner's simulation.
"""

import functools
import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import Cluster, EngineCurve
from recipe.partial_rollout.planner.rounds import Simulation, forecast, smallest_worthwhile
from recipe.partial_rollout.planner.samples import lognormal
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.rollout.overlap import OverlapControl, OverlapDecision

LENGTHS = lognormal(median=100, mean=160, cap=1600, samples_per_group=4)
STEPPED = EngineCurve(step_s=1e-2, sample_s=1e-5)
"""a step costs the same with few samples as with many: what is in flight comes for nothing"""
LINEAR = EngineCurve(step_s=1e-9, sample_s=1e-4)
"""a sample decodes as fast alone as in company: nothing is gained by more of them"""


def call(start, end, tokens):
    return EngineCall("r", start, end, tokens, 0)


def calls_of(curve):
    """Calls under two loads, as fast as ``curve`` says."""
    spans = [call(0.0, 100 * curve.decode_s(1, 0), 100)]
    start = spans[0].end
    return [*spans, *[call(start, start + 100 * curve.decode_s(64, 0), 100) for _ in range(64)]]


def build_control(*, overlap=1.0, max_staleness=4, batch=16, notch=0.25):
    admission = Admission(Mode.WINDOW, batch, 4, overlap, 2 * batch, 4 * batch, max_staleness)
    return OverlapControl(admission, Scheduling(), lambda curve: Cluster(curve, 1, 256), notch=notch, min_gain=0.03)


def decided(control, calls, lengths):
    """What the control makes of a round."""
    control.observe(calls, lengths)
    control._pending.result(timeout=60)
    return control.poll()


def flush(control, curve, rounds=10):
    """Overlaps in force after each of ``rounds`` rounds."""
    rng, seen = np.random.default_rng(0), []
    for _ in range(rounds):
        decided(control, calls_of(curve), LENGTHS.groups[rng.integers(len(LENGTHS.groups), size=16)])
        seen.append(control.overlap)
    return seen


def test_window_grows_where_company_is_free_and_shrinks_where_it_buys_nothing():
    assert flush(build_control(overlap=0.5), STEPPED)[-1] >= 1.25
    assert flush(build_control(overlap=1.5), LINEAR)[-1] == 0.0


@pytest.mark.parametrize("curve", [STEPPED, LINEAR])
def test_no_round_changes_it_by_more_than_a_notch_or_leaves_its_limits(curve):
    overlaps = [1.0, *flush(build_control(max_staleness=2), curve)]
    assert all(abs(after - before) <= 0.25 for before, after in itertools.pairwise(overlaps))
    assert min(overlaps) >= 0 and max(overlaps) <= 2


@pytest.mark.parametrize(
    ("asked", "in_force"),
    [
        ("+ + +", [1.25, 1.5, 1.75]),
        ("+ - + -", [1.25, 1.25, 1.5, 1.5]),
        ("+ - = - -", [1.25, 1.25, 1.25, 1.25, 1.0]),
        ("- + + + -", [0.75, 0.75, 1.0, 1.25, 1.25]),
    ],
)
def test_it_turns_back_only_when_two_measurements_in_a_row_say_so(asked, in_force):
    control, seen = build_control(), []
    for ask in asked.split():
        step = {"+": 0.25, "-": -0.25, "=": 0.0}[ask]
        control.decide = lambda rounds, step=step: OverlapDecision(control.overlap + step, 0.0, 0.0, "measured")
        decided(control, [], [])
        seen.append(control.overlap)
    assert seen == in_force


def test_decision_says_why_and_its_gains_are_metrics():
    control = build_control()
    assert control.poll() is None
    decision = decided(control, calls_of(STEPPED), LENGTHS.groups[:64])
    assert decision.overlap == 1.25 and "a notch more gains" in decision.reason and "at least 3.0%" in decision.reason
    figures = control.metrics()
    assert figures["overlap_auto/target"] == 1.25 and figures["overlap_auto/gain_up"] == decision.gain_up > 0.03
    # A notch is a group at least.
    assert decided(build_control(batch=2, notch=0.1), calls_of(STEPPED), LENGTHS.groups[:64]).overlap == 1.5


@pytest.mark.parametrize("lengths", [[[10, 10, 10, 10]], [[1, 2, 3]]], ids=["no curve", "a forecast that fails"])
def test_calls_of_which_nothing_can_be_forecast_change_nothing(lengths):
    control = build_control()
    calls = [call(0.0, 1.0, 10)] if len(lengths[0]) == 4 else calls_of(STEPPED)
    assert decided(control, calls, lengths) is None
    assert control.overlap == 1.0 and control.metrics() == {"overlap_auto/target": 1.0}


# -- beside hill-climbing -------------------------------------------------------------------------------------------------

NOTCH, MIN_GAIN, ROUNDS, SEEDS = 0.25, 0.03, 36, 3
"""the defaults, the length of the quick start, and its repetitions"""
CASES = {
    # lengths and speeds of docs/quickstart/report.md
    "quick start": (
        Cluster(EngineCurve(step_s=7e-3, sample_s=2.7e-4), 1, 128, keeps_kv=True),
        lognormal(median=90, mean=142, cap=1536, samples_per_group=8),
        Admission(Mode.WINDOW, 8, 8, 0.25, 16, 64, 8),
    ),
    "company is free": (Cluster(STEPPED, 1, 256), LENGTHS, Admission(Mode.WINDOW, 16, 4, 0.5, 32, 64, 8)),
    "company buys nothing": (Cluster(LINEAR, 1, 256), LENGTHS, Admission(Mode.WINDOW, 16, 4, 1.5, 32, 64, 4)),
}
"""an engine, lengths and where the control starts"""


class NotedRounds(Simulation):
    """A simulation that notes its engine calls, stretches rounds by noise, and changes its overlap."""

    def __init__(self, case, overlap, noise, seed):
        cluster, lengths, admission = case
        super().__init__(replace(admission, overlap=overlap), Scheduling(), cluster, lengths, seed=seed)
        self._start, self._samples.start = self._samples.start, self._sample
        self._noise, self._rng = noise, np.random.default_rng(seed)
        self._clock, self._started, self._ended = 0.0, {}, []

    def play(self, overlap):
        """Calls and lengths of the next round at ``overlap``."""
        self._manager.set_overlap(overlap)
        self._started, self._ended = {}, []
        (played,) = self.rounds(1)
        slower = math.exp(self._noise * self._rng.standard_normal())
        calls = [
            EngineCall("r", self._clock + slower * start, self._clock + slower * end, tokens, 0)
            for start, end, tokens in self._ended
            if tokens
        ]
        self._clock += slower * played.seconds
        return calls, played.batch.lengths

    def _sample(self, grant):
        sample, resumed = self._start(grant)
        self._started[grant.sample_id] = self._replicas[0].clock, sample.made
        return sample, resumed

    def _finish(self, sample_id):
        self._note(sample_id)
        super()._finish(sample_id)

    def _interrupt(self, sample_id):
        self._note(sample_id)
        super()._interrupt(sample_id)

    def _note(self, sample_id):
        start, before = self._started[sample_id]
        self._ended.append((start, self._replicas[0].clock, self._samples.live[sample_id].made - before))


@dataclass
class HillClimb:
    """Tries one notch more or less and keeps it if the measured tokens/s say that it is worth it."""

    overlap: float
    most: float
    window: int
    """rounds that are measured at each overlap, after those in which a change works through"""
    _settling: int = 0
    _measured: list = field(default_factory=list)
    """(tokens, seconds) of the rounds at this overlap"""
    _before: float = 0.0
    """tokens/s at the overlap from which the trial started"""
    _trial: int = 0
    """notches from there: +1 or -1; 0: the overlap in force is no trial"""
    _next: int = 1

    def decide(self, calls, lengths):
        if self._settling:
            self._settling -= 1
            return
        seconds = max(call.end for call in calls) - min(call.start for call in calls) if calls else 0.0
        self._measured.append((sum(call.tokens for call in calls), seconds))
        if len(self._measured) < self.window:
            return
        tokens, seconds = np.sum(self._measured, axis=0)
        gain = tokens / seconds / self._before - 1 if self._before else 0.0
        if self._trial and not (gain >= MIN_GAIN if self._trial > 0 else gain > -MIN_GAIN / 2):
            # Back; the next trial goes the other way.
            moved, self._next, self._trial = -self._trial, -self._next, 0
        else:
            self._before = tokens / seconds
            if not 0 <= self.overlap + self._next * NOTCH <= self.most:
                self._next = -self._next
            moved = self._trial = self._next
        self.overlap += moved * NOTCH
        self._settling, self._measured = 1 + math.ceil(self.overlap), []


def overlaps_of(case, window, *, noise, seed):
    """Overlaps in force in each round, by the recipe's control or, with a ``window``, by hill-climbing."""
    cluster, _, admission = case
    if window:
        control = HillClimb(admission.overlap, float(admission.max_staleness), window)
        decide = control.decide
    else:
        control = OverlapControl(
            admission, Scheduling(), lambda curve: replace(cluster, curve=curve), notch=NOTCH, min_gain=MIN_GAIN
        )
        decide = functools.partial(decided, control)
    simulation, overlaps = NotedRounds(case, control.overlap, noise, seed), []
    for _ in range(ROUNDS):
        overlaps.append(control.overlap)
        decide(*simulation.play(control.overlap))
    return overlaps


@pytest.mark.benchmarks
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_simulation_beside_hill_climbing(name, capsys):
    case, reached, speeds = CASES[name], {}, {}
    cluster, lengths, admission = case
    for notches in range(round(min(admission.max_staleness, 6) / NOTCH) + 1):
        at = replace(admission, overlap=notches * NOTCH)
        speeds[at.overlap] = forecast(at, Scheduling(), cluster, lengths, rounds=200, warmup=16).trained_tokens_per_s
    target = smallest_worthwhile(list(speeds.items()), MIN_GAIN)
    for noise, window in itertools.product((0.0, 0.1), (None, 3, 8)):
        paths = np.array([overlaps_of(case, window, noise=noise, seed=seed) for seed in range(SEEDS)])
        speed = np.vectorize(lambda overlap: speeds[min(overlap, max(speeds))] / speeds[target])(paths)
        reached[noise, window] = speed.mean()
        # Rounds after which it stays within two notches of the target for five; None: never.
        near = np.abs(paths - target) <= 2 * NOTCH
        after = [next((i for i in range(ROUNDS - 4) if row[i : i + 5].all()), None) for row in near]
        with capsys.disabled():
            control = f"hill-climbing, {window} rounds a notch" if window else "simulation"
            print(
                f"\n{name}, noise {noise:.0%}, {control}: speed {speed.mean():.2f}, near {target:g} after {after}",
                end="",
            )
    for noise in (0.0, 0.1):
        assert all(reached[noise, None] >= reached[noise, window] - 0.02 for window in (3, 8))
