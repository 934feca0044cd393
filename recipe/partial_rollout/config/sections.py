"""The sections of ``partial_rollout``: declared keys, each with its default, its limits and its meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recipe.partial_rollout.config.choices import SchedulingPolicy
from recipe.partial_rollout.config.keys import key


def seconds(default: float, words: str) -> float:
    """A key in seconds, above 0."""
    return key(default, words, above=0, unit="seconds")


@dataclass(frozen=True, slots=True)
class Scheduling:
    """``partial_rollout.scheduling``."""

    policy: SchedulingPolicy = key(SchedulingPolicy.BOUNDED, "Which sample runs next.")
    overtake: float | None = key(
        None,
        "How far a group may overtake an older one, as a share of N: a group is trained at most `floor(overtake * N)` "
        "positions of the data ahead of a group that is not. A small share keeps the batches' lengths those of the data, "
        "for more waiting. 0: prompts run and train in the order of the data, whatever the policy. `null`: no limit.",
        at_least=0,
    )

    def positions(self, batch_groups: int) -> int | None:
        """Most positions by which a trained group may be ahead of an unfinished one, N = ``batch_groups``; None: any.

        >>> [Scheduling(overtake=share).positions(8) for share in (None, 0, 0.3)]
        [None, 0, 2]
        """
        # A share written in decimals can fall short of a whole number by a rounding error.
        return None if self.overtake is None else math.floor(self.overtake * batch_groups + 1e-6)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """``partial_rollout.deadlines``: seconds after which a wait ends the run with an error."""

    stall_s: float = seconds(
        1800,
        "Seconds of an open round in which no sample reports and no engine makes a token, after which the run ends. A "
        "tool or reward within its own deadline is no stall.",
    )
    reward_s: float = seconds(300, "Seconds for one call of the reward function.")
    interrupt_s: float = seconds(
        60,
        "Seconds for all replicas to become quiet, or to resume; for all samples to be collected, or granted, once the "
        "trainer waits for it; for the outputs of a batch to be fetched; for a colocated reward model to wake up or sleep.",
    )
    weight_sync_s: float = seconds(600, "Seconds for one weight sync.")


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """``partial_rollout.tools``."""

    release_after_s: float = key(
        0.1,
        "Seconds without an engine call, whatever a sample awaits (a tool, its reward, a place in a sandbox), after which "
        "it gives its slot to another, until it needs the engine again. `inf`: it keeps its slot.",
        at_least=0,
        unit="seconds",
        word=math.inf,
    )


@dataclass(frozen=True, slots=True)
class FailureLimits:
    """``partial_rollout.failures``: how much may go wrong before the run ends."""

    sample_retries: int | None = key(
        2,
        "Retries, from its journal, of a sample whose agent loop or reward function raises, whose request vLLM refuses, or "
        "that takes too long; then it is masked: its group trains without its tokens. `null`: the first failure ends the "
        "run.",
        at_least=0,
    )
    tool_timeout_s: float | None = key(
        600,
        "Seconds for one tool call, after which the sample fails, whatever its agent loop makes of tool errors. Whether a "
        "retry calls again, the tool says ([docs/extending.md](../../docs/extending.md#effects)). `null`: no limit.",
        above=0,
        unit="seconds",
    )
    sample_timeout_s: float | None = key(
        1200,
        "Seconds that a sample may spend between two engine calls: in tools, environments and its agent loop. Waits for a "
        "slot, the next round, the engine and the reward have deadlines of their own and do not count. In validation the "
        "run ends. At least `tool_timeout_s`. `null`: no limit.",
        above=0,
        unit="seconds",
    )
    max_masked_fraction: float = key(
        0.25,
        "Share of a batch's samples that may be masked; above it the run ends.",
        at_least=0,
        share_of="the batch",
    )
    worker_restarts: int = key(
        3,
        "Agent-loop workers that may be replaced over the whole run; their samples resume from their journals. Each of "
        "verl's reward workers may be restarted as often.",
        at_least=0,
    )
    replica_restarts: int = key(
        1,
        "vLLM replicas that may be restarted over the whole run, while others are alive (not run on a GPU).",
        at_least=0,
    )
