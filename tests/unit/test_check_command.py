"""``main_ppo`` with ``--check``, and before Ray starts: a user's mistake is one line and exit code 2, whoever finds it."""

import logging
import os
import runpy
import sys

import datasets
import pandas as pd
import pytest

from recipe.partial_rollout import main_ppo, preflight
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight import inputs, rows
from recipe.partial_rollout.tasks.clock10.model import build_model
from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer
from recipe.partial_rollout.tools.check import command
from recipe.partial_rollout.tools.check.command import MISSING, WRONG, check_run


def ended(monkeypatch, capsys, *arguments):
    """Exit code of the command, and what it printed as errors."""
    monkeypatch.setattr(sys, "argv", ["main_ppo", *arguments])
    with pytest.raises(SystemExit) as caught:
        main_ppo.main()
    return caught.value.code, capsys.readouterr().err


QUICK = "--config-name=quickstart_cpu"
WARM_UP = "actor_rollout_ref.actor.optim.lr_warmup_steps"
OVERRIDE, ROLLOUT = "actor_rollout_ref.model.override_config", "actor_rollout_ref.rollout"
POSITIONS = "max_position_embeddings"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    build_model(seed=0).save_pretrained(directory)
    return directory


MISTAKES = [
    ([QUICK, "trainer.save_frek=3"], "trainer.save_frek=3: no such key; did you mean trainer.save_freq?"),
    (["--config-name=recipe", "experiment=foo"], "Available options in 'experiment': dapo_math17k_1gpu_0.6b "),
    ([QUICK, "data.train_files=/x/a=b.parquet"], "data.train_files=/x/a=b.parquet: mismatched input '='"),
    (["--config-name=ppo_trainer"], "partial_rollout: the config has no such section; add partial_rollout to its"),
    ([QUICK, "trainer.experiment_name=é"], "LexerNoViableAltException: trainer.experiment_name=é"),
    ([QUICK, "trainer.save_freq=${oc.env:NO_SUCH}"], "Environment variable 'NO_SUCH' not found"),
    ([QUICK, "partial_rollout=on"], "node `partial_rollout` is not a container"),
    ([QUICK, "trainer=5"], "trainer=5: a section of keys"),
]


@pytest.mark.parametrize(
    ("arguments", "line", "check"),
    # A run and its check read the command line alike.
    [*((*each, ["--check"]) for each in MISTAKES), (*MISTAKES[0], [])],
)
def test_mistake_that_hydra_finds_is_one_line(monkeypatch, capsys, arguments, line, check):
    code, said = ended(monkeypatch, capsys, *arguments, *check)
    assert code == 2 and said.startswith("config error: ") and line in said and said.count("\n") == 1


def test_start_of_verls_own_trainer_tells_a_mistake_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl_trainer", "--config-name=recipe", "arm=foo"])
    # Handlers of earlier tests hold streams that pytest has closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("recipe.partial_rollout.tools.verl_trainer", run_name="__main__")
    said = capsys.readouterr().err
    line = "In 'recipe': Could not find 'arm/foo' Available options in 'arm': colocate_async nopr pr"
    assert caught.value.code == 2 and said.startswith(f"config error: {line}") and said.count("\n") == 1


def test_what_no_check_foresaw_is_one_line_with_its_place(monkeypatch, capsys):
    monkeypatch.setattr(preflight, "write_in_full", lambda config: {}["mine"])
    code, said = ended(monkeypatch, capsys, QUICK, "--check")
    assert code == 1 and said.count("\n") == 1 and said.startswith("check failed: KeyError: 'mine' (")


ROW = {"prompt": [{"role": "user", "content": "1"}], "data_source": "mine", "reward_model": {"ground_truth": "1"}}


@pytest.fixture
def trainable(model, tmp_path, monkeypatch, resolved_config):
    """``trainable(*overrides)``: a config that a run on this machine can start with; its training file has four rows."""
    # datasets leaves a copy in place of os.environ, to which undoing a setenv would not reach.
    monkeypatch.setattr(os, "environ", os.environ)
    monkeypatch.setattr(inputs, "_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split, count in (("train", 4), ("val", 1)):
        pd.DataFrame([ROW] * count).to_parquet(tmp_path / f"{split}.parquet")
    given = (
        *(f"data.{split}_files={tmp_path}/{split}.parquet" for split in ("train", "val")),
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.logger=[file]",
    )
    return lambda *overrides: resolved_config("quickstart_cpu", *given, *overrides)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"{WARM_UP}=1000", rf"^{WARM_UP}=1000: below \d+: the warm-up would outlast"),
        (
            f"+{OVERRIDE}.attention_dropout=0.1",
            r"^actor_rollout_ref.model.path=.*: a model without noise \(its config",
        ),
        (
            f"{ROLLOUT}.max_model_len=null +{OVERRIDE}.{POSITIONS}=200 "
            f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.{POSITIONS}=200",
            r"response_length=\d+: with prompt_length=\d+ it must fit the 200 positions of the model",
        ),
    ],
)
def test_what_only_the_loaded_inputs_show_is_refused(trainable, override, said):
    with pytest.raises(ConfigError, match=said):
        preflight.checked(trainable(*override.split()))


def test_check_counts_prompts_that_are_too_long_and_shows_a_long_one(trainable, capsys, tmp_path, monkeypatch):
    contents = ["1" * 700, *("1" * length for length in (10, 700, 900)), *["1+1"] * 4]
    few = trainable("data.max_prompt_length=720", "actor_rollout_ref.rollout.max_model_len=4096")
    rows = [{**ROW, "prompt": [{"role": "user", "content": content}]} for content in contents]
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    assert check_run(few.copy()) == 0
    lines = capsys.readouterr().out
    assert "prompts         7, 1 steps an epoch; 1 others have more than 720 tokens (the longest has 908)\n" in lines
    assert r"708 tokens: '<|im_start|>user\n1111" in lines and r"1' ... '1111" in lines and r"assistant\n'" in lines
    monkeypatch.setattr(command, "MOST_TRIED", 4)
    few.data.max_prompt_length = 64
    few.data.train_batch_size = few.actor_rollout_ref.actor.ppo_mini_batch_size = 8
    assert check_run(few) == WRONG
    lines = capsys.readouterr().out
    assert "data.train_batch_size=8: at most 5, the prompts" in lines
    assert "5 (4 of them were tried), 0 steps an epoch; 3 others have more than 64 tokens (the" in lines


def test_row_that_verls_filter_leaves_out_is_refused_unless_it_is_only_too_long(trainable, tmp_path, monkeypatch):
    """verl counts a row whose prompt it cannot render as too long."""
    made, make = [], rows.create_rl_dataset
    monkeypatch.setattr(rows, "create_rl_dataset", lambda *args, **keys: made.append(args[0]) or make(*args, **keys))
    long = {**ROW, "prompt": [{"role": "user", "content": "1" * 900}]}
    pd.DataFrame([long, *[ROW] * 5, long]).to_parquet(tmp_path / "train.parquet")
    preflight.checked(trainable())
    assert [os.path.basename(each) for each in made] == ["train.parquet", "val.parquet", "train.parquet"], (
        "a dataset of which no row is left out is loaded once"
    )
    for split in ("train", "val"):
        some = [long, *[ROW] * 5, {**ROW, "prompt": None}]
        pd.DataFrame(some).to_parquet(tmp_path / f"{split}.parquet")
        said = rf"^data.{split}_files=.*; row 6 is not such a row, and verl would leave it out without a word \("
        with pytest.raises(ConfigError, match=said):
            preflight.checked(trainable())
        pd.DataFrame([ROW] * 5).to_parquet(tmp_path / f"{split}.parquet")


def test_validation_without_a_row_is_refused(trainable, tmp_path):
    pd.DataFrame([{**ROW, "prompt": [{"role": "user", "content": "1" * 900}]}]).to_parquet(tmp_path / "val.parquet")
    with pytest.raises(ConfigError, match=r"^data.val_files=.*: at least one row that fits data.max_prompt_length=64"):
        preflight.checked(trainable())


@pytest.mark.parametrize(("most", "used"), [(3, "3 of 5 rows (data.val_max_samples=3)"), (-1, "5 of 5 rows")])
def test_plan_says_how_many_rows_validate(trainable, tmp_path, capsys, most, used):
    pd.DataFrame([ROW] * 5).to_parquet(tmp_path / "val.parquet")
    assert check_run(trainable(f"data.val_max_samples={most}", "data.seed=1")) == 0
    assert f"validation      {used}\n" in capsys.readouterr().out


def test_check_goes_on_after_a_mistake_and_prints_the_plan(trainable, capsys):
    keys = "enable=True", "metric=acc", "max_num_gen_batches=10"
    assert check_run(trainable(*(f"algorithm.filter_groups.{key}" for key in keys))) == 0
    lines = capsys.readouterr().out
    assert "have the same acc are replaced by others; batches of prompts that a step may take: 10\n" in lines
    assert "FAIL" not in lines and "4, 1 steps an epoch; 0 others have more than 64 tokens\n" in lines
    assert r"first prompt    9 tokens: '<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n'" in lines
    wrong = "data.gen_batch_size=2", "actor_rollout_ref.actor.checkpoint.async_save=True", "data.val_files=/nowhere"
    assert check_run(trainable(*wrong)) == WRONG
    lines = capsys.readouterr().out.splitlines()
    failed = [line.split("=")[0] for line in lines if line.startswith("FAIL")]
    keys = "data.gen_batch_size", "actor_rollout_ref.actor.checkpoint.async_save"
    assert failed == [*(f"FAIL  setting         {key}" for key in keys), "FAIL  missing         data.val_files"]
    assert any(line.startswith("ok    batch") for line in lines)


@pytest.mark.parametrize(
    ("variable", "line", "code"),
    [
        ("VERL_PLATFORM=", "missing         trainer.device=cpu: needs VERL_PLATFORM=cpu in", MISSING),
        ("RAY_ADDRESS=127.0.0.1:1", "missing         RAY_ADDRESS=127.0.0.1:1: HOST:PORT of a Ray", MISSING),
        ("SWANLAB_MODE=never", "setting         SWANLAB_MODE=never: cloud, local, offline or disabled", WRONG),
    ],
)
def test_check_refuses_what_the_run_refuses(trainable, capsys, monkeypatch, variable, line, code):
    monkeypatch.setenv(*variable.split("="))
    config = trainable("trainer.logger=[file,swanlab]")
    assert check_run(config.copy()) == code
    (failed,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("FAIL")]
    assert failed.startswith(f"FAIL  {line}")
    with pytest.raises(ConfigError) as caught:
        preflight.checked(config)
    assert failed.endswith(str(caught.value))
