"""``partial_rollout.*``: its keys, and the settings of a run, which follow from them and from verl's config.

``PartialRolloutConfig.from_config`` refuses a bad value before Ray starts, in one line: the key, its value, what is
allowed. ``preflight/rules.py`` compares the keys with each other and with verl's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from msgspec import Meta
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.keys import (
    FINITE,
    FromOne,
    ImportPath,
    Positive,
    Whole,
    defaults_of,
    key,
    read,
    section,
)

CONF_DIR = Path(__file__).resolve().parents[3] / "conf"
"""the directory of the hydra configs"""
ROOT = "partial_rollout"
"""the node of the config that the keys are under"""
V1_MODE = "partial_rollout"
"""``trainer.v1.trainer_mode`` under which verl's v1 knows the recipe's trainer"""
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
"""verl's key for the overlong penalty of its dapo reward manager"""


# -- words of keys -----------------------------------------------------------------------------------------------------


class Choice(StrEnum):
    """Base of the enums of words that a key takes as values. Members are declared as ``NAME = value, words``."""

    words: str
    """its meaning"""

    def __new__(cls, value: str, words: str) -> Choice:
        member = str.__new__(cls, value)
        member._value_ = value
        member.words = words
        return member


class Mode(Choice):
    """Values of ``partial_rollout.mode``."""

    WINDOW = "window", "at the start of a round, up to `(1 + overlap) * N` groups are unfinished or ready"
    SSIM = "ssim", "the published supplementation: all through the round, up to `N * rollout.n` samples are unfinished"
    APRIL = (
        "april",
        "at the start of a round, up to `(1 + overlap) * N` groups are unfinished; if that is below N, up to its smallest "
        "multiple that reaches N",
    )


class Placement(Choice):
    """Values of ``partial_rollout.placement``."""

    COLOCATED = "colocated", "trainer and engines share the devices and take turns"
    SEPARATE = (
        "separate",
        "engines have devices of their own and decode while the trainer updates "
        "([docs/placement.md](../../docs/placement.md))",
    )


class SchedulingPolicy(Choice):
    """Values of ``partial_rollout.scheduling.policy`` that name the recipe's orders; it may also be an import path."""

    BOUNDED = (
        "bounded",
        "oldest first; carried groups before new prompts, then fewest unfinished samples, then shortest mean length",
    )
    SEED = "seed", "the published order: fewest unfinished samples, then shortest mean length, then least stale"


class ResumeKV(Choice):
    """Values of ``partial_rollout.resume_kv``."""

    RECOMPUTE = "recompute", "prompt and tokens so far are prefilled again under the new weights"
    KEEP = (
        "keep",
        "the keys and values of the old weights, where vLLM's prefix cache still has them; see "
        "[docs/tuning.md](../../docs/tuning.md#keeping-the-kv-cache)",
    )


class Correction(Choice):
    """Values of ``partial_rollout.correction``."""

    DECOUPLED = "decoupled", "the loss weighs them by `pi_prox / pi_behav` (AReaL, arXiv:2505.24298, equation 5)"
    NONE = "none", "they train as if the weights before the update had made them; for ablations, prints a warning"


class TrustRegion(Choice):
    """Values of ``partial_rollout.trust_region``; ``training/loss.py`` has the formulas."""

    AUTO = (
        "auto",
        "`mask`; `none` where the loss has one ratio a sequence (`gspo`) or bounds a divergence (`dppo_tv`, `dppo_kl`), or "
        "with `correction=none`",
    )
    NONE = "none", "as far as the updates take it"
    MASK = (
        "mask",
        "tokens are masked whose `pi_theta / pi_behav` has left the bounds in the direction of their advantage",
    )


# -- sections ----------------------------------------------------------------------------------------------------------


def whole(groups: float) -> int:
    """Round ``groups`` down.

    A number that a rounding error has left just below an integer, such as 2.9999999, becomes it.
    """
    return math.floor(groups + 1e-6)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Section ``partial_rollout.scheduling``."""

    policy: SchedulingPolicy | ImportPath = key(
        SchedulingPolicy.BOUNDED,
        "Which sample runs next: a word, or the import path of an order of your own. "
        "[docs/extending.md](../../docs/extending.md#an-order) has one.",
    )
    overtake: Annotated[float, Meta(ge=0, le=FINITE)] | None = key(
        None,
        "How far a group may overtake an older one, as a share of N: a group is trained at most `floor(overtake * N)` "
        "positions of the data ahead of a group that is not. A small share keeps the batches' lengths those of the data, "
        "for more waiting. 0: prompts run and train in the order of the data, whatever the policy. `null`: no limit.",
    )

    def positions(self, batch_groups: int) -> int | None:
        """Return how many positions a trained group may be ahead of an unfinished one in the data; None: any number.

        ``batch_groups`` is N.

        >>> [Scheduling(overtake=share).positions(8) for share in (None, 0, 0.3)]
        [None, 0, 2]
        """
        return None if self.overtake is None else whole(self.overtake * batch_groups)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Section ``partial_rollout.deadlines``: limits of waits, in seconds. A wait that passes its limit ends the run.

    Two do not: a late reward fails and is computed again, and a late agent-loop worker is replaced.
    """

    stall_s: Positive = key(
        1800,
        "The run ends after this many seconds of an open round in which no sample reports and no engine makes a token. A "
        "tool or reward within its own deadline is no stall.",
    )
    reward_s: Positive = key(300, "Seconds for one call of the reward function.")
    interrupt_s: Positive = key(
        60,
        "Seconds for each of these: all replicas stop decoding, or resume; all samples are collected, or granted, once the "
        "trainer waits for it; the outputs of a batch are fetched; a colocated reward model wakes up, or goes to sleep.",
    )
    weight_sync_s: Positive = key(600, "Seconds for one weight sync.")


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Section ``partial_rollout.tools``."""

    release_after_s: Annotated[float, Meta(ge=0)] = key(
        0.1,
        "Seconds without an engine call, whatever a sample awaits (a tool, its reward, a place in a sandbox), after which "
        "it gives its slot to another, until it needs the engine again. `inf`: it keeps its slot.",
    )


@dataclass(frozen=True, slots=True)
class FailureLimits:
    """Section ``partial_rollout.failures``: how much may go wrong before the run ends."""

    sample_retries: Whole | None = key(
        2,
        "Retries of a sample whose agent loop or reward function raises, whose request vLLM refuses, or "
        "that takes too long; then it is masked: its group trains without its tokens. `null`: the first failure ends the "
        "run.",
    )
    tool_timeout_s: Positive | None = key(
        600,
        "Timeout of one tool call in seconds. The sample then fails even if its agent loop catches tool errors. A retry "
        "calls its tools anew ([docs/extending.md](../../docs/extending.md#effects)). `null`: no limit.",
    )
    sample_timeout_s: Positive | None = key(
        1200,
        "Seconds that a sample may spend between two engine calls: in tools, environments and its agent loop. Waits for a "
        "slot, the next round, the engine and the reward have deadlines of their own and do not count. At least "
        "`tool_timeout_s`. `null`: no limit.",
    )
    max_masked_fraction: Annotated[float, Meta(ge=0, le=1)] = key(
        0.25,
        "Share of a batch's samples that may be masked; above it the run ends.",
    )
    worker_restarts: Whole = key(
        3,
        "Agent-loop workers that a process of the run may replace (a resume counts from 0); their single-turn samples "
        "go on, their conversations begin anew. Each of verl's reward workers may be restarted as often.",
    )
    replica_restarts: Whole = key(
        1,
        "vLLM replicas that a process of the run may restart, while others are alive (not run on a GPU).",
    )


# -- the whole ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """``algorithm.filter_groups``, if enabled: groups whose samples all have the same ``metric`` are not trained."""

    metric: str
    max_num_gen_batches: int = 0
    """prompts that a version may consume, trained or filtered, in batches; 0: no limit"""

    @classmethod
    def from_config(cls, config: DictConfig) -> FilterSettings | None:
        """Make it from the whole config; None if the filter is off or the config lacks verl's section."""
        node = OmegaConf.select(config, "algorithm.filter_groups")
        return cls(node.metric, max(0, node.max_num_gen_batches)) if node and node.enable else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRolloutConfig:
    """The recipe's settings, each value checked. ``from_config`` fills in sizes that a key leaves to verl's config."""

    enable: bool = key(True, "`false` is noPR: verl's own synchronous rollout, batch for batch.")
    placement: Placement = key(Placement.COLOCATED, "Where the engines run.")
    mode: Mode = key(Mode.WINDOW, "How many prompts a round takes on.")
    overlap: Annotated[float, Meta(gt=-1, le=FINITE)] = key(
        1.0,
        "Spare groups in flight as a share of N = `data.train_batch_size`. More is faster and staler: the mean staleness "
        "is about the overlap. Only `mode=window` and `mode=april` read it; below 0 needs `april`.",
    )
    drain: bool = key(
        True,
        "What to do with in-flight prompts when `trainer.total_training_steps` ends training before the data runs out. "
        "`true`: the last rounds admit only what is still trained. `false`: all rounds are alike, the last checkpoint "
        "holds what is in flight, and a training resumed with more steps continues it.",
    )
    max_staleness: Whole = key(
        4,
        "Most versions between a sample's first token and the update that trains it. A round also waits for a group that "
        "would otherwise be trained too late, as each version trains only N groups.",
    )
    slots_per_replica: FromOne = key(
        None,
        "Samples that run at once on a replica. `null`: at most `rollout.max_num_seqs`, and no more than its KV cache "
        "holds; a line at start says how many and why ([docs/tuning.md](../../docs/tuning.md)).",
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
    trust_region_bounds: tuple[Positive, Positive] | None = key(
        None,
        "How far below and above ratio 1 the region reaches, `[low, high]`. `null`: `actor.clip_ratio_low` and "
        "`clip_ratio_high`; `dppo_tv` and `dppo_kl` need numbers to `mask`. Refused where there is no region.",
    )
    resume_kv: ResumeKV = key(ResumeKV.RECOMPUTE, "How an interrupted sample gets its keys and values back.")
    reward_in_worker: bool = key(
        False,
        "Score in the agent-loop workers instead of verl's reward workers, which saves a round trip a sample. For cheap "
        "functions without a reward model; also under noPR.",
    )
    reward_concurrency: FromOne = key(
        None,
        "Samples of an agent-loop worker that are scored at once; others wait, and no deadline runs for them. `null`: the "
        "cluster's cores, divided by the workers; no limit where verl's reward model or sandbox service scores. Raise it "
        "for a function that waits for a service of yours. Also under noPR.",
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
    def batch_samples(self) -> int:
        return self.batch_groups * self.samples_per_group

    @property
    def parked_s(self) -> float | None:
        """Most seconds that a PARKED sample may wait for its tool or reward; None: no limit."""
        tool_s = self.failures.tool_timeout_s or self.failures.sample_timeout_s
        return tool_s and max(tool_s, self.deadlines.reward_s)

    @classmethod
    def from_config(cls, config: DictConfig) -> PartialRolloutConfig:
        """Make the settings of the whole hydra config; ``preflight`` checks verl's keys, and relations between keys.

        Raises:
            ConfigError: a key of the recipe's is wrong, or does not exist; in one line.
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


def register_keys() -> None:
    """Register the keys and their defaults with hydra, for conf/partial_rollout.yaml.

    Every program calls it before it composes a config of conf/.
    """
    ConfigStore.instance().store("partial_rollout_keys", defaults_of(PartialRolloutConfig), package=ROOT)


class _Configs(SearchPathPlugin):
    """Lets hydra find the configs of verl and of ``CONF_DIR``, whatever directory the composed config is in."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # The config that is composed may be of CONF_DIR itself.
        for path in (f"file://{CONF_DIR}", "pkg://verl.trainer.config"):
            if path not in [part.path for part in search_path.get_path()]:
                search_path.append("partial-rollout", path)


def register_configs() -> None:
    """Register the keys, and the folders in which hydra finds configs.

    The recipe's programs call it, verl's own command not.
    """
    register_keys()
    Plugins.instance().register(_Configs)


def verls_own(config: DictConfig) -> bool:
    """Whether ``config`` names one of verl's own v1 trainers.

    Such a run is none of the recipe's: the recipe only checks it.
    """
    return config.trainer.use_v1 and config.trainer.v1.trainer_mode != V1_MODE


def lora_rank(config: DictConfig) -> int:
    """Rank of the LoRA adapters that are trained, under FSDP or Megatron; 0 if the model itself is."""
    model = config.actor_rollout_ref.model
    return model.get("lora_rank") or OmegaConf.select(model, "lora.rank") or 0


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
