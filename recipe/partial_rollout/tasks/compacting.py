"""An agent loop that compacts its context: the calculator task with less room than its conversations need.

When a row is full, the next row begins with a summary: here the problem, the last call and its value. Each row is
trained with the context that the model read. The last row has the answer, and so the reward::

    row 1    [problem]                     call, value, call, value, call
    row 2    [problem, call, value]        call, value, call, value, call
    row 3    [problem, call, value]        call, value, answer
"""

import re
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from recipe.partial_rollout.tasks.calculator.conversation import evaluate
from recipe.partial_rollout.tasks.clock10.tokenizer import TURN_END, TURN_START

_CALL = re.compile(r'"expression": "(.*?)"')
_MOST_TURNS = 24


@dataclass(slots=True)
class _Row:
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: int = 1

    def add(self, tokens: list[int], log_probs: list[float] | None) -> None:
        """Append a message. ``log_probs`` None: the model did not write it, and its tokens are masked out of the
        loss."""
        self.response_ids += tokens
        self.mask += [int(log_probs is not None)] * len(tokens)
        self.log_probs += log_probs or [0.0] * len(tokens)
        self.turns += 1

    def output(self) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.mask,
            response_logprobs=self.log_probs,
            num_turns=self.turns,
            metrics=AgentLoopMetrics(),
        )


class CompactingLoop(AgentLoopBase):
    """Guesses operators and asks for the value, as verl's tool loop does on this task.

    Args:
        budget: response tokens after which a row is full.
        args, more: verl's.
    """

    def __init__(self, *args: Any, budget: int = 80, **more: Any) -> None:
        super().__init__(*args, **more)
        self._budget = budget

    async def run(self, sampling_params: dict[str, Any], **columns: Any) -> list[AgentLoopOutput]:  # type: ignore[override]
        """Return a row for each context."""
        problem, name = await self.ct_build_initial_tokens(list(columns["raw_prompt"])), uuid4().hex
        tokenizer: Any = self.tokenizer
        rows = [_Row(problem)]
        for _ in range(_MOST_TURNS):
            row = rows[-1]
            room = self.rollout_config.response_length - len(row.response_ids)
            turn = await self.server_manager.generate(
                name,
                prompt_ids=row.prompt_ids + row.response_ids,
                sampling_params={**sampling_params, "max_tokens": room},
            )
            row.add(turn.token_ids, turn.log_probs or [0.0] * len(turn.token_ids))
            call = _CALL.search(tokenizer.decode(turn.token_ids))
            if call is None or len(row.response_ids) >= self.rollout_config.response_length:
                break
            said = f"\n{TURN_START}tool\n{evaluate(call[1])}{TURN_END}\n{TURN_START}assistant\n"
            value = tokenizer.encode(said, add_special_tokens=False)
            if len(row.response_ids) + len(value) < self._budget:
                row.add(value, None)
            else:
                rows.append(_Row(problem + turn.token_ids + value))
        # The loop may end right after it began a row, which then has no token.
        return [row.output() for row in rows if row.response_ids]
