"""docs/own_job.md as its text says it: files and commands from the page, in an empty folder."""

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.chaos.victim import kill_session

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"`(\w+\.(?:py|yaml))`[^`]*?:\n\n```\w+\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"```bash\n(.*?)```", re.DOTALL)


@pytest.fixture
def commands(tmp_path):
    """The page's commands to train and to export; its files are in ``tmp_path``."""
    page = (ROOT / "docs" / "own_job.md").read_text()
    section = page[page.index("## From nothing") : page.index("## The keys")]
    files, commands = dict(FILE.findall(section)), COMMAND.findall(section)
    assert list(files) == ["make_data.py", "my_reward.py", "my_loop.py", "my_loops.yaml"] and len(commands) == 2
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return commands


def test_loop_of_the_page_trains_what_the_model_said_and_only_that(commands, tmp_path, monkeypatch):
    from recipe.partial_rollout.tasks.calculator.conversation import call
    from recipe.partial_rollout.tasks.calculator.tokenizer import build_tokenizer

    monkeypatch.syspath_prepend(str(tmp_path))
    loop, reward = importlib.import_module("my_loop"), importlib.import_module("my_reward")
    tokenizer, said = build_tokenizer(), [call("3*4-2-8"), call("3-4*2-8"), "!-*"]
    asked = []

    async def generate(request_id, *, prompt_ids, sampling_params):
        asked.append(tokenizer.decode(prompt_ids))
        tokens = tokenizer.encode(said[len(asked) - 1] + "<|im_end|>")
        return SimpleNamespace(token_ids=tokens, log_probs=[-0.5] * len(tokens))

    async def prompt(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)

    mine = object.__new__(loop.CalculatorLoop)
    mine.server_manager, mine.tokenizer = SimpleNamespace(generate=generate), tokenizer
    mine.rollout_config, mine.ct_build_initial_tokens = SimpleNamespace(response_length=256), prompt
    output = asyncio.run(mine.run({}, raw_prompt=[{"role": "user", "content": "3?4=_?2=_-8=0"}]))
    own = [token for token, trained in zip(output.response_ids, output.response_mask, strict=True) if trained]
    assert tokenizer.decode(own) == "".join(f"{turn}<|im_end|>" for turn in said)
    assert [bool(value) for value in output.response_logprobs] == [bool(bit) for bit in output.response_mask]
    assert "tool\n2<" in asked[1] and "tool\n0<" in asked[2] and output.num_turns == 6
    text = tokenizer.decode(output.response_ids, skip_special_tokens=True)
    assert [reward.compute_score("gaps", text, truth) for truth in ("3428", "3427")] == [1.0, 0.0]


def run_text(command, folder):
    """Run what the page says in ``folder``, with the environment that it asks for."""
    paths = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    paths["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env, log = {**os.environ, **paths, "PYTHONWARNINGS": "ignore"}, folder / "terminal.log"
    with log.open("w") as terminal:
        streams = {"stdout": terminal, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(["bash", "-c", command], cwd=folder, env=env, start_new_session=True, **streams)
    try:
        assert process.wait(540) == 0, log.read_text()[-3000:]
    finally:
        kill_session(process)


def test_own_job_trains_its_own_loop_and_its_weights_load_elsewhere(commands, count_start, read_run, tmp_path):
    train, export = commands
    count_start()
    run_text(train, tmp_path)
    run = read_run(tmp_path / "out")
    assert sorted(run.steps) == [1, 2] and run.run["complete"]
    for step in run.steps.values():
        assert 0 < step["critic/score/mean"] <= 1 and step["num_turns/mean"] > 2, json.dumps(step)
        assert step["partial_rollout/failures/failed_total"] == 0
    run_text(export, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    (shard,) = (tmp_path / "out" / "global_step_2" / "actor").glob("model_world_size_1_rank_0.pt")
    trained = torch.load(shard, weights_only=False)
    assert merged.keys() >= trained.keys()
    for name, weight in trained.items():
        # The merger writes bfloat16.
        torch.testing.assert_close(merged[name], weight.to_local().float(), rtol=2**-8, atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").decode([1, 2, 3])
