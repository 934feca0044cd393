"""clock10's tokenizer with another alphabet: the constant parts of a call are one token each.

A turn that calls takes 12 to 16 tokens, and the tool's answer 10. The ids of the special tokens, and their number, 64, are
clock10's, so that its model fits. Any character outside the alphabet becomes `<unk>`.
"""

import re

from tokenizers import Regex, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe.partial_rollout.tasks.clock10.tokenizer import SPECIALS, UNKNOWN, VOCABULARY_SIZE
from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer as build_clock10_tokenizer

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
EXPRESSION_START = '\n{"name": "calculator", "arguments": {"expression": "'
EXPRESSION_END = '"}}\n'
WHOLE = (CALL_START, CALL_END, EXPRESSION_START, EXPRESSION_END, "user", "assistant", "tool", "system")
CHARACTERS = "0123456789" + "+-*?=_!" + "\n " + "abcdefghijklmnopqrstuvwxyz" + "{}\":,.'"
VOCABULARY = (*SPECIALS, *WHOLE, *CHARACTERS)
"""Token text by id, `[64]`."""

assert len(set(VOCABULARY)) == len(VOCABULARY) == VOCABULARY_SIZE

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- (function.arguments if function.arguments is string else function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML, one turn a message, whatever its role. Tool schemas are left out: the model knows its one tool."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: 64 ids, end of turn as the eos token; text within the alphabet round-trips."""
    tokenizer = build_clock10_tokenizer()
    core = tokenizer.backend_tokenizer
    core.model = models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN)
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join((*map(re.escape, WHOLE), r"[\s\S]"))), behavior="isolated")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
