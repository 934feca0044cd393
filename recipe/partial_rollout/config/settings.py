"""``partial_rollout.*``: its keys, and the settings of a run, which follow from them and from verl's config.

``PartialRolloutConfig.from_config`` refuses bad input before Ray starts, in one line: the key, its value, what is
allowed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.choices import (
    Correction,
    Mode,
    Placement,
    Proximal,
    ResumeKV,
    SchedulingPolicy,
    TrustRegion,
)
from recipe.partial_rollout.config.errors import fail
from recipe.partial_rollout.config.keys import Key, checked, declarations, flag, key, read, refuse_unknown, section
from recipe.partial_rollout.config.resume_sizes import ResumeSizes
from recipe.partial_rollout.config.sections import (
    Checkpointing,
    Dashboard,
    Deadlines,
    FailureLimits,
    OverlapAuto,
    Scheduling,
)

ROOT = "partial_rollout"
"""the node of the config that the keys are under"""
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
"""verl's key for the overlong penalty of its dapo reward manager"""
AUTO = "auto"
"""word that ``partial_rollout.overlap`` accepts besides numbers"""
_FILTER = "algorithm.filter_groups"
_COUNT = Key(words="", at_least=1)


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """``algorithm.filter_groups``, if enabled."""

    metric: str
    max_num_gen_batches: int
    """prompts that a round may consume, trained or filtered, in batches; 0: no limit"""

    @classmethod
    def from_config(cls, config: DictConfig) -> FilterSettings | None:
        """From the whole config; verl's node may be missing. Raises ``ConfigError`` in one line."""
        node = OmegaConf.select(config, _FILTER)
        if not node or not flag(f"{_FILTER}.enable", node.enable):
            return None
        if not isinstance(node.metric, str) or not node.metric:
            words = "reward, or a name of the reward's extra information, such as acc"
            raise fail(f"{_FILTER}.metric", node.metric, words)
        batches = node.max_num_gen_batches
        if isinstance(batches, bool) or not isinstance(batches, int) or batches == 1:
            words = "0 for no limit, or at least 2: with 1 nothing is replaced"
            raise fail(f"{_FILTER}.max_num_gen_batches", batches, words)
        return cls(node.metric, max(0, batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRolloutConfig:
    """The recipe's settings, checked. Sizes that a key leaves to verl's config are filled in by ``from_config``."""

    enable: bool = key(True, "`false` is noPR: verl's own synchronous rollout, batch for batch.")
    placement: Placement = key(Placement.COLOCATED, "Where the engines run.")
    trainer_cores: int | None = key(
        None,
        "Cores that the trainer has to itself with `placement=separate` on a machine without a GPU; engines, agent loops "
        "and all else run on the others. `null`: all share all.",
        at_least=1,
    )
    mode: Mode = key(Mode.WINDOW, "How many prompts a round takes on.")
    overlap: float = key(
        1.0,
        "Spare groups in flight as a share of N = `data.train_batch_size` (window): more speed for more staleness, whose "
        "mean is about the overlap. `auto` (window): as many as are worth their staleness, found by measuring "
        "([docs/scheduling.md](../../docs/scheduling.md)).",
        at_least=0,
        word=AUTO,
    )
    overlap_auto: OverlapAuto = section(OverlapAuto)
    drain: bool = key(
        True,
        "What to do with in-flight prompts when `trainer.total_training_steps` ends training before the data runs out. "
        "`true`: the last rounds admit only what is still trained. `false`: all rounds are alike, the last checkpoint "
        "holds what is in flight, and a training resumed with more steps continues it.",
    )
    max_staleness: int = key(
        4,
        "Most versions between a sample's first token and the update that trains it. A round waits for a group that has "
        "reached it.",
        at_least=0,
    )
    over_sampling_batch_size: int = key(
        None, "Unfinished groups at the start of a round (april).", at_least=1, null="2 N"
    )
    in_flight_samples: int = key(None, "Unfinished samples at any time (ssim).", at_least=1, null="N * rollout.n")
    slots_per_replica: int = key(
        None,
        "Samples that run at once on a replica. `null`: at most `rollout.max_num_seqs`, and no more than its KV cache "
        "holds; a line at start says how many and why ([docs/scheduling.md](../../docs/scheduling.md)).",
        at_least=1,
        null="by KV",
    )
    scheduling: Scheduling = section(Scheduling)
    correction: Correction = key(
        Correction.DECOUPLED,
        "How tokens that older weights sampled are trained "
        "([docs/algorithms.md](../../docs/algorithms.md#correction)).",
    )
    proximal: Proximal = key(
        Proximal.AUTO,
        "Where the log-probs of the weights before the update come from "
        "([docs/algorithms.md](../../docs/algorithms.md#one-forward-pass-less)).",
    )
    trust_region: TrustRegion = key(
        TrustRegion.AUTO,
        "How far the trained policy may move from the one that sampled a token. A masked token has no gradient; it still "
        "counts in the mean ([docs/algorithms.md](../../docs/algorithms.md#trust-region)).",
    )
    trust_region_low: float | None = key(
        None,
        "How far below the region reaches: below ratio 1 (mask), below the old probability (tv). `null`: "
        "`actor.clip_ratio_low`, for tv 0.15.",
        above=0,
    )
    trust_region_high: float | None = key(
        None, "How far above the region reaches. `null`: `actor.clip_ratio_high`, for tv 0.15.", above=0
    )
    trust_region_m2: float = key(0.04, "Mean squared log-ratio that m2 allows; the default is its paper's.", above=0)
    resume_kv: ResumeKV = key(ResumeKV.RECOMPUTE, "How an interrupted sample gets its keys and values back.")
    kv_headroom: float = key(
        0.05,
        "Share of a replica's KV blocks that must be free for one more sample to start there (vLLM's `watermark`); "
        "without it samples start only to be preempted as others grow. 0: none. Where blocks run out all the same, the "
        "prompts that were dispatched last make room (`rollout.scheduling_policy=priority`, always on under PR).",
        at_least=0,
        below=1,
        share_of="the KV blocks",
    )
    reward_in_worker: bool = key(
        False,
        "Score in the agent-loop workers instead of verl's reward workers, which saves a round trip a sample. For cheap "
        "functions without a reward model; also under noPR.",
    )
    reward_concurrency: int = key(
        None,
        "Samples of an agent-loop worker that are scored at once; others wait, and no clock runs for them. `null`: the "
        "cluster's cores, divided by the workers; no limit where verl's reward model or sandbox service scores. Raise it "
        "for a function that waits for a service of yours. Also under noPR.",
        at_least=1,
        null="by cores",
    )
    padded_vocabulary: bool = key(
        False, "Allow a model with more embedding rows than its tokenizer has tokens (Qwen's checkpoints)."
    )
    probe_s: float = key(
        0,
        "Seconds over which the speed of full engines is measured, before and after training, after as many seconds to "
        "fill them. Efficiency is measured against it. 0: not measured.",
        at_least=0,
        unit="seconds",
    )
    failures: FailureLimits = section(FailureLimits)
    deadlines: Deadlines = section(Deadlines)
    checkpoint: Checkpointing = section(Checkpointing)
    dashboard: Dashboard = section(Dashboard)

    batch_groups: int
    """N: ``data.train_batch_size``"""
    samples_per_group: int
    """``actor_rollout_ref.rollout.n``"""
    slots_given: bool
    """whether ``slots_per_replica`` was set; otherwise it is ``rollout.max_num_seqs`` until the KV caches are known"""
    adapts_overlap: bool
    """whether ``overlap=auto``; the field ``overlap`` then holds the value of the first round"""
    group_filter: FilterSettings | None
    """``algorithm.filter_groups``; None: every group is trained"""

    @property
    def separate(self) -> bool:
        """Whether engines decode while the trainer updates."""
        return self.enable and self.placement is Placement.SEPARATE

    @property
    def policy(self) -> SchedulingPolicy:
        return self.scheduling.policy

    @property
    def overlap_control(self) -> OverlapAuto | None:
        """Settings of ``overlap=auto``; None if the overlap is fixed."""
        return self.overlap_auto if self.adapts_overlap else None

    @property
    def batch_samples(self) -> int:
        return self.batch_groups * self.samples_per_group

    @property
    def resume_sizes(self) -> ResumeSizes:
        return ResumeSizes(self.batch_groups, self.samples_per_group, self.max_staleness)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of this run for a checkpoint's manifest."""
        return {
            **asdict(self.resume_sizes),
            "filter_groups": self.group_filter is not None,
        }

    @classmethod
    def from_config(cls, config: DictConfig) -> PartialRolloutConfig:
        """From the whole hydra config.

        Raises:
            ConfigError: in one line.
        """
        rollout = config.actor_rollout_ref.rollout
        batch = checked("data.train_batch_size", config.data.train_batch_size, int, _COUNT)
        n = checked("actor_rollout_ref.rollout.n", rollout.n, int, _COUNT)
        values = read(cls, config[ROOT], ROOT)
        adapts, given = values["overlap"] == AUTO, values["slots_per_replica"] is not None
        if adapts:
            values["overlap"] = values["overlap_auto"].start
        sizes = {
            "over_sampling_batch_size": 2 * batch,
            "in_flight_samples": batch * n,
            "slots_per_replica": rollout.max_num_seqs,
        }
        values |= {name: size for name, size in sizes.items() if values[name] is None}
        return cls(
            **values,
            batch_groups=batch,
            samples_per_group=n,
            slots_given=given,
            adapts_overlap=adapts,
            group_filter=FilterSettings.from_config(config),
        )

    def __post_init__(self) -> None:
        """Check the keys against each other."""
        self._check_placement()
        if self.adapts_overlap and self.mode is not Mode.WINDOW:
            raise fail(f"{ROOT}.overlap", AUTO, f"a number in mode {self.mode}")
        if self.overlap > self.max_staleness:
            raise fail(
                f"{ROOT}.overlap_auto.start" if self.adapts_overlap else f"{ROOT}.overlap",
                self.overlap,
                f"at most {ROOT}.max_staleness={self.max_staleness}: more groups in flight cannot all be trained in time",
            )
        if self.over_sampling_batch_size < self.batch_groups:
            raise fail(
                f"{ROOT}.over_sampling_batch_size",
                self.over_sampling_batch_size,
                f"at least data.train_batch_size={self.batch_groups}",
            )
        if self.mode is not Mode.WINDOW and self.max_staleness < 1:
            raise fail(f"{ROOT}.max_staleness", self.max_staleness, f"at least 1 in mode {self.mode}")

    def _check_placement(self) -> None:
        if self.placement is not Placement.SEPARATE:
            return
        if not self.enable:
            raise fail(f"{ROOT}.placement", self.placement, f"colocated with {ROOT}.enable=False")
        if self.adapts_overlap:
            raise fail(f"{ROOT}.overlap", AUTO, f"a number with {ROOT}.placement=separate: auto models one side only")


FLAGS = tuple(each.name for each in declarations(PartialRolloutConfig) if each.kind is bool)
"""keys that are true or false"""


def check_keys(config: DictConfig) -> None:
    """Refuse keys of ``config.partial_rollout`` that do not exist, and make its flags bools in place.

    Raises:
        ConfigError: a key is unknown, or a flag is neither true nor false.
    """
    refuse_unknown(PartialRolloutConfig, config[ROOT], ROOT)
    read_flags(config)


def read_flags(config: DictConfig) -> None:
    """Make every flag of ``config.partial_rollout`` a bool in place, for those who read the config itself.

    Raises:
        ConfigError: one is neither true nor false.
    """
    for name in FLAGS:
        path = f"{ROOT}.{name}"
        OmegaConf.update(config, path, flag(path, OmegaConf.select(config, path)))


def default_of(name: str) -> Any:
    """The default of key ``partial_rollout.NAME``; ``name`` is dotted."""
    return next(each.default for each in declarations(PartialRolloutConfig) if each.name == name)
