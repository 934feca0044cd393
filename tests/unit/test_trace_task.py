"""The task of the GPU acceptance can be made without a GPU."""

from transformers import AutoTokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.partial_rollout.tasks.trace_task.prepare import main, write_model


def test_median_at_the_cap_is_refused(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--median", "10", "--cap", "10"]) == 2
    assert capsys.readouterr().err == "--median=10: below --cap=10\n"


def test_the_random_model_speaks_verls_qwen3_turns(tmp_path):
    write_model(tmp_path, "tiny", vocabulary=32, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 32
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    assert type(builder).__name__ == "QwenContinuousTokenBuilder"
