"""The values of the keys that take one word of a few."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """``partial_rollout.mode``: which prompts a round starts with, and when it takes new ones."""

    WINDOW = "window"
    """(1 + overlap) * N groups, unfinished or ready, at the start of a round"""
    SSIM = "ssim"
    """the published supplementation: an in-flight budget of samples, refilled all through the round"""
    APRIL = "april"
    """over_sampling_batch_size unfinished groups at the start of a round"""


class SchedulingPolicy(StrEnum):
    """``partial_rollout.scheduling.policy``: which sample runs next."""

    BOUNDED = "bounded"
    """oldest first, carried groups before new prompts, then fewest unfinished, then shortest mean length"""
    SEED = "seed"
    """the published order: fewest unfinished, shortest mean length, least stale"""
    IN_ORDER = "in_order"
    """dispatch order, also of training: no length bias, more staleness"""


class OnSampleError(StrEnum):
    """``partial_rollout.failures.on_sample_error``: what becomes of a sample that failed."""

    RETRY = "retry"
    """again from its journal, ``sample_retries`` times; then masked"""
    MASK = "mask"
    """its group trains without its tokens"""
    RAISE = "raise"
    """the run ends"""


class ResumeKV(StrEnum):
    """``partial_rollout.resume_kv``: how an interrupted sample gets its keys and values back."""

    RECOMPUTE = "recompute"
    """under the new weights: prompt and tokens so far are prefilled again"""
    KEEP = "keep"
    """those of the weights that made them, where the engine still has the blocks"""


class Correction(StrEnum):
    """``partial_rollout.correction``: how the loss treats tokens that older weights sampled."""

    DECOUPLED = "decoupled"
    """weighted by ``pi_prox / pi_behav`` (AReaL, arXiv:2505.24298, equation 5)"""
    NONE = "none"
    """as if the proximal policy had sampled them; for ablations"""


class Proximal(StrEnum):
    """``partial_rollout.proximal``: where the log-probs of the weights before the update come from."""

    RECOMPUTE = "recompute"
    """a forward pass over the batch"""
    INTERPOLATE = "interpolate"
    """between behaviour and current log-probs by version age, inside the loss (AReaL, ``prox_logp_method: loglinear``)"""
