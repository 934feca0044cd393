"""What must hold of a run whose weights never change: engine and trainer agree at every age, and nothing is lost.

The learning rate is 0, so a token of any age was sampled from the weights that train it. What divides engine and trainer
is arithmetic alone, and does not grow with steps or with age.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median

import pandas as pd

from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.run_record import RunRecord, Step, load_run

MOST_K3, MOST_ERROR = 0.005, 0.03
"""nats a token: divergence of the trainer from the engine, and the update's log-probs from a forward pass's"""
_ERROR = "partial_rollout/proximal/error"
_NO_K3 = 1e-6
"""divergence that is rounding of float32, of which a ratio says nothing"""
_MASKED_APART = 0.003
"""shares of masked tokens of two ages are alike within it, in four batches of 64 responses"""
INTERRUPT_S = {"cuda": 0.1, "cpu": 1.0}
"""beyond an engine step; the CPUs of a test machine have other work"""
LEAST_FREED_GIB = 40.0
_FREED = re.compile(r"Sleep mode freed ([\d.]+) GiB")
_ASYNCHRONOUS = ", asynchronous scheduling"


@dataclass(frozen=True, slots=True)
class Check:
    """One assertion, and what was measured."""

    name: str
    passed: bool
    measured: str
    wanted: str

    def __str__(self) -> str:
        return f"{'ok' if self.passed else 'FAIL':<5} {self.name}: {self.measured} (wanted: {self.wanted})"


def judge(run_dir: Path, data: Path, platform: str, terminal: str) -> list[Check]:
    """All checks of a finished run; those of the device are left out on a CPU.

    Args:
        data: the parquet file that it was trained on.
        terminal: what it and its engines printed.

    Raises:
        RunRecordError: its files cannot be read.
    """
    run = load_run(run_dir)
    judged, _ = audit(run_dir)
    found = [*_agreement(run.steps), _ages(run.steps), *_partial(run.steps), _budgets(run, data)]
    found.append(_interruption(run.steps, INTERRUPT_S[platform]))
    found.append(_check("audit", len(judged.violations), judged.violations == [], "0 violations"))
    if platform == "cuda":
        found += _device(terminal, len(run.steps))
    return found


def _check(name: str, measured: object, passed: bool, wanted: str) -> Check:
    shown = f"{measured:.3g}" if isinstance(measured, float) else str(measured)
    return Check(name, passed, shown, wanted)


def _series(steps: list[Step], key: str) -> list[float]:
    return [step.metrics.get(key, nan) for step in steps]


def _agreement(steps: list[Step]) -> list[Check]:
    k3 = _series(steps, "rollout_corr/k3_kl")
    # Of the steps that run the pass over the batch, the first among them.
    error = [step.metrics[_ERROR] for step in steps if _ERROR in step.metrics] or [nan]
    grown = k3[-1] / max(k3[0], _NO_K3 / 2)
    return [
        _check("k3 in each step", max(k3), all(value < MOST_K3 for value in k3), f"< {MOST_K3}"),
        _check("k3 of the last step over the first's", grown, k3[-1] <= max(2 * k3[0], _NO_K3), "<= 2"),
        _check("proximal error", max(error), all(value < MOST_ERROR for value in error), f"< {MOST_ERROR} nats"),
    ]


def _ages(steps: list[Step]) -> Check:
    """Masked tokens among those of this version, and among older ones."""
    young = old = young_masked = old_masked = 0.0
    for step in steps:
        older = step.metrics["partial_rollout/off_policy_token_fraction"]
        region = {
            age: step.metrics.get(f"partial_rollout/trust_region/masked_age_{age}", 0.0) for age in ("0", "1", "2_plus")
        }
        young, old = young + 1 - older, old + older
        young_masked, old_masked = young_masked + region["0"], old_masked + region["1"] + region["2_plus"]
    shares = young_masked / max(young, 1e-9), old_masked / max(old, 1e-9)
    measured = f"{shares[0]:.4f} at age 0, {shares[1]:.4f} later"
    return _check(
        "masked shares", measured, abs(shares[0] - shares[1]) <= _MASKED_APART, f"alike within {_MASKED_APART}"
    )


def _partial(steps: list[Step]) -> list[Check]:
    staleness = max(age for step in steps for age in step.staleness)
    cut = sum(count > 1 for step in steps for group in step.round.trained for count in group.segments)
    return [
        _check("staleness", staleness, staleness >= 1, "at least 1"),
        _check("responses that were interrupted and resumed", cut, cut > 0, "some"),
    ]


def _budgets(run: RunRecord, data: Path) -> Check:
    """Every response has as many tokens as its row says."""
    budget = {info["index"]: info["response_budget"] for info in pd.read_parquet(data).extra_info}
    groups = [group for step in run.steps for group in step.round.trained]
    wrong = sum(length != budget[int(group.prompt.partition("-")[0])] for group in groups for length in group.lengths)
    return _check("responses of another length than their budget", wrong, wrong == 0, "none")


def _interruption(steps: list[Step], beyond_s: float) -> Check:
    """The slowest one, and the median time that an engine takes for a token of every request."""
    calls = [call for step in steps for call in step.round.phase.calls if call.tokens > 1]
    step_s = median((call.end - call.start - call.queued_s) / call.tokens for call in calls)
    slowest = max(step.round.interrupt_s or 0.0 for step in steps)
    return _check(
        "seconds to interrupt", slowest, slowest < beyond_s + step_s, f"< {beyond_s} and a step of {step_s:.3g}"
    )


def _device(terminal: str, rounds: int) -> list[Check]:
    freed = [float(value) for value in _FREED.findall(terminal)]
    enough = sum(value >= LEAST_FREED_GIB for value in freed)
    return [
        _check(f"rounds after which sleep freed {LEAST_FREED_GIB:g} GiB", enough, enough >= rounds, f"{rounds}"),
        _check("asynchronous scheduling", _ASYNCHRONOUS in terminal, _ASYNCHRONOUS in terminal, "True"),
    ]
