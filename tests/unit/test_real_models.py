"""What real checkpoints bring and the embedded model lacks: templates, end tokens, tied and padded rows, bytes."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.preflight.inputs import check_vocabulary
from recipe.partial_rollout.preflight.rows import check_prompts, prompt_lengths
from recipe.partial_rollout.worker.llm_client import StopStrings
from tests.unit.shared import byte_tokenizer
from verl_ext.chunked_log_probs import entropy_of_logits, log_probs_of_labels

SPECIAL = ["<bos>", "<|im_end|>", "<|endoftext|>", "<|im_start|>"]
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
KIND = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
TEMPLATES = {
    "plain": TURNS,
    "begins with bos": "{{ bos_token }}" + TURNS,
    "adds a system prompt": KIND + TURNS,
    "opens the thinking": TURNS + "<think>\n",
    "closes the thinking": TURNS + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
}
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TURNS
)
CHATS = (
    [{"role": "user", "content": "Zwölf?"}],
    [{"role": "system", "content": "Count."}, {"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3"},
     {"role": "user", "content": "4"}],
)  # fmt: skip


def tokenizer_of(template=TURNS):
    """As Llama's, it puts a begin of text before every plain text."""
    roles = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=False))
    return byte_tokenizer(template, **roles, additional_special_tokens=SPECIAL[3:], add_bos_token=True)


class Rows(list):
    """A dataset that counts how often it is read."""

    reads = 0

    def __init__(self, chats):
        super().__init__({"raw_prompt": np.array(chat)} for chat in chats)

    def __getitem__(self, i):
        self.reads += 1
        return super().__getitem__(i)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "train.parquet")
    data = {"train_files": str(tmp_path / "train.parquet"), "max_prompt_length": 512, "filter_overlong_prompts": False}
    return OmegaConf.create({"data": data})


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": False}], ids=["by default", "thinking off"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_measured_as_verls_agent_loops_make_them(config, template, thinking):
    config.data.apply_chat_template_kwargs = thinking
    tokenizer = tokenizer_of(TEMPLATES[template])
    verls = create_continuous_token_builder(tokenizer, hf_model_type="llama", chat_template_kwargs=thinking)
    made = [verls.build_initial_tokens(chat) for chat in CHATS]
    assert prompt_lengths(config, tokenizer, Rows(CHATS)).tolist() == [len(ids) for ids in made]
    assert all(ids.count(tokenizer.bos_token_id) == (template == "begins with bos") for ids in made)


def test_over_long_prompts_are_counted_and_the_longest_is_named_unless_they_are_filtered(config):
    tokenizer, words = tokenizer_of("{% for m in messages %}{{ m['content'] }}{% endfor %}"), (10, 70, 65, 64)
    config.data.max_prompt_length, rows = 64, Rows([{"role": "user", "content": "a" * count}] for count in words)
    with pytest.raises(ConfigError, match=r"max_prompt_length=64: at least 70, the tokens of row 1 .*; 2 of 4 prompts"):
        check_prompts(config, tokenizer, rows)
    config.data.filter_overlong_prompts, rows.reads = True, 0
    check_prompts(config, tokenizer, rows)
    assert rows.reads == 0, "verl leaves them out"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NO_SYSTEM, r"^data\.train_files=.*System role not supported"),
        (None, r"^data\.train_files=.*chat_template is not set"),
    ],
)
def test_prompts_that_the_template_refuses_are_one_line(config, template, said):
    with pytest.raises(ConfigError, match=said) as caught:
        check_prompts(config, tokenizer_of(template), Rows(CHATS))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", range(9))
@pytest.mark.parametrize(("stop", "end"), [("né!", "ab né!"), ("ü", "ab né!ü"), ("</answer>", "")])
def test_stop_string_is_found_where_the_interruption_cuts_a_character(stop, end, cut):
    tokenizer = tokenizer_of()
    ids = np.array(tokenizer.encode("ab né!ü c", add_special_tokens=False), np.int32)
    prompt = tokenizer.encode("ü né", add_special_tokens=False)
    turn, found = [], StopStrings(tokenizer, prompt, {"stop": [stop]}, [])
    for part in (ids[:cut], ids[cut:]):
        turn.append(found.end(Segment(part, np.zeros(len(part), np.float32), 1)))
        if turn[-1].stop_reason:
            break
    made = [token for segment in turn for token in segment.token_ids.tolist()]
    assert tokenizer.decode(made) == (end or "ab né!ü c")
    assert turn[-1].stop_reason == ("completed" if end else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_pad_the_vocabulary_and_are_masked_change_neither_log_probs_nor_entropy(dtype):
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 260).to(dtype), torch.randint(0, 260, (5,))
    padding = torch.full((5, 4), torch.finfo(dtype).min, dtype=dtype)
    padded = torch.cat([logits, padding], -1)
    assert torch.allclose(log_probs_of_labels(padded, labels), log_probs_of_labels(logits, labels), atol=1e-6)
    assert torch.allclose(entropy_of_logits(padded), entropy_of_logits(logits), atol=1e-6)


def test_padded_vocabulary_of_a_text_model_within_a_larger_one_is_told(tmp_path, capsys):
    tokenizer = tokenizer_of()
    tokenizer.save_pretrained(tmp_path)
    tokens = len(tokenizer)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "text_config": {"vocab_size": tokens + 4}}))
    check_vocabulary(OmegaConf.create({"actor_rollout_ref": {"model": {"path": str(tmp_path)}}}))
    said = (
        f"its tokenizer has {tokens} tokens and the model {tokens + 4} embedding rows; the engine samples none of the 4"
    )
    assert said in capsys.readouterr().out
