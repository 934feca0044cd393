"""The tasks of reasoning-gym: rows are made once each, their ground truth is the library's entry, and so is the score."""

import ast
import math
import re
import sys

import pandas as pd
import pytest
from omegaconf import OmegaConf
from verl.utils.import_utils import load_extern_object

from recipe.partial_rollout.preflight.inputs import INSTALL_REASONING_GYM, missing_packages
from recipe.partial_rollout.tasks import reasoning_gym as task
from recipe.partial_rollout.tools.data.command import main

FEW = '{"max_digits": 1, "max_terms": 2}'
"""200 problems of chain_sum: 10 x 10 digits and two operators"""


def make(out, *arguments):
    return main(["reasoning_gym", "--out", str(out), *arguments])


def rows_of(out):
    return {split: pd.read_parquet(out / "reasoning_gym" / f"{split}.parquet") for split in ("train", "test")}


@pytest.fixture
def library():
    """The package; its tests are skipped where run_scripts/setup.sh could not build it."""
    return pytest.importorskip("reasoning_gym")


def test_rows_are_verls_and_none_held_out_is_trained_on(library, tmp_path):
    assert make(tmp_path, "--task", "chain_sum", "--config", FEW, "--rows", "60") == 0
    files = rows_of(tmp_path)
    prompts = {split: [row["content"] for (row,) in rows.prompt] for split, rows in files.items()}
    together = [*prompts["train"], *prompts["test"]]
    # The test split's share of them goes first.
    assert len(together) == len(set(together)) and 100 < len(prompts["test"]) <= 200
    assert set(files["train"].data_source) <= {"reasoning_gym/chain_sum"} and "<answer>" in prompts["test"][0]
    assert [row["index"] for row in files["test"].extra_info] == list(range(len(files["test"])))


@pytest.mark.parametrize(("ask", "answer"), [("In <answer>.", "<answer>{}</answer>"), ("", "{}")])
def test_shots_are_solved_problems_that_no_row_asks(library, tmp_path, ask, answer):
    sizes = ("--rows", "30", "--held-out", "10", "--shots", "2", "--config", '{"max_value": 6}')
    assert make(tmp_path, "--task", "gcd", *sizes, "--ask", ask) == 0
    chats = [list(chat) for rows in rows_of(tmp_path).values() for chat in rows.prompt]
    shown = chats[0][:-1]
    assert [message["role"] for message in shown] == ["user", "assistant"] * 2
    assert all(chat[:-1] == shown for chat in chats)
    assert {chat[-1]["content"] for chat in chats}.isdisjoint(message["content"] for message in shown)
    for asked, said in zip(shown[::2], shown[1::2], strict=True):
        numbers = [int(number) for number in re.findall(r"\d+", asked["content"])]
        assert said["content"] == answer.format(math.gcd(*numbers)) and asked["content"].endswith(ask)


@pytest.mark.parametrize("name", ["chain_sum", "rearc"])
def test_score_is_the_librarys_own_on_the_entry_that_was_written(library, name):
    options = {"seed": 5}
    data = library.create_dataset(name, **options)
    for index, (question, truth) in zip(range(3), task.problems(name, options), strict=False):
        entry = data[index]
        assert (question, ast.literal_eval(truth)[2]) == (entry["question"], entry)
        for answer in (entry["answer"], "12", f"it is {entry['answer']}"):
            scored = task.compute_score("", f"<answer>1</answer> so <answer> {answer} </answer>.", truth)
            expected = data.score_answer(answer.strip(), entry)
            assert scored == {"score": expected, "acc": float(expected >= 1)}
        bare = entry["answer"]
        assert task.compute_score("", bare, truth)["score"] == data.score_answer(None, entry)
        assert task.compute_score("", f" {bare}\n", truth, untagged=True)["score"] == data.score_answer(bare, entry)


@pytest.mark.parametrize(("name", "text"), [("n_queens", "exit()"), ("boxnet", "12")])
def test_answer_that_the_library_fails_on_scores_nothing(library, name, text):
    _, truth = next(task.problems(name, {"seed": 1}))
    assert task.compute_score("", f"<answer>{text}</answer>", truth)["score"] < 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--task", "chain_sums"), "--task=chain_sums: must be one of "),
        (("--task", "chain_sum", "--config", "{digits"), "--config={digits: must be a JSON object"),
        (("--task", "chain_sum", "--config", '{"digits": 1}'), "options that chain_sum takes ("),
        (("--task", "chain_sum", "--config", '{"max_digits": 0}'), "max_digits must be >= min_digits"),
        (
            ("--task", "chain_sum", "gcd", "--config", '{"max_digits": 1}'),
            "must be options by task name, and max_digits",
        ),
        (("--task", "chain_sum", "--shots", "-1"), "--shots=-1: at least 0"),
        (("--task", "graph_color", "--shots", "1"), "--shots=1: must be 0 for graph_color, whose problems"),
        (("--task", "chain_sum", "--config", FEW, "--held-out", "999"), "more problems"),
    ],
)
def test_mistake_is_one_line(library, tmp_path, capsys, arguments, said):
    assert make(tmp_path, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
    assert not list(tmp_path.rglob("train.parquet"))


def test_missing_package_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    task._data.cache_clear()
    assert make(tmp_path, "--task", "chain_sum") == 2
    assert f"reasoning_gym is not installed: `{INSTALL_REASONING_GYM}` brings it" in capsys.readouterr().err


def test_task_of_the_recipes_names_its_reward_and_its_package(composed_config, monkeypatch):
    config = composed_config("recipe", "task=reasoning_gym")
    OmegaConf.resolve(config)
    reward = config.reward.custom_reward_function
    assert load_extern_object(reward.path, reward.name) is task.compute_score
    monkeypatch.setattr("recipe.partial_rollout.preflight.inputs.find_spec", lambda name: None)
    (error,) = missing_packages(config)
    assert INSTALL_REASONING_GYM in str(error)
