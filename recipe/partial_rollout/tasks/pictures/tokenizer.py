"""clock10's tokenizer, with four special tokens of vision models in place of characters that the task does not use.

The number of ids is the same, and all other ids mean the same, so a language model of clock10 can read them.
"""

from transformers import PreTrainedTokenizerFast

from recipe.partial_rollout.tasks.clock10 import tokenizer as clock10

VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VISION = (VISION_START, VISION_END, IMAGE, VIDEO)
_REPLACED = dict(zip("[]\\/", VISION, strict=True))
VOCABULARY = tuple(_REPLACED.get(token, token) for token in clock10.VOCABULARY)
"""Token text by id, `[64]`."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML, with one placeholder a picture; a processor repeats it for each of the picture's tokens."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: 64 ids, end of turn as the eos token."""
    tokenizer = clock10.build_tokenizer(VOCABULARY, (*clock10.ROLE_WORDS, *VISION))
    # A decoded prompt has no placeholders, from which verl would count pictures once more.
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
