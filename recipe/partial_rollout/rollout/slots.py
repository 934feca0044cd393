"""How many samples run at once on a replica: no more than its seats, and no more than its KV cache holds.

Slots beyond the KV cache do not speed a replica up: vLLM preempts the samples that were dispatched last and prefills
their contexts again and again. In the planner's simulation (Qwen3-4B on H20, 32 groups of 8 a step, 512 in flight on one
replica; lognormal lengths with median 3,000, mean 3,600, cap 18,384) 512 slots cost 1,154 preemptions a round and reach
2,362 tokens/s; the rule below has 22 preemptions and reaches 2,772, the best fixed number 2,743. With lengths near their
cap (mean 6,800 of 8,192) the figures are 1,364 and 2,155 against 29 and 2,476.

Before anything is decoded, a sample counts as ``prompt_length + response_length / 2`` tokens, which it holds on average
if all samples reach their cap. Kept for the whole run, that would cost a quarter of the speed if lengths have a tail
(2,119 tokens/s). So after the first round a sample counts as the context measured while decoding, and the slots fill
``KV_SHARE`` of the cache: of .7, .8 and .9 the largest without many preemptions (.9: 144 a round, no faster).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.terminal import say

KV_SHARE = 0.8
"""share of the KV cache that samples of the measured mean context fill; the rest is for their spread"""
_NOTABLE = 0.05
"""smallest change of the slots that is made, as a share"""


class ReplicaSlots:
    """The slots of each replica; unless the user gave a number, they follow the lengths from round to round.

    Args:
        most: ``partial_rollout.slots_per_replica`` where ``given``, else ``rollout.max_num_seqs``.
        kv_tokens: tokens that the smallest KV cache of all replicas holds; None: unknown.
        prompt, response: tokens of the longest that the configuration allows.
        replicas: how many there are.
    """

    def __init__(
        self, most: int, *, given: bool, kv_tokens: int | None, prompt: int, response: int, replicas: int = 1
    ) -> None:
        self._most, self._given, self._kv_tokens = most, given, kv_tokens
        self._prompt, self._response, self._replicas = prompt, response, replicas
        self._guess = prompt + -(-response // 2)
        """tokens that a sample holds on average if it reaches its cap"""
        self.per_replica = most if given or kv_tokens is None else self._that_fit(self._guess)

    def _that_fit(self, tokens: float) -> int:
        assert self._kv_tokens is not None
        return min(self._most, max(1, int(self._kv_tokens / tokens)))

    @property
    def total(self) -> int:
        """Slots of all replicas."""
        return self.per_replica * self._replicas

    def of_a_worker(self, workers: int) -> int:
        """The share of all slots that each of ``workers`` has."""
        return math.ceil(self.total / workers)

    def describe(self) -> str:
        """One line: what was chosen before the first round, and why."""
        bound = "partial_rollout.slots_per_replica" if self._given else f"at most rollout.max_num_seqs={self._most}"
        holds = "an unknown number of" if self._kv_tokens is None else f"{self._kv_tokens:,}"
        return (
            f"slots per replica: {self.per_replica} ({bound}; the KV cache holds {holds} tokens, a sample is estimated at "
            f"{self._guess:,} = prompt_length {self._prompt:,} + response_length {self._response:,} / 2)"
        )

    def update(self, calls: Iterable[EngineCall]) -> bool:
        """Adjust the slots to the calls of a step; returns whether they changed, which a line says."""
        if self._given or self._kv_tokens is None:
            return False
        decoded = [(call.tokens, call.context_tokens + call.tokens / 2) for call in calls if call.context_tokens]
        tokens = sum(count for count, _ in decoded)
        if not tokens:
            return False
        mean = sum(count * context for count, context in decoded) / tokens
        fit = self._that_fit(mean / KV_SHARE)
        if abs(fit - self.per_replica) < max(1, _NOTABLE * self.per_replica):
            return False
        self.per_replica = fit
        say(
            f"slots per replica: {fit} from here on (samples held {mean:,.0f} tokens on average while decoding, the KV "
            f"cache holds {self._kv_tokens:,}; rollout.max_num_seqs={self._most})"
        )
        return True
