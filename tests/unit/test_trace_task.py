"""The task of the GPU acceptance can be made without a GPU."""

import json

import numpy as np
import pandas as pd
from transformers import AutoTokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.partial_rollout.tasks.trace_task.prepare import main, response_budgets, write_model


def test_budgets_are_long_tailed_and_capped():
    budgets = response_budgets(20_000, median=1500, cap=8192, seed=0)
    assert 1450 < np.median(budgets) < 1550
    assert 2.7 < np.percentile(budgets, 97) / np.median(budgets) < 3.4
    assert budgets.max() == 8192 and budgets.min() >= 1


def test_task_has_the_rows_and_the_vocabulary_asked_for(tmp_path):
    assert main(["--out", str(tmp_path), "--shape", "tiny", "--rows", "40", "--vocabulary", "500"]) == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] == 500
    rows = pd.read_parquet(tmp_path / "data" / "train.parquet")
    assert len(rows) == 40 and rows.extra_info[0]["response_budget"] >= 1


def test_median_at_the_cap_is_refused(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--median", "10", "--cap", "10"]) == 2
    assert capsys.readouterr().err == "--median=10: below --cap=10\n"


def test_the_random_model_speaks_verls_qwen3_turns(tmp_path):
    write_model(tmp_path, "tiny", vocabulary=32, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 32
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    assert type(builder).__name__ == "QwenContinuousTokenBuilder"
