"""A tiny random model that sees, its processor, and rows with images: ``python -m tests.tiny_vlm qwen3_vl DIR``."""

import io
import random
import sys
from pathlib import Path

import pandas as pd
import torch
import transformers
from PIL import Image
from transformers import GenerationConfig, Qwen2VLImageProcessor

from recipe.partial_rollout.tasks.clock10.tokenizer import (
    PAD,
    ROLE_WORDS,
    TURN_END,
    TURN_START,
    VOCABULARY,
    build_tokenizer,
)

VISION = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
WORDS = VOCABULARY[:-4] + VISION
"""in place of four signs that no test writes"""
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "w": (255, 255, 255)}
_CONSTANT = 4.0


def build(kind: str, out: Path) -> None:
    """Write model, tokenizer and processor of ``kind``, qwen3_vl or qwen2_5_vl, to ``out``."""
    ids = {token: WORDS.index(token) for token in WORDS}
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": ids[TURN_START],
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[PAD],
        "tie_word_embeddings": False,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    if kind == "qwen3_vl":
        name, patch = "Qwen3VL", 16
        text |= {"head_dim": 32, "rope_parameters": {**rope, "mrope_section": [6, 5, 5], "mrope_interleaved": True}}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    else:
        name, patch = "Qwen2_5_VL", 14
        text |= {"rope_parameters": {**rope, "mrope_section": [4, 6, 6]}}
        vision |= {"fullatt_block_indexes": [1], "window_size": 112}
    names = "vision_start", "vision_end", "image", "video"
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config={**vision, "patch_size": patch},
        dtype="float32",
        tie_word_embeddings=False,
        **{f"{key}_token_id": ids[token] for key, token in zip(names, VISION, strict=True)},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float()
    _never_say(model, [ids[token] for token in VISION])
    ends = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ends)
    tokenizer = build_tokenizer(WORDS, ROLE_WORDS + VISION)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION)})
    tokenizer.chat_template = TEMPLATE
    size = {"shortest_edge": 4 * patch**2, "longest_edge": 4096 * patch**2}
    video = transformers.Qwen3VLVideoProcessor if kind == "qwen3_vl" else transformers.Qwen2VLVideoProcessor
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=Qwen2VLImageProcessor(patch_size=patch, temporal_patch_size=2, merge_size=2, size=size),
        tokenizer=tokenizer,
        video_processor=video(patch_size=patch),
        chat_template=TEMPLATE,
    )
    model.save_pretrained(out)
    processor.save_pretrained(out)
    tokenizer.save_pretrained(out)


@torch.no_grad()
def _never_say(model: torch.nn.Module, tokens: list[int]) -> None:
    """Make ``tokens`` improbable, which verl bans from sampling: a trainer counts them among the others.

    One component of every token's state has a constant value, by which these tokens are told apart.
    """
    layers = model.model.language_model
    layers.embed_tokens.weight[:, 0] = _CONSTANT
    for layer in layers.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[tokens] = 0.0
    model.lm_head.weight[tokens, 0] = -_CONSTANT


def picture(colour: str, width: int = 64, height: int = 64) -> Image.Image:
    return Image.new("RGB", (width, height), COLOURS[colour])


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def row(index: int, colours: str, side: int = 64) -> dict:
    """A row that asks for the colour of its first image, and shows one for each of ``colours``."""
    images = [{"bytes": file_of(picture(colour, side)), "path": None} for colour in colours]
    return {
        "data_source": "colours",
        "prompt": [{"role": "user", "content": "<image>" * len(colours) + "?"}],
        "images": images,
        "reward_model": {"style": "rule", "ground_truth": colours[0]},
        "extra_info": {"index": index, "split": "train"},
    }


def write_rows(path: Path, count: int) -> None:
    """Rows with one or two images of several sizes."""
    draw = random.Random(0)
    drawn = ("".join(draw.choices([*COLOURS], k=draw.choice([1, 2]))) for _ in range(count))
    pd.DataFrame([row(i, each, draw.choice([64, 96, 128])) for i, each in enumerate(drawn)]).to_parquet(path)


if __name__ == "__main__":
    kind, out = sys.argv[1], Path(sys.argv[2])
    build(kind, out / "model")
    write_rows(out / "rows.parquet", 24)
