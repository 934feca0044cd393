"""``partial_rollout.*``: its keys, and the settings of a run, which follow from them and from verl's config.

``PartialRolloutConfig.from_config`` refuses bad input before Ray starts, in one line: the key, its value, what is
allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.choices import Correction, Mode, Placement, ResumeKV, SchedulingPolicy, TrustRegion
from recipe.partial_rollout.config.keys import (
    declarations,
    defaults_of,
    fail,
    flag,
    key,
    read,
    refuse_unknown,
    section,
)
from recipe.partial_rollout.config.sections import Deadlines, FailureLimits, Scheduling, ToolCalls

CONF_DIR = Path(__file__).resolve().parents[3] / "conf"
"""the directory of the hydra configs"""
ROOT = "partial_rollout"
"""the node of the config that the keys are under"""
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
"""verl's key for the overlong penalty of its dapo reward manager"""


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """``algorithm.filter_groups``, if enabled: groups whose samples all have the same ``metric`` are not trained."""

    metric: str
    max_num_gen_batches: int = 0
    """prompts that a version may consume, trained or filtered, in batches; 0: no limit"""

    @classmethod
    def from_config(cls, config: DictConfig) -> FilterSettings | None:
        """From the whole config; verl's node may be missing."""
        node = OmegaConf.select(config, "algorithm.filter_groups")
        return cls(node.metric, max(0, node.max_num_gen_batches)) if node and node.enable else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRolloutConfig:
    """The recipe's settings, checked. Sizes that a key leaves to verl's config are filled in by ``from_config``."""

    enable: bool = key(True, "`false` is noPR: verl's own synchronous rollout, batch for batch.")
    placement: Placement = key(Placement.COLOCATED, "Where the engines run.")
    mode: Mode = key(Mode.WINDOW, "How many prompts a round takes on.")
    overlap: float = key(
        1.0,
        "Spare groups in flight as a share of N = `data.train_batch_size` (window, april): more speed for more staleness, "
        "whose mean is about the overlap.",
        at_least=0,
    )
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
    slots_per_replica: int = key(
        None,
        "Samples that run at once on a replica. `null`: at most `rollout.max_num_seqs`, and no more than its KV cache "
        "holds; a line at start says how many and why ([docs/tuning.md](../../docs/tuning.md)).",
        at_least=1,
        null="by KV",
    )
    scheduling: Scheduling = section(Scheduling)
    correction: Correction = key(
        Correction.DECOUPLED,
        "How tokens that older weights sampled are trained ([docs/learning.md](../../docs/learning.md#correction)).",
    )
    trust_region: TrustRegion = key(
        TrustRegion.AUTO,
        "How far the trained policy may move from the one that sampled a token. A masked token has no gradient; it still "
        "counts in the mean ([docs/learning.md](../../docs/learning.md#trust-region)).",
    )
    trust_region_bounds: tuple[float, float] | None = key(
        None,
        "How far below and above ratio 1 the region reaches, `[low, high]`. `null`: `actor.clip_ratio_low` and "
        "`clip_ratio_high`.",
        above=0,
    )
    resume_kv: ResumeKV = key(ResumeKV.RECOMPUTE, "How an interrupted sample gets its keys and values back.")
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
    tools: ToolCalls = section(ToolCalls)
    failures: FailureLimits = section(FailureLimits)
    deadlines: Deadlines = section(Deadlines)

    batch_groups: int
    """N: ``data.train_batch_size``"""
    samples_per_group: int
    """``actor_rollout_ref.rollout.n``"""
    slots_given: bool = False
    """whether ``slots_per_replica`` was set; otherwise it is ``rollout.max_num_seqs`` until the KV caches are known"""
    group_filter: FilterSettings | None = None
    """``algorithm.filter_groups``; None: every group is trained"""

    @property
    def separate(self) -> bool:
        """Whether engines decode while the trainer updates."""
        return self.enable and self.placement is Placement.SEPARATE

    @property
    def policy(self) -> SchedulingPolicy:
        return self.scheduling.policy

    @property
    def batch_samples(self) -> int:
        return self.batch_groups * self.samples_per_group

    @property
    def away_s(self) -> float | None:
        """Longest deadline of what a sample without a slot awaits: a tool or its reward; None: a tool may take any time."""
        tool_s = self.failures.tool_timeout_s or self.failures.sample_timeout_s
        return tool_s and max(tool_s, self.deadlines.reward_s)

    @classmethod
    def from_config(cls, config: DictConfig) -> PartialRolloutConfig:
        """From the whole hydra config, whose keys of verl's are ``preflight.settings_check``'s to check.

        Raises:
            ConfigError: a key of the recipe's is wrong; in one line.
        """
        rollout = config.actor_rollout_ref.rollout
        values = read(cls, config[ROOT], ROOT)
        given = values["slots_per_replica"] is not None
        if not given:
            values["slots_per_replica"] = rollout.max_num_seqs
        return cls(
            **values,
            batch_groups=config.data.train_batch_size,
            samples_per_group=rollout.n,
            slots_given=given,
            group_filter=FilterSettings.from_config(config),
        )

    def __post_init__(self) -> None:
        """Check the keys against each other."""
        if self.placement is Placement.SEPARATE and not self.enable:
            raise fail(f"{ROOT}.placement", self.placement, f"colocated with {ROOT}.enable=False")
        if self.overlap > self.max_staleness:
            raise fail(
                f"{ROOT}.overlap",
                self.overlap,
                f"at most {ROOT}.max_staleness={self.max_staleness}: more groups in flight cannot all be trained in time",
            )
        if self.mode is not Mode.WINDOW and self.max_staleness < 1:
            raise fail(f"{ROOT}.max_staleness", self.max_staleness, f"at least 1 in mode {self.mode}")
        self._check_deadlines()

    def _check_deadlines(self) -> None:
        """A call's deadline must be able to pass before that of what it is part of."""
        tool_s, sample_s = self.failures.tool_timeout_s, self.failures.sample_timeout_s
        if tool_s is not None and sample_s is not None and tool_s > sample_s:
            words = f"at most {ROOT}.failures.sample_timeout_s={sample_s:g}, which would end its sample first"
            raise fail(f"{ROOT}.failures.tool_timeout_s", f"{tool_s:g}", words)
        held_s, stall_s = self.tools.release_after_s, self.deadlines.stall_s
        if held_s >= stall_s and (self.away_s or math.inf) >= stall_s:
            words = f"below {ROOT}.deadlines.stall_s={stall_s:g}, which would end the run during a call in its deadline"
            raise fail(f"{ROOT}.tools.release_after_s", f"{held_s:g}", words)


def register_keys() -> None:
    """Make known to hydra what conf/partial_rollout.yaml takes the keys and their defaults from.

    Every program calls it before it composes a config of conf/.
    """
    ConfigStore.instance().store("partial_rollout_keys", defaults_of(PartialRolloutConfig), package=ROOT)


FLAGS = tuple(each.name for each in declarations(PartialRolloutConfig) if each.kind is bool)
"""keys that are true or false"""


def check_keys(config: DictConfig) -> None:
    """Refuse keys of ``config.partial_rollout`` that do not exist, and make its flags bools in place.

    Raises:
        ConfigError: a key is unknown, or a flag is neither true nor false.
    """
    refuse_unknown(PartialRolloutConfig, config[ROOT], ROOT)
    for name in FLAGS:
        path = f"{ROOT}.{name}"
        OmegaConf.update(config, path, flag(path, OmegaConf.select(config, path)))


def default_of(name: str) -> Any:
    """The default of key ``partial_rollout.NAME``; ``name`` is dotted."""
    return next(each.default for each in declarations(PartialRolloutConfig) if each.name == name)


# -- devices of the trainer and of the engines -------------------------------------------------------------------------


def trainer_devices(config: DictConfig) -> int:
    """Devices of the trainer; with ``placement=colocated`` the engines use them, too."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def engine_devices(config: DictConfig) -> int:
    """Devices that are the engines' alone: 0 with ``placement=colocated``."""
    if config.partial_rollout.placement != Placement.SEPARATE:
        return 0
    rollout = config.actor_rollout_ref.rollout
    return rollout.nnodes * rollout.n_gpus_per_node
