"""clock10's tokenizer with another alphabet: the constant parts of a call are one token each.

A turn that calls takes 12 to 16 tokens, and the tool's answer 10. The ids of the special tokens, and their number, 64, are
clock10's, so that its model fits. Any character outside the alphabet becomes `<unk>`.
"""

from transformers import PreTrainedTokenizerFast

from recipe.partial_rollout.tasks.clock10.tokenizer import SPECIALS, VOCABULARY_SIZE
from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer as build_clock10_tokenizer

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
EXPRESSION_START = '\n{"name": "calculator", "arguments": {"expression": "'
EXPRESSION_END = '"}}\n'
WHOLE = (CALL_START, CALL_END, EXPRESSION_START, EXPRESSION_END, "user", "assistant", "tool", "system")
CHARACTERS = "0123456789" + "+-*?=_!" + "\n " + "abcdefghijklmnopqrstuvwxyz" + "{}\":,.'"
VOCABULARY = (*SPECIALS, *WHOLE, *CHARACTERS)
"""Token text by id, `[64]`."""

assert len(set(VOCABULARY)) == len(VOCABULARY) == VOCABULARY_SIZE


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: 64 ids, end of turn as the eos token; text within the alphabet round-trips."""
    return build_clock10_tokenizer(VOCABULARY, WHOLE)
