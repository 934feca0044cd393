"""Patch: a prompt that does not fit ``rollout.prompt_length`` is an error of its agent loop.

verl cuts such a prompt on its left and trains on the rest, a conversation without its system prompt; only a worker's
log says so. The prompts of rows are measured before Ray starts, but an agent loop or a tool's schema may add to them.
The error fails the sample and names it, whichever loop renders the prompt. It may go when verl refuses such a prompt.
"""

from typing import Any

from verl_ext.guard import around


def patch(module: Any) -> None:
    """Wrap the method by which verl's ``AgentLoopBase`` cuts a prompt of text."""

    @around(module.AgentLoopBase, "_cap_text_prompt_length")
    def whole_prompt(verls: Any, self: Any, prompt_ids: list[int]) -> list[int]:
        kept = verls(self, prompt_ids)
        if len(kept) < len(prompt_ids):
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens (actor_rollout_ref.rollout.prompt_length={len(kept)}): "
                "verl would cut it on its left"
            )
        return kept
