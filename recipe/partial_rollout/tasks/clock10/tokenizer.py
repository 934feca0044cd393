"""The character-level tokenizer: exactly 64 ids, as many as the model's vocabulary.

The sizes must agree: an inference engine masks ids beyond the tokenizer's while a trainer does not, and their
log-probabilities would then differ everywhere. Symbols cover the task, lower-case English and JSON tool calls in the
Hermes format; any other character becomes `<unk>`.
"""

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"
SPECIALS = (PAD, TURN_START, TURN_END, UNKNOWN)
ROLE_WORDS = ("user", "assistant", "system")
CHARACTERS = "0123456789" + "+-*?=_!" + "\n " + "abcdefghijklmnopqrstuvwxyz" + '<>/{}":,.[]\\'
VOCABULARY = (*SPECIALS, *ROLE_WORDS, *CHARACTERS)
"""Token text by id, `[64]`."""
VOCABULARY_SIZE = 64

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
"""ChatML, one turn a message, whatever its role.

Each message renders the same whatever surrounds it, which verl's token-level merging of multi-turn prompts relies on.
Tool schemas are left out: at one token a character they would outweigh every prompt, and the model cannot read them.
"""


def build_tokenizer(
    vocabulary: tuple[str, ...] = VOCABULARY, whole: tuple[str, ...] = ROLE_WORDS
) -> PreTrainedTokenizerFast:
    """Return the tokenizer: 64 ids, end of turn as the eos token; text within the alphabet round-trips.

    Args:
        vocabulary: token text by id; the special tokens first.
        whole: texts that are one token each; every other character is a token of its own.
    """
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    # Splitting by this pattern is the whole algorithm.
    pattern = Regex("|".join((*map(re.escape, whole), r"[\s\S]")))
    core.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=TURN_START,
        eos_token=TURN_END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == VOCABULARY_SIZE, f"tokenizer has {len(tokenizer)} ids, want {VOCABULARY_SIZE}"
    return tokenizer
