"""What a terminal shows of a run: the recipe's lines and warnings, and one about the round; libraries print elsewhere."""

import asyncio
import logging
import math
import subprocess
import sys
import time
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.settings import FilterSettings
from recipe.partial_rollout.manager.types import RoundProgress
from recipe.partial_rollout.rollout import guard
from recipe.partial_rollout.training import step_log
from recipe.partial_rollout.training.step_log import KL, PolicyDrift, StepLog, mismatch
from recipe.partial_rollout.waits import wait

ROOT = Path(__file__).parents[2]


async def beside(monkeypatch, seconds, *asked):
    monkeypatch.setattr(guard, "LOOK_EVERY_S", 0.005)
    watching = guard.watch_round(asked[0], 4, 5, time.monotonic(), *asked[1:])
    return await wait(asyncio.sleep(seconds, "batch"), 10, "the round", None, watches=[watching])


class Engines:
    """Replicas that decode ten tokens between two questions, and answer them or not."""

    def __init__(self, answers=True):
        self.asked, self.answers = 0, answers

    async def load(self):
        self.asked += 1
        return {"a": (3, 10 * self.asked)} if self.answers else {}


async def standing(decoded):
    assert decoded
    return RoundProgress(ready_groups=2, running=3, oldest=1)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((Engines(), standing), ("step 5 | 2 of 4 groups ready | running 3 | ", " tok/s | oldest 1 version | ")),
        ((Engines(),), ("step 5 | running 3 | ",)),
        ((Engines(answers=False),), ("step 5 | 0 s",)),
    ],
    ids=["PR", "noPR has no manager", "nobody answers"],
)
async def test_a_log_gets_a_line_every_so_often_while_the_round_goes_on(monkeypatch, asked, says):
    lines = []
    monkeypatch.setattr(guard, "_LOG_S", 0.02)
    monkeypatch.setattr(guard, "say", lines.append)
    assert await beside(monkeypatch, 0.15, *asked) == "batch" and 2 <= len(lines) <= 7
    assert all(line.startswith(says[0]) and says[-1] in line for line in lines)


async def test_a_terminal_has_one_line_that_is_taken_away(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    # Bars of other tests may wait for a garbage collection.
    before = set(guard.tqdm._instances)
    await beside(monkeypatch, 0.1, Engines())
    await asyncio.sleep(0)
    printed = capsys.readouterr()
    assert printed.out == "" and "step 5 | running 3 | " in printed.err
    assert printed.err.count("\n") == printed.err.count("\x1b[A"), "each step down is taken back: one line in place"
    assert set(guard.tqdm._instances) <= before


LIBRARIES = """
import os, subprocess, sys
from pathlib import Path
from tqdm import tqdm
from recipe.partial_rollout.terminal import bars, keep_output, known_end, libraries_apart, say

with libraries_apart():
    print("python, before the run has a directory")
    keep_output(Path(sys.argv[1]))
    os.write(2, b"C\\n")
    subprocess.run(["echo", "a child"], check=True)
    with tqdm(total=2, file=bars(), disable=False) as bar:
        bar.update()
        say("a step \\ud800")
    say("a warning", error=True)
    print("a traceback", file=sys.stderr)
print("the end")
"""


SAYS = "from recipe.partial_rollout.terminal import say; say('a line')"


def test_libraries_print_to_a_file_and_the_recipe_to_the_terminal(tmp_path):
    file = tmp_path / "output.log"
    file.write_text("of the start before\n")
    run = subprocess.run([sys.executable, "-c", LIBRARIES, str(file)], capture_output=True, text=True, check=True)
    first, *lines = run.stdout.splitlines()
    assert str(file) in first and lines == ["a step \\ud800", "the end"]
    assert "1/2" in run.stderr and run.stderr.splitlines()[-1] == "a warning"
    before, *printed = file.read_text().splitlines()
    assert before == "of the start before"
    assert set(printed) == {"python, before the run has a directory", "C", "a child", "a traceback"}


def test_run_goes_on_when_its_terminal_is_gone(tmp_path):
    command = [sys.executable, "-c", LIBRARIES.replace('print("the end")', ""), str(tmp_path / "output.log")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()
    run.stderr.close()
    assert run.wait(60) == 0 and "a traceback" in (tmp_path / "output.log").read_text()
    # No standard output at all, as after ``>&-``.
    subprocess.run(["bash", "-c", '"$0" -c "$1" >&-', sys.executable, SAYS], check=True, timeout=60)


def test_reader_of_a_tool_may_stop_reading():
    command = f"{sys.executable} -m recipe.partial_rollout.tools keys | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "os._exit(1)", "known_end(), os._exit(1)"])
def test_process_that_ends_without_a_word_leaves_one_on_the_terminal(tmp_path, ends):
    program = LIBRARIES.replace('print("a traceback", file=sys.stderr)', f"os.write(2, b'The raylet died.'), {ends}")
    asked = [sys.executable, "-c", program, str(tmp_path / "output.log")]
    run = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert run.returncode
    own, said = "known" in ends, f"the process ended without an error of its own: see {tmp_path}/output.log"
    assert run.stderr.splitlines()[-1] == ("a warning" if own else "The raylet died.")
    assert (said in run.stderr) != own


def test_recipes_warnings_pass_a_muted_root_logger(monkeypatch, capsys):
    ours = logging.getLogger("recipe.partial_rollout")
    for name in ("level", "handlers", "propagate"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    main_ppo.show_warnings()
    logging.getLogger("recipe.partial_rollout.rollout.guard").warning("%s died", "agent_loop_worker_1")
    logging.getLogger("another.library").warning("its own affairs")
    assert capsys.readouterr().out.splitlines() == ["agent_loop_worker_1 died"]


# -- a step --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log_of(monkeypatch, tmp_path):
    """``log_of(...)``: a log of so many steps of four groups, and the lines that it writes."""

    def build(*, total=20, enable=True, metric="acc"):
        printed = []
        monkeypatch.setattr(step_log, "say", printed.append)
        trainer = {"logger": ["file"], "default_local_dir": str(tmp_path), "total_epochs": 2}
        settings = SimpleNamespace(enable=enable, separate=False, batch_groups=4, group_filter=FilterSettings(metric))
        return StepLog(OmegaConf.create({"trainer": trainer}), settings, total_steps=total), printed

    return build


def test_line_of_a_step_has_its_validation_and_is_the_one_in_the_docs(log_of):
    validated = {
        "val-core/math/acc/mean@4": 0.25,
        "val-core/math/acc/best@4/mean": 0.5,
        "val-core/aime/acc/mean@4": 0.125,
    }
    held_out = " | validation math/acc/mean@4 0.250  aime/acc/mean@4 0.125"
    log, lines = log_of(total=36)
    log.extend(validated, 0)
    log.extend({"training/global_step": 1, **validated}, 1)
    log.extend({"training/global_step": 2}, 2)
    assert lines[0] == f"step   0{held_out}" and lines[1].startswith("step   1/36 | reward")
    assert lines[1].endswith(held_out) and "validation" not in lines[2]
    ours = {"rollout/tokens_per_s": 1310, "staleness/mean": 1.42, "staleness/max": 4, "buffer/carried_groups": 6}
    data = {"training/global_step": 7, "critic/score/mean": 0.412, "response_length/mean": 178.0, "timing_s/step": 9.3}
    data |= {"timing_s/gen": 5.1, "val-core/clock10/acc/mean@4": 0.512}
    log.extend(data | {f"partial_rollout/{name}": value for name, value in ours.items()}, 7)
    assert lines[3] in (ROOT / "docs/working.md").read_text().splitlines()


def filtered(step, groups, total, differ=0):
    names = {"groups": groups, "groups_total": total, "scores_differ": differ}
    return {"training/global_step": step, **{f"partial_rollout/filter/{name}": each for name, each in names.items()}}


def test_discarded_groups_are_counted_and_those_of_different_scores_warned_of_once(log_of):
    log, lines = log_of()
    for step, (groups, total, differ) in enumerate(((36, 36, 0), (0, 36, 0), (4, 40, 4), (4, 44, 4)), 1):
        log.extend(filtered(step, groups, total, differ), step)
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert "in step 3" in warning and "4 groups whose samples have the same acc and different scores" in warning
    assert "algorithm.filter_groups.metric=seq_final_reward" in warning
    said = [line.rpartition(" | ")[2] for line in lines if line != warning]
    assert said[:2] == ["discarded 36 of 40 groups (equal acc)", "discarded 0 of 4 groups (equal acc)"]
    assert log.data_ended(4) == (
        "the training ends after step 4 of 20, because the data has no more prompts (trainer.total_epochs=2): "
        "dynamic sampling discarded 44 of 60 groups (equal acc)"
    )
    # A resumed process counts what the others discarded.
    resumed, _ = log_of()
    resumed.extend(filtered(10, 6, 1360), 10)
    assert "discarded 1,360 of 1,400 groups" in resumed.data_ended(10)


# -- a sample of step 1 --------------------------------------------------------------------------------------------------

LETTERS = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
"""a tokenizer of one letter a token"""


def batch_of(prompt, response, trained, score=None):
    """One sample, padded by a token on each side, as both arms have it."""
    tensors = {
        "prompts": [0, *map(ord, prompt)],
        "responses": [*map(ord, response), 0],
        "response_mask": [*map(int, trained), 0],
        "attention_mask": [0] + [1] * (len(prompt) + len(response)) + [0],
    }
    if score is not None:
        tensors["rm_scores"] = [0.0] * len(response) + [score]
    return DataProto.from_single_dict({name: torch.tensor([row]) for name, row in tensors.items()})


def test_step_1_shows_a_sample_with_what_is_masked_and_its_reward(log_of, tmp_path):
    log, lines = log_of()
    log.show(batch_of("x", "y", "1"), 2, LETTERS)
    log.show(batch_of("2+2=", "call:4. Four", "111110001111", score=0.5), 1, LETTERS)
    said = (
        "-- one sample of step 1: the end of its prompt\n2+2=\n"
        "-- its response: 12 tokens, 9 of them trained\n"
        "call:[masked]4. [/masked]Four\n-- its reward: 0.5\n"
    )
    assert lines == [said] and (tmp_path / "sample.txt").read_text() == said
    # A long one is cut.
    log.show(batch_of("a" * 3000 + "end", "b" * 900 + "c" * 900, "1" * 1800), 1, LETTERS)
    assert f"prompt\n{'a' * 797}end\n" in lines[1] and f"\n{'b' * 800}\n...\n{'c' * 800}\n" in lines[1]
    assert "its reward: not known yet" in lines[1]


# -- the end, and a policy that runs away from its samples -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("enable", "strategy", "lora", "backend"),
    [
        (True, "megatron", {}, "megatron"),
        (False, "fsdp2", {}, "fsdp"),
        (True, "fsdp2", {"lora_rank": 8}, None),
        (True, "megatron", {"lora": {"rank": 8}}, None),
    ],
)
def test_finished_run_says_where_it_is_and_which_commands_come_next(tmp_path, enable, strategy, lora, backend):
    """Of LoRA's adapters verl's merger makes the base model."""
    run_dir = tmp_path / "my run"
    (run_dir / "global_step_3" / "actor").mkdir(parents=True)
    parts = {"actor": {"strategy": strategy}, "model": lora}
    config = {"trainer": {"default_local_dir": str(run_dir)}, "partial_rollout": {"enable": enable}}
    tools = "python -m recipe.partial_rollout.tools"
    paths = f"--local_dir '{run_dir}/global_step_3/actor' --target_dir '{run_dir}/model'"
    assert step_log.last_lines(OmegaConf.create({**config, "actor_rollout_ref": parts}), 3).split("\n  ") == [
        f"finished after step 3: the run is in {run_dir}. Next:",
        f"{tools} report '{run_dir}'",
        *[f"{tools} audit '{run_dir}'"] * enable,
        *[f"python -m verl.model_merger merge --backend {backend} {paths}"] * (not lora),
    ]


@pytest.mark.parametrize("enable", [True, False])
def test_drift_is_warned_of_under_pr_and_a_nan_loss_in_both_arms(log_of, enable):
    log, printed = log_of(enable=enable)
    for step in range(1, 12):
        log.extend({"training/global_step": step, KL: 1e-4}, step)
    log.extend({"training/global_step": 12, KL: 0.1, "actor/loss": nan}, 12)
    drift = [line for line in printed if "step 12 the policy has drifted" in line]
    assert [f"{KL} 0.1000, median of earlier steps 0.00010" in line for line in drift] == [True] * enable
    assert all("lr_scheduler_type=cosine" in line for line in drift)
    assert any("actor/loss nan" in line and "step 12" in line for line in printed)


WELL = [0.0002] * 8


@pytest.mark.parametrize(
    ("values", "warned_at"),
    [
        ([*WELL, 0.0085, 0.0157, 0.0387], [9]),
        # Again only after it was over.
        ([*WELL, 0.0085, 0.0001, 0.0157], [9, 11]),
        # Large while much is learnt, and a floor below which factors mean nothing.
        ([0.0, 0.0002, 0.0009, 0.0007, 0.0002, 0.0001, 0.0001, 0.00001, 0.0019, 0.0005], []),
        # First steps of a run that always was far off.
        ([0.02, 0.3, *[0.02] * 10], []),
        # A figure that is no number hides no later drift.
        ([*WELL, inf, 0.0002, 0.5], [11]),
    ],
)
def test_drift_is_told_when_it_sets_in(values, warned_at):
    drift = PolicyDrift()
    assert [step for step, kl in enumerate(values, 1) if drift.observe({KL: kl}, step)] == warned_at


def test_a_model_that_engine_and_trainer_compute_differently_is_warned_of_once():
    warned = [mismatch({KL: kl}, step) for step, kl in ((1, 0.03), (1, 0.2), (2, 0.2), (1, math.nan))] + [
        mismatch({}, 1)
    ]
    assert [warning is not None for warning in warned] == [False, True, False, False, False]
    assert "k3_kl 0.2)" in warned[1] and "override_config" in warned[1]
