"""``overlap=auto`` beside hill-climbing on measured speed, in the planner's simulation: why the recipe simulates.

``python -m pytest tests/unit/test_overlap_search.py -m benchmarks -s`` prints the figures in docs/tuning.md.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import Cluster, EngineCurve
from recipe.partial_rollout.planner.rounds import Simulation, forecast, smallest_worthwhile
from recipe.partial_rollout.planner.samples import LengthTrace, lognormal
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.rollout.overlap import OverlapControl

NOTCH, MIN_GAIN, ROUNDS = 0.25, 0.03, 36
"""the defaults, and the length of the quick start"""
LAST, SEEDS = 12, 3


@dataclass(frozen=True)
class Case:
    """An engine, lengths and where the control starts."""

    cluster: Cluster
    lengths: LengthTrace
    admission: Admission


CASES = {
    # lengths and speeds of docs/quickstart/report.md
    "quick start": Case(
        Cluster(EngineCurve(step_s=7e-3, sample_s=2.7e-4), 1, 128, keeps_kv=True),
        lognormal(median=90, mean=142, cap=1536, samples_per_group=8),
        Admission(Mode.WINDOW, 8, 8, 0.25, 16, 64, 8),
    ),
    "company is free": Case(
        Cluster(EngineCurve(step_s=1e-2, sample_s=1e-5), 1, 256),
        lognormal(median=100, mean=160, cap=1600, samples_per_group=4),
        Admission(Mode.WINDOW, 16, 4, 0.5, 32, 64, 8),
    ),
    "company buys nothing": Case(
        Cluster(EngineCurve(step_s=1e-9, sample_s=1e-4), 1, 256),
        lognormal(median=100, mean=160, cap=1600, samples_per_group=4),
        Admission(Mode.WINDOW, 16, 4, 1.5, 32, 64, 4),
    ),
}


class NotedRounds(Simulation):
    """A simulation that notes its engine calls, stretches rounds by noise, and changes its overlap."""

    def __init__(self, case, overlap, noise, seed):
        admission = replace(case.admission, overlap=overlap)
        super().__init__(admission, Scheduling(), case.cluster, case.lengths, seed=seed)
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
    _tokens: int = 0
    _seconds: float = 0.0
    _measured: int = 0
    _before: float = 0.0
    """tokens/s at the overlap from which the trial started"""
    _trial: int = 0
    """notches from there: +1 or -1; 0: the overlap in force is no trial"""
    _next: int = 1

    def observe(self, calls, lengths):
        if self._settling:
            self._settling -= 1
            return
        self._tokens += sum(call.tokens for call in calls)
        if calls:
            self._seconds += max(call.end for call in calls) - min(call.start for call in calls)
        self._measured += 1

    def poll(self):
        if self._measured < self.window:
            return
        speed = self._tokens / self._seconds
        if self._trial and not self._pays(speed):
            # Back; the next trial goes the other way.
            self._move(-self._trial)
            self._next, self._trial = -self._next, 0
            return
        self._before = speed
        if not 0 <= self.overlap + self._next * NOTCH <= self.most:
            self._next = -self._next
        self._trial = self._next
        self._move(self._trial)

    def _pays(self, speed):
        gain = speed / self._before - 1
        return gain >= MIN_GAIN if self._trial > 0 else gain > -MIN_GAIN / 2

    def _move(self, notches):
        self.overlap += notches * NOTCH
        self._settling = 1 + math.ceil(self.overlap)
        self._tokens, self._seconds, self._measured = 0, 0.0, 0


class Simulated:
    """The recipe's control, decided before the next round."""

    def __init__(self, case):
        self._control = OverlapControl(
            case.admission, Scheduling(), lambda curve: replace(case.cluster, curve=curve),
            notch=NOTCH, min_gain=MIN_GAIN,
        )  # fmt: skip

    @property
    def overlap(self):
        return self._control.overlap

    def observe(self, calls, lengths):
        self._control.observe(calls, lengths)
        self._control._pending.result(timeout=600)

    def poll(self):
        self._control.poll()


def climb(window):
    return lambda case: HillClimb(case.admission.overlap, float(case.admission.max_staleness), window)


CONTROLS = {
    "simulation": Simulated,
    "hill-climbing, 3 rounds a notch": climb(3),
    "hill-climbing, 8 rounds a notch": climb(8),
}


def path(case, make, *, noise, seed):
    """Overlaps in force in each round."""
    control, overlaps = make(case), []
    simulation = NotedRounds(case, control.overlap, noise, seed)
    for _ in range(ROUNDS):
        overlaps.append(control.overlap)
        control.observe(*simulation.play(control.overlap))
        control.poll()
    return overlaps


def long_run_speeds(case):
    """Tokens/s of a long run at each notch."""
    speeds = {}
    for notches in range(round(min(case.admission.max_staleness, 6) / NOTCH) + 1):
        admission = replace(case.admission, overlap=notches * NOTCH)
        made = forecast(admission, Scheduling(), case.cluster, case.lengths, rounds=200, warmup=16)
        speeds[admission.overlap] = made.trained_tokens_per_s
    return speeds


def rounds_until_near(overlaps, target):
    """Rounds after which it stays within two notches of ``target`` for five; None: never."""
    near = [abs(overlap - target) <= 2 * NOTCH for overlap in overlaps]
    return next((i for i in range(len(near) - 4) if all(near[i : i + 5])), None)


@pytest.mark.benchmarks
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_simulation_beside_hill_climbing(name, capsys):
    case, reached = CASES[name], {}
    speeds = long_run_speeds(case)
    target = smallest_worthwhile(list(speeds.items()), MIN_GAIN)
    for noise, (control, make) in itertools.product((0.0, 0.1), CONTROLS.items()):
        paths = np.array([path(case, make, noise=noise, seed=seed) for seed in range(SEEDS)])
        speed = np.vectorize(lambda overlap: speeds[min(overlap, max(speeds))] / speeds[target])(paths)
        reached[noise, control] = speed.mean()
        near = [rounds_until_near(overlaps, target) for overlaps in paths.tolist()]
        with capsys.disabled():
            print(
                f"\n{name}, noise {noise:.0%}, {control}: speed {speed.mean():.2f}, last {LAST} rounds "
                f"{speed[:, -LAST:].mean():.2f} at overlap {paths[:, -LAST:].mean():.2f} ± {paths[:, -LAST:].std():.2f} "
                f"(worthwhile: {target:g}), near it after {near} rounds",
                end="",
            )
    for noise in (0.0, 0.1):
        assert all(reached[noise, "simulation"] >= reached[noise, other] - 0.02 for other in CONTROLS)
