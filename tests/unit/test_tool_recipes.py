"""The GSM8K recipe with a tool: verl loads it, its own loop calls it in Qwen's format, it computes arithmetic alone."""

import asyncio
import json

import pytest

from recipe.partial_rollout import preflight
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import CONF_DIR
from recipe.partial_rollout.preflight.user_code import find_tools
from recipe.partial_rollout.preflight.verl_keys import write_in_full
from recipe.partial_rollout.tasks.arithmetic import Arithmetic
from tests.unit.shared import byte_tokenizer, converse

AT = "actor_rollout_ref.rollout.multi_turn"
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""messages as Qwen's template delimits them, with the tools' schemas before them"""
WANT = "error: want numbers, + - * / // % and parentheses, at most 200 characters"


@pytest.fixture
def tokenizer():
    """With the tokens that Qwen's boundaries are made of."""
    ends = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    return byte_tokenizer(CHATML, "<tool_call>", "</tool_call>", **ends)


@pytest.fixture
def build(resolved_config):
    return lambda *more: resolved_config("recipe", "experiment=gsm8k_calculator_1gpu_0.6b", "arm=pr", *more)


def test_model_calls_the_calculator_in_qwens_format_and_reads_its_answer(build, tokenizer):
    config, called = build(), json.dumps({"name": "calculator", "arguments": {"expression": "3 + 4"}})
    turns = [f"<tool_call>{called}</tool_call><|im_end|>", "#### 7<|im_end|>"]
    write_in_full(config)
    said = map(tokenizer.encode, turns)
    output = converse(config, tokenizer, "3 + 4?", lambda _: next(said))
    text = tokenizer.decode([*output.prompt_ids, *output.response_ids])
    prompt, _, response = text.partition("3 + 4?<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "calculator"' in prompt and '"required": ["expression"]' in prompt
    assert response.endswith("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n#### 7<|im_end|>")
    assert output.num_turns == 4
    trained = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "".join(turns)


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("48/2 + 48", "72"),
        ("0.1 + 0.2", "0.3"),
        ("7//2 * -(10 % 4)", "-6"),
        ("*".join(["9"] * 100), str(9**100)),
        ("1 / 0", "error: division by zero"),
        *((other, WANT) for other in ("9**9**9", "3,400 + 5", "(1", "", "...", "1(2)", "exit()", "1+" * 100 + "1")),
    ],
)
def test_calculator_computes_arithmetic_and_says_what_it_wants_otherwise(expression, answer):
    response, _, _ = asyncio.run(Arithmetic({}, None).execute("i0", {"expression": expression}))
    assert response.text == answer


def test_tools_that_are_missing_or_do_not_load_end_a_start_in_a_line(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken = {"class_name": "recipe.partial_rollout.tasks.arithmetic.NoTool", "config": {"type": "native"}}
    (tmp_path / "broken.yaml").write_text(json.dumps({"tools": [broken]}))
    (tmp_path / "empty.yaml").write_text("tools:\n")
    for given in ("none.yaml", "broken.yaml", "empty.yaml"):
        # Paths may have become absolute.
        with pytest.raises(ConfigError, match=rf"^{AT}\.tool_config_path=.*{given}: a file whose tools verl can load"):
            preflight.check_settings(build(f"{AT}.tool_config_path={given}"))


def test_tools_of_an_installed_package_are_found_from_any_folder(build, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = build()
    write_in_full(config)
    find_tools(config)
    verls = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    assert config.data.tool_config_path == verls == str(CONF_DIR / "tools" / "arithmetic_tool.yaml")
    assert capsys.readouterr().out == ""
