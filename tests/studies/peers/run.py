"""Figures of one training run, whoever's trainer made it: from verl's own metrics alone, so that all are read alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.partial_rollout.records.metrics import held_out_rewards
from recipe.partial_rollout.tools.run_record import read_metrics
from tests.studies.held_out import QUALITY, seconds_to
from tests.studies.machine import read_stolen_cpu
from tests.studies.peers.arms import SEPARATE

_STALENESS = ("partial_rollout/staleness", "training/off_policy/trajectory_staleness_worst")
"""the recipe's and verl's name for the same: versions from a sample's first token to the update that trains it"""
_DROPPED = "/off_policy/evicted_samples"
_INTERRUPT = "partial_rollout/timing/interrupt_s"
_HELD = ("partial_rollout/timing/hold_s", "timing_s/update_weights")
"""the recipe's name and verl's: seconds of a step in which an engine beside the trainer decodes nothing for new weights.
verl's trainer aborts all requests first, and resumes them last"""
_SAMPLE = "peer/sample_s"
"""``sampler.SAMPLE_S``, which cannot be imported without verl's v1 trainers"""


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One run; arrays are by step."""

    arm: str
    seed: int
    rollout_s: np.ndarray
    """until the trainer has its batch: of decoding alone, or, in a separate run, of waiting while the engines decode on"""
    step_s: np.ndarray
    """whole steps, which follow one another: from the demand for a batch until the engines have the weights that it made.
    Validations, metrics and logs lie between them"""
    tokens: np.ndarray
    """trained response tokens"""
    staleness: np.ndarray
    """mean over the step's samples"""
    staleness_max: np.ndarray
    staleness_p95: np.ndarray | None
    """None: this trainer does not log it"""
    off_policy: np.ndarray | None
    """share of the trained tokens that older weights have made; None: not logged"""
    dropped: int
    """samples, in all steps, that were decoded and not trained for their age"""
    reward: np.ndarray
    """mean over the step's samples, whatever weights have made them"""
    held_out: float | None
    """reward of the last validation: of the weights at its end; None: there was none"""
    quality_s: float | None
    """training seconds to held-out quality (``held_out.QUALITY``); None: never, or not validated in between"""
    interrupt_s: np.ndarray | None
    """from the decision to interrupt a round until every engine is quiet; None: not logged, or never interrupted"""
    stolen_cpu: float | None
    """share of the run's processor time that the host gave to others (``machine.stolen_cpu``); None: not noted"""
    full_tokens_per_s: float | None = None
    """of the engine kept full, where a run of an earlier version measured it"""
    held_s: np.ndarray | None = None
    """in which the engines decoded nothing for new weights; None: they share the trainer's devices"""

    @property
    def separate(self) -> bool:
        """Whether the engines decode while the trainer updates, so that all of the run is rollout."""
        return self.arm in SEPARATE

    def ms_per_1000(self, seconds: np.ndarray, steps: slice) -> float:
        """``seconds`` (rollout or whole step) for 1,000 trained tokens, over ``steps``."""
        return float(1e6 * seconds[steps].sum() / self.tokens[steps].sum())


def read_run(directory: Path, arm: str, seed: int, samples_per_step: int) -> PeerRun:
    """From ``metrics.jsonl``.

    Raises:
        ValueError: a step lacks a figure; the message names both.
    """
    lines = read_metrics(directory / "metrics.jsonl", [])
    steps = [line.values for line in lines if "training/global_step" in line.values]

    def column(key: str) -> np.ndarray:
        missing = [i for i, step in enumerate(steps, 1) if key not in step]
        if missing:
            raise ValueError(f"{directory}: step {missing[0]} has no {key}")
        return np.array([float(step[key]) for step in steps])

    def staleness(figure: str) -> np.ndarray:
        name = next((name for name in _STALENESS if steps and f"{name}/{figure}" in steps[0]), None)
        return np.zeros(len(steps)) if name is None else column(f"{name}/{figure}")

    validations = [(i, rewards[0]) for i, step in enumerate(steps, 1) if (rewards := held_out_rewards([step]))]
    validated_at, held_out = zip(*validations, strict=True) if validations else ((), ())
    step_s = column("timing_s/step")

    def if_logged(key: str) -> np.ndarray | None:
        return column(key) if steps and key in steps[0] else None

    def holds() -> np.ndarray | None:
        return column(next(key for key in _HELD if key in steps[0])) if arm in SEPARATE else None

    def interruptions() -> np.ndarray | None:
        """verl's trainer interrupts at the end of its ``gen`` timer, after sampling, and does nothing else there."""
        if arm in SEPARATE:
            return None
        sampled = if_logged(_SAMPLE)
        return if_logged(_INTERRUPT) if sampled is None else column("timing_s/gen") - sampled

    return PeerRun(
        arm=arm,
        seed=seed,
        rollout_s=column("timing_s/gen"),
        step_s=step_s,
        tokens=column("response_length/mean") * samples_per_step,
        staleness=staleness("mean"),
        staleness_max=staleness("max"),
        staleness_p95=if_logged(f"{_STALENESS[0]}/p95"),
        off_policy=if_logged("partial_rollout/off_policy_token_fraction"),
        dropped=int(sum(value for step in steps for key, value in step.items() if key.endswith(_DROPPED))),
        reward=column("critic/score/mean"),
        held_out=held_out[-1] if held_out else None,
        quality_s=seconds_to(QUALITY, validated_at, held_out, step_s.tolist()),
        interrupt_s=interruptions(),
        stolen_cpu=read_stolen_cpu(directory),
        held_s=holds(),
    )
