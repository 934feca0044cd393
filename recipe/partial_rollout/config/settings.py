"""``partial_rollout.*`` and its cross-checks with verl's config: bad input dies here, before Ray starts.

Every error is one line: the key, its value, what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.choices import Correction, Mode, OnSampleError, Proximal, ResumeKV, SchedulingPolicy
from recipe.partial_rollout.config.errors import fail

OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
"""verl's key for the penalty of its dapo reward manager"""
AUTO = "auto"
"""of ``partial_rollout.overlap``"""

FLAGS = ("enable", "drain", "padded_vocabulary", "reward_in_worker", "checkpoint.checksum_all")
"""keys of ``partial_rollout`` that are true or false"""

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""YAML 1.1's; on the command line hydra knows the first of each only, and hands the others over as strings"""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds after which a wait ends the run with an error."""

    stall_s: float = 1800.0
    """without any sample reporting, or any engine making a token, in an open round"""
    grant_s: float = 7200.0
    """for a sample to be granted a slot, or to be granted one again, in an open round: longer than the longest step"""
    reward_s: float = 300.0
    """for one call of the reward function"""
    interrupt_s: float = 60.0
    """for all replicas to become quiet, or to resume; for samples to be collected, or granted, once that is waited for;
    for the outputs of a batch to arrive"""
    weight_sync_s: float = 600.0
    """for one weight sync"""
    worker_start_s: float = 300.0
    """for an agent-loop worker that replaces a dead one to be ready"""
    replica_start_s: float = 1200.0
    """for a vLLM replica that died to be back"""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not value > 0:
                raise fail(f"partial_rollout.deadlines.{item.name}", value, "seconds above 0")


@dataclass(frozen=True, slots=True)
class FailureLimits:
    """``partial_rollout.failures``: how much may go wrong before the run ends."""

    on_sample_error: OnSampleError
    sample_retries: int
    retry_backoff_s: float
    """seconds before the first retry; doubles with each further one of the same sample"""
    max_masked_fraction: float
    """of a batch: samples that failed for good"""
    worker_restarts: int
    """of agent-loop workers, over the whole run"""
    replica_restarts: int
    """of vLLM replicas, over the whole run, while others are alive"""
    tool_timeout_s: float | None
    """seconds for one tool call; None: no deadline"""
    sample_timeout_s: float | None
    """seconds that an agent loop may spend between two engine calls; None: no deadline"""

    @classmethod
    def from_config(cls, ours: DictConfig) -> FailureLimits:
        """Raises ``ConfigError`` in one line."""
        at = "partial_rollout.failures"
        fraction = _number(f"{at}.max_masked_fraction", ours.max_masked_fraction)
        if fraction > 1:
            raise fail(f"{at}.max_masked_fraction", fraction, "at most 1")
        return cls(
            on_sample_error=_member(f"{at}.on_sample_error", ours.on_sample_error, OnSampleError),
            sample_retries=_at_least(f"{at}.sample_retries", ours.sample_retries, 0),
            retry_backoff_s=_number(f"{at}.retry_backoff_s", ours.retry_backoff_s),
            max_masked_fraction=fraction,
            worker_restarts=_at_least(f"{at}.worker_restarts", ours.worker_restarts, 0),
            replica_restarts=_at_least(f"{at}.replica_restarts", ours.replica_restarts, 0),
            tool_timeout_s=_seconds_or_none(f"{at}.tool_timeout_s", ours.tool_timeout_s),
            sample_timeout_s=_seconds_or_none(f"{at}.sample_timeout_s", ours.sample_timeout_s),
        )


@dataclass(frozen=True, slots=True)
class OverlapSettings:
    """Of ``partial_rollout.overlap=auto``."""

    start: float
    notch: float
    min_gain: float

    @classmethod
    def from_config(cls, ours: DictConfig) -> OverlapSettings:
        """Raises ``ConfigError`` in one line."""
        at, auto = "partial_rollout.overlap_auto", ours.overlap_auto
        notch = _number(f"{at}.notch", auto.notch)
        if not notch:
            raise fail(f"{at}.notch", auto.notch, "a number above 0")
        return cls(_number(f"{at}.start", auto.start), notch, _number(f"{at}.min_gain", auto.min_gain))


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """``algorithm.filter_groups``, where it is enabled."""

    metric: str
    max_num_gen_batches: int
    """prompts that a round may consume, trained or filtered, in batches; 0: no limit"""

    @classmethod
    def from_config(cls, config: DictConfig) -> FilterSettings | None:
        """From the whole config; verl's node may be missing. Raises ``ConfigError`` in one line."""
        node, at = OmegaConf.select(config, "algorithm.filter_groups"), "algorithm.filter_groups"
        if not node or not _flag(f"{at}.enable", node.enable):
            return None
        if not isinstance(node.metric, str) or not node.metric:
            raise fail(f"{at}.metric", node.metric, "reward, or a name of the reward's extra information, such as acc")
        batches = node.max_num_gen_batches
        if isinstance(batches, bool) or not isinstance(batches, int) or batches == 1:
            raise fail(
                f"{at}.max_num_gen_batches", batches, "0 for no limit, or at least 2: with 1 nothing is replaced"
            )
        return cls(node.metric, max(0, batches))


@dataclass(frozen=True, slots=True)
class PartialRolloutConfig:
    """The recipe's settings, checked; sizes that follow from verl's config are filled in by ``from_config``."""

    enable: bool
    mode: Mode
    policy: SchedulingPolicy
    overlap: float
    """in force from the first round on"""
    overlap_control: OverlapSettings | None
    """None: ``overlap`` is fixed"""
    max_staleness: int
    over_sampling_batch_size: int
    in_flight_samples: int
    slots_per_replica: int
    """until the KV caches are known, at most ``rollout.max_num_seqs``: see ``ReplicaSlots``"""
    slots_given: bool
    """whether ``slots_per_replica`` was set"""
    ramp_rounds: int
    drain: bool
    """whether the last rounds admit only what is still trained"""
    correction: Correction
    proximal: Proximal
    proximal_check_every: int
    resume_kv: ResumeKV
    kv_headroom: float
    """share of a replica's KV blocks"""
    probe_s: float
    checksum_all: bool
    failures: FailureLimits
    deadlines: Deadlines
    group_filter: FilterSettings | None
    """``algorithm.filter_groups``; None: every group is trained"""
    batch_groups: int
    """N: ``data.train_batch_size``"""
    samples_per_group: int
    """``actor_rollout_ref.rollout.n``"""

    @property
    def batch_samples(self) -> int:
        return self.batch_groups * self.samples_per_group

    @property
    def sizes(self) -> dict[str, Any]:
        """What a checkpoint of this run can be gone on from with."""
        return {
            "policy": str(self.policy),
            "batch_groups": self.batch_groups,
            "samples_per_group": self.samples_per_group,
            "max_staleness": self.max_staleness,
            "filter_groups": self.group_filter is not None,
        }

    @classmethod
    def from_config(cls, config: DictConfig) -> PartialRolloutConfig:
        """From the whole hydra config.

        Raises:
            ConfigError: in one line.
        """
        ours = config.partial_rollout
        batch = _at_least("data.train_batch_size", config.data.train_batch_size, 1)
        n = _at_least("actor_rollout_ref.rollout.n", config.actor_rollout_ref.rollout.n, 1)
        control = OverlapSettings.from_config(ours) if ours.overlap == AUTO else None
        settings = cls(
            enable=_flag("partial_rollout.enable", ours.enable),
            mode=_member("partial_rollout.mode", ours.mode, Mode),
            policy=_member("partial_rollout.scheduling.policy", ours.scheduling.policy, SchedulingPolicy),
            overlap=_number("partial_rollout.overlap", ours.overlap, AUTO) if control is None else control.start,
            overlap_control=control,
            max_staleness=_at_least("partial_rollout.max_staleness", ours.max_staleness, 0),
            over_sampling_batch_size=_default(
                "partial_rollout.over_sampling_batch_size", ours.over_sampling_batch_size, 2 * batch
            ),
            in_flight_samples=_default("partial_rollout.in_flight_samples", ours.in_flight_samples, batch * n),
            slots_per_replica=_default(
                "partial_rollout.slots_per_replica",
                ours.slots_per_replica,
                config.actor_rollout_ref.rollout.max_num_seqs,
            ),
            slots_given=ours.slots_per_replica is not None,
            ramp_rounds=_at_least("partial_rollout.ramp_rounds", ours.ramp_rounds, 0),
            drain=_flag("partial_rollout.drain", ours.drain),
            correction=_member("partial_rollout.correction", ours.correction, Correction),
            proximal=_member("partial_rollout.proximal", ours.proximal, Proximal),
            proximal_check_every=_at_least("partial_rollout.proximal_check_every", ours.proximal_check_every, 0),
            resume_kv=_member("partial_rollout.resume_kv", ours.resume_kv, ResumeKV),
            kv_headroom=_number("partial_rollout.kv_headroom", ours.kv_headroom),
            probe_s=_number("partial_rollout.probe_s", ours.probe_s),
            checksum_all=_flag("partial_rollout.checkpoint.checksum_all", ours.checkpoint.checksum_all),
            failures=FailureLimits.from_config(ours.failures),
            deadlines=Deadlines(**OmegaConf.to_container(ours.deadlines, resolve=True)),  # type: ignore[arg-type]
            group_filter=FilterSettings.from_config(config),
            batch_groups=batch,
            samples_per_group=n,
        )
        settings._check()
        return settings

    def _check(self) -> None:
        if self.kv_headroom >= 1:
            raise fail("partial_rollout.kv_headroom", self.kv_headroom, "less than 1: a share of the KV blocks")
        if self.overlap_control is not None and self.mode is not Mode.WINDOW:
            raise fail("partial_rollout.overlap", AUTO, f"a number in mode {self.mode}")
        if self.overlap > self.max_staleness:
            raise fail(
                "partial_rollout.overlap" if self.overlap_control is None else "partial_rollout.overlap_auto.start",
                self.overlap,
                f"at most partial_rollout.max_staleness={self.max_staleness}: more groups in flight cannot all be "
                f"trained in time",
            )
        if self.over_sampling_batch_size < self.batch_groups:
            raise fail(
                "partial_rollout.over_sampling_batch_size",
                self.over_sampling_batch_size,
                f"at least data.train_batch_size={self.batch_groups}",
            )
        if self.mode is Mode.SSIM and self.ramp_rounds:
            raise fail("partial_rollout.ramp_rounds", self.ramp_rounds, "0 in mode ssim, which refills in mid-round")
        if self.mode is not Mode.WINDOW and self.max_staleness < 1:
            raise fail("partial_rollout.max_staleness", self.max_staleness, f"at least 1 in mode {self.mode}")


def _number(key: str, value: Any, *others: str) -> float:
    """``others``: words that the caller takes instead, for the message."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise fail(key, value, ", or ".join(["a number of at least 0", *others]))
    return float(value)


def _seconds_or_none(key: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise fail(key, value, "seconds above 0, or null")
    return float(value)


def read_flags(config: DictConfig) -> None:
    """Make every flag of ``config.partial_rollout`` a bool in place, for those who read the config itself.

    Raises:
        ConfigError: one is neither true nor false.
    """
    for name in FLAGS:
        key = f"partial_rollout.{name}"
        OmegaConf.update(config, key, _flag(key, OmegaConf.select(config, key)))


def _flag(key: str, value: Any) -> bool:
    found = value if isinstance(value, bool) else _WORDS.get(str(value).lower())
    if found is None:
        raise fail(key, value, "true or false")
    return found


def _at_least(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise fail(key, value, f"an integer of at least {least}")
    return value


def _default(key: str, value: Any, default: int) -> int:
    return default if value is None else _at_least(key, value, 1)


def _member(key: str, value: Any, kind: type[StrEnum]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise fail(key, value, "one of " + ", ".join(kind)) from None
