"""The embedded task with today's verl and transformers: reward, tokenizer, rows, and the folder that is built.

What else it does cannot change unseen: the warm start that ships names the SHA-256 of its sources (``test_ready_start``).
"""

import sys
from pathlib import Path
from subprocess import run

import pandas as pd
import pytest
import torch

from recipe.partial_rollout.tasks.clock10 import prepare
from recipe.partial_rollout.tasks.clock10.expression import Problem
from recipe.partial_rollout.tasks.clock10.reward import compute_score
from recipe.partial_rollout.tasks.clock10.tokenizer import CHARACTERS, build_tokenizer

EXAMPLE = Problem((3, 4, 2, 9), 8)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def tiny_task(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("clock10") / "task"
    assert prepare.main(["--out", str(out), "--tiny", "--steps", "4"]) == 0
    return out


@pytest.mark.parametrize(
    "response, score",
    [("3*4=2*2=4-9=5-8=7\n!--+", 1.0), ("!+*+", 0.0), ("!--", 0.0), ("--+", 0.0), ("!--+ ", 0.0), ("", 0.0)],
)
def test_only_a_complete_correct_answer_at_the_very_end_scores(response, score):
    # 3-4=9-2=7+9=6: the target below is what `--+` reaches.
    assert compute_score("clock10", response, Problem((3, 4, 2, 9), 6).prompt, extra_info={}) == score


def test_text_in_the_alphabet_round_trips_and_a_turn_costs_three_tokens_more(tokenizer):
    assert tokenizer.decode(tokenizer.encode(CHARACTERS, add_special_tokens=False)) == CHARACTERS
    other = tokenizer.encode("3é<|im_end|>", add_special_tokens=False)
    assert other == [tokenizer.convert_tokens_to_ids("3"), tokenizer.unk_token_id, tokenizer.eos_token_id]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": EXAMPLE.prompt}], return_dict=False)
    assert len(ids) == len(EXAMPLE.prompt) + 1 + len(["start", "newline", "end", "newline"])


def test_the_prepared_folder_loads_with_plain_transformers(tiny_task):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny_task / "model", dtype=torch.float32)
    assert len(tokenizer) == model.config.vocab_size == 64
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(pd.read_parquet(tiny_task / "data/val.parquet")) == 8


def test_a_second_call_does_nothing_and_never_imports_torch(tiny_task):
    before = {path: path.stat().st_mtime_ns for path in tiny_task.rglob("*")}
    arguments = ["--out", str(tiny_task), "--tiny", "--steps", "4"]
    script = (
        f"import sys; from recipe.partial_rollout.tasks.clock10 import prepare; prepare.main({arguments!r}); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    result = run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "up to date" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in tiny_task.rglob("*")} == before
