"""Enums for the keys that take one of a few words; each word has its meaning for the README's table."""

from __future__ import annotations

from enum import StrEnum


class Choice(StrEnum):
    """A word of the configuration. Members are declared as ``NAME = value, words``."""

    words: str
    """its meaning"""

    def __new__(cls, value: str, words: str) -> Choice:
        member = str.__new__(cls, value)
        member._value_ = value
        member.words = words
        return member


class Mode(Choice):
    """``partial_rollout.mode``."""

    WINDOW = "window", "at the start of a round, up to `(1 + overlap) * N` groups are unfinished or ready"
    SSIM = "ssim", "the published supplementation: all through the round, up to `N * rollout.n` samples are unfinished"
    APRIL = "april", "at the start of a round, up to `(1 + overlap) * N` groups are unfinished"


class Placement(Choice):
    """``partial_rollout.placement``."""

    COLOCATED = "colocated", "trainer and engines share the devices and take turns"
    SEPARATE = (
        "separate",
        "engines have devices of their own and decode while the trainer updates "
        "([docs/placement.md](../../docs/placement.md))",
    )


class SchedulingPolicy(Choice):
    """``partial_rollout.scheduling.policy``."""

    BOUNDED = (
        "bounded",
        "oldest first; carried groups before new prompts, then fewest unfinished samples, then shortest mean length",
    )
    SEED = "seed", "the published order: fewest unfinished samples, then shortest mean length, then least stale"


class ResumeKV(Choice):
    """``partial_rollout.resume_kv``."""

    RECOMPUTE = "recompute", "prompt and tokens so far are prefilled again under the new weights"
    KEEP = (
        "keep",
        "the keys and values of the old weights, where vLLM's prefix cache still has them; see "
        "[docs/tuning.md](../../docs/tuning.md#keeping-the-kv-cache)",
    )


class Correction(Choice):
    """``partial_rollout.correction``."""

    DECOUPLED = "decoupled", "the loss weighs them by `pi_prox / pi_behav` (AReaL, arXiv:2505.24298, equation 5)"
    NONE = "none", "they train as if the weights before the update had made them; for ablations, prints a warning"


class TrustRegion(Choice):
    """``partial_rollout.trust_region``; ``training/loss.py`` has the formulas."""

    AUTO = "auto", "`mask`; `none` where the loss has one ratio a sequence, or with `correction=none`"
    NONE = "none", "as far as the updates take it"
    MASK = (
        "mask",
        "tokens are masked whose `pi_theta / pi_behav` has left the bounds in the direction of their advantage",
    )
