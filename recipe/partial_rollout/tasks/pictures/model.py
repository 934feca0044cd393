"""The policy: a tiny Qwen3-VL in float32 whose language part has the sizes of clock10's model, and its processor."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from recipe.partial_rollout.tasks.clock10 import model as clock10
from recipe.partial_rollout.tasks.pictures.picture import CELL
from recipe.partial_rollout.tasks.pictures.tokenizer import IMAGE, VIDEO, VISION_END, VISION_START, VOCABULARY

MERGE = 2
"""patches that make one token, on each side"""
_LIKE_CLOCK10 = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps bos_token_id eos_token_id pad_token_id"
)
PIXELS = {"shortest_edge": (CELL * MERGE) ** 2, "longest_edge": (8 * CELL * MERGE) ** 2}
"""least and most pixels to which pictures are scaled"""


def build_config() -> Qwen3VLConfig:
    """Return the model's architecture."""
    language = clock10.build_config()
    rope: Any = language.rope_parameters
    text = {key: getattr(language, key) for key in _LIKE_CLOCK10.split()}
    text["rope_parameters"] = {**rope, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": language.hidden_size,
        "patch_size": CELL,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    places = {"image": IMAGE, "video": VIDEO, "vision_start": VISION_START, "vision_end": VISION_END}
    ids: Any = {f"{name}_token_id": VOCABULARY.index(token) for name, token in places.items()}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="float32", **ids)


def build_model(seed: int) -> Qwen3VLForConditionalGeneration:
    """Return a randomly initialised model; equal seeds give equal weights. The global torch generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(build_config())
    model.generation_config = clock10.build_model(seed).generation_config
    return model.float()


def save_processor(folder: Path) -> None:
    """Write the settings of the image and the video processor, which turn pictures into the model's input.

    They are written as text, because transformers cannot load a video processor without torchvision.
    """
    sizes = {"patch_size": CELL, "temporal_patch_size": 2, "merge_size": MERGE}
    scale = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "size": PIXELS, **sizes, **scale}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "size": PIXELS, **sizes, **scale}
    both = {"processor_class": "Qwen3VLProcessor"}
    for name, content in (("preprocessor_config", image), ("video_preprocessor_config", video)):
        (folder / f"{name}.json").write_text(json.dumps({**content, **both}, indent=2) + "\n")
