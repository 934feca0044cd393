"""``main_ppo`` with ``--check``, and before Ray starts: a user's mistake is one line and exit code 2, whoever finds it."""

import contextlib
import json
import logging
import os
import runpy
import sys
from datetime import datetime

import datasets
import pandas as pd
import pytest
import torch

from recipe.partial_rollout import main_ppo, preflight
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight import check_settings, inputs
from recipe.partial_rollout.preflight.rows import check_columns, check_rows, dataset_of
from recipe.partial_rollout.tasks.clock10.model import build_model
from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer
from recipe.partial_rollout.tools.check.command import MISSING, WRONG, check_run
from tests.unit.conftest import build_config
from tests.unit.shared import check_config, settings_of


def ended(monkeypatch, capsys, *arguments):
    """Exit code of the command, and what it printed as errors."""
    monkeypatch.setattr(sys, "argv", ["main_ppo", *arguments])
    with pytest.raises(SystemExit) as caught:
        main_ppo.main()
    return caught.value.code, capsys.readouterr().err


QUICK = "--config-name=quickstart_cpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    build_model(seed=0).save_pretrained(directory)
    return directory


MISTAKES = [
    ([QUICK, "trainer.save_frek=3"], "trainer.save_frek=3: no such key; did you mean trainer.save_freq?"),
    ([QUICK, "partial_rollout.max_stalenes=8"], "=8: no such key; did you mean partial_rollout.max_staleness?"),
    (
        [QUICK, "actor_rollout_ref.actor.optm.lr=1"],
        "=1: no such key; did you mean actor_rollout_ref.actor.optim.lr?",
    ),
    ([QUICK, "lr=3"], "lr=3: no such key; did you mean actor_rollout_ref.actor.optim.lr?"),
    (["--config-name=recipe", "experiment=foo"], "Available options in 'experiment': dapo_math17k_1gpu_0.6b "),
    (["--config-name=nope"], "Cannot find primary config 'nope'"),
    ([QUICK, "trainer.experiment_name=é"], "LexerNoViableAltException: trainer.experiment_name=é"),
    ([QUICK, "trainer.save_freq"], "Error parsing override 'trainer.save_freq' missing EQUAL"),
    ([QUICK, "+trainer.save_freq=3"], "Could not append to config. An item is already at"),
    ([QUICK, "trainer.save_freq=${oc.env:NO_SUCH}"], "Environment variable 'NO_SUCH' not found"),
    ([QUICK, "trainer.save_freq=${oc.env:HOME}"], "trainer.save_freq="),
    ([QUICK, "partial_rollout=on"], "node `partial_rollout` is not a container"),
    ([QUICK, "trainer=5"], "trainer=5: a section of keys such as trainer.balance_batch"),
    ([QUICK, "data.train_batch_size=abc"], "data.train_batch_size=abc: an integer"),
]


@pytest.mark.parametrize(
    ("arguments", "line", "check"),
    # A run and its check read the command line alike.
    [*((*each, ["--check"]) for each in MISTAKES), *((*each, []) for each in MISTAKES[::4])],
)
def test_mistake_that_hydra_or_omegaconf_finds_is_one_line(monkeypatch, capsys, arguments, line, check):
    code, said = ended(monkeypatch, capsys, *arguments, *check)
    assert code == 2 and said.startswith("config error: ") and line in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["arm=foo"], "In 'recipe': Could not find 'arm/foo' Available options in 'arm': colocate_async nopr pr"),
        (["trainer.save_frek=3"], "trainer.save_frek=3: no such key; did you mean trainer.save_freq?"),
        (
            ["platform=cpu", "trainer.save_freq=${oc.env:NO_SUCH}"],
            "KeyError raised while resolving interpolation: \"Environment variable 'NO_SUCH' not found",
        ),
    ],
)
def test_start_of_verls_own_trainer_tells_a_mistake_in_one_line(monkeypatch, capsys, arguments, line):
    monkeypatch.setattr(sys, "argv", ["verl_trainer", "--config-name=recipe", *arguments])
    # Handlers of earlier tests hold streams that pytest has closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("recipe.partial_rollout.tools.verl_trainer", run_name="__main__")
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.startswith(f"config error: {line}") and said.count("\n") == 1


def test_what_no_check_foresaw_is_one_line_with_its_place(monkeypatch, capsys):
    monkeypatch.setattr(preflight, "write_in_full", lambda config: {}["mine"])
    code, said = ended(monkeypatch, capsys, QUICK, "--check")
    assert code == 1 and said.count("\n") == 1 and said.startswith("check failed: KeyError: 'mine' (")


@pytest.mark.parametrize("ratio", ["null", 0.5, 1.0])
def test_dual_clip_that_verls_losses_assert_is_refused_under_nopr_too(resolved_config, ratio):
    keys = "partial_rollout.enable=False", f"actor_rollout_ref.actor.clip_ratio_c={ratio}"
    with pytest.raises(ConfigError, match=r"clip_ratio_c=.*: a number above 1, or null"):
        check_settings(resolved_config("quickstart_cpu", *keys))


ROW = {
    "prompt": [{"role": "user", "content": "1"}],
    "data_source": "mine",
    "reward_model": {"ground_truth": "1"},
}
READS = "data.train_files=.*: rows with data_source and reward_model.ground_truth, which .* naive reads; they have no"


SCORED_BY_MODEL = ("reward.reward_model.enable=True", "reward.custom_reward_function.path=null")


def json_lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def without(name):
    return {key: value for key, value in ROW.items() if key != name}


@pytest.fixture
def files(tmp_path, resolved_config):
    """``files(rows, *overrides)``: a config whose training file has these rows, and whose other is good."""

    def build(rows, *overrides, name="train.parquet"):
        pd.DataFrame([ROW]).to_parquet(tmp_path / "val.parquet")
        path = tmp_path / name
        if isinstance(rows, str):
            path.write_text(rows)
        else:
            rows.to_parquet(path)
        given = [f"data.train_files={path}", f"data.val_files={tmp_path}/val.parquet"]
        return resolved_config("quickstart_cpu", *given, *overrides)

    return build


def check(config, split="train"):
    check_columns(config, dataset_of(config, split, build_tokenizer()), f"data.{split}_files")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("no parquet", r"data.train_files=.*that verl can make a dataset of \(Arrow"),
        (pd.DataFrame([without("data_source")]), f"{READS} data_source"),
        (pd.DataFrame([without("reward_model")]), f"{READS} reward_model"),
        (
            pd.DataFrame([{**ROW, "agent_name": "mine"}]),
            "rows whose column agent_name has single_turn_agent, tool_agent; it has mine",
        ),
    ],
)
def test_data_file_that_verl_cannot_train_on_is_refused(files, rows, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check(files(rows))
    assert "\n" not in str(caught.value)


def test_only_what_verl_reads_is_taken_for_data(files):
    check(files(pd.DataFrame([ROW])))
    check(files(json_lines(ROW), name="train.jsonl"))
    with pytest.raises(ConfigError, match="that verl can make a dataset of"):
        check(files("x = 1", name="train.py"))
    check(files(pd.DataFrame([without("data_source")]), *SCORED_BY_MODEL))


VERLS_SOURCES = (
    "openai/gsm8k HuggingFaceH4/MATH-500 math_dapo aime24 numina_cn_k12 codecontests hiyouga/geometry3k searchR1_nq"
)


def test_data_source_that_verl_has_no_reward_for_needs_a_reward_of_ones_own(files, capsys):
    none = "reward.custom_reward_function.path=null"
    with pytest.raises(ConfigError, match=r"function\.path=None: .* none for data_source=mine of data.train_files"):
        check(files(pd.DataFrame([{**ROW, "data_source": "openai/gsm8k"}, ROW]), none))
    known = pd.DataFrame([{**ROW, "data_source": source} for source in VERLS_SOURCES.split()])
    config = files(known, none)
    with pytest.raises(ConfigError, match=r"data_source=mine of data.val_files"):
        check(config, "val")
    capsys.readouterr()
    check_columns(config, table := dataset_of(config, "train", build_tokenizer()), "data.train_files")
    assert "Warning" not in capsys.readouterr().err and len(table)
    check(files(pd.DataFrame([ROW]), *SCORED_BY_MODEL))
    # A loop of the user's own may score its samples itself.
    loops = "actor_rollout_ref.rollout.agent.agent_loop_config_path=conf/tools/agent_loops.yaml"
    check(files(pd.DataFrame([without("reward_model")]), none, loops))


@pytest.mark.parametrize(("refused", "enable", "save_freq"), [(True, True, 5), (False, True, -1), (False, False, 5)])
def test_column_that_no_checkpoint_can_hold_is_refused_by_name_where_there_are_any(refused, enable, save_freq):
    config = build_config("quickstart_cpu", "data.train_files=train.parquet", f"trainer.save_freq={save_freq}")
    settings, made = settings_of(enable=enable), ("2026-01-01", datetime(2026, 1, 1))
    rows = [
        {"raw_prompt": ROW["prompt"], "dummy_tensor": torch.zeros(1), "extra_info": {"made": each}} for each in made
    ]
    given = "data.train_files", build_tokenizer()
    check_rows(config, settings, rows[:1], *given)
    words = (
        r"^data.train_files=train.parquet: row 1, column extra_info.made: datetime.datetime cannot be saved: only plain"
    )
    with pytest.raises(ConfigError, match=words) if refused else contextlib.nullcontext():
        check_rows(config, settings, rows, *given)


def test_files_of_one_split_make_one_table(files, tmp_path):
    config = files(pd.DataFrame([ROW]))
    pd.DataFrame([{**ROW, "data_source": 7}]).to_parquet(tmp_path / "other.parquet")
    config.data.train_files = [config.data.train_files, f"{tmp_path}/other.parquet"]
    with pytest.raises(ConfigError, match=r"data\.train_files=.*: files, .* that verl can make a dataset of \("):
        dataset_of(config, "train", build_tokenizer())


def test_dataset_class_that_does_not_load_is_refused_by_its_key(files, tmp_path):
    own = "data.custom_cls.path=pkg://math", "data.custom_cls.name=Own"
    with pytest.raises(ConfigError, match=r"^data\.custom_cls\.path=pkg://math: files, or a class of data.custom_cls"):
        dataset_of(files(pd.DataFrame([ROW]), *own), "train", build_tokenizer())


def test_paths_in_the_home_are_found_and_written_there(resolved_config, tmp_path, monkeypatch):
    """The check looked for them there, verl and the run's files did not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    given = "trainer.default_local_dir='~/run'", "data.train_files=['~/a.parquet',/b.parquet]"
    more = "data.val_files='~/v.parquet'", "actor_rollout_ref.model.path='~/model'"
    config = resolved_config("quickstart_cpu", *given, *more)
    with pytest.raises(ConfigError, match=f"{tmp_path}/model"):
        check_config(config)
    assert config.trainer.default_local_dir == f"{tmp_path}/run" and config.data.val_files == f"{tmp_path}/v.parquet"
    assert config.data.train_files == [f"{tmp_path}/a.parquet", "/b.parquet"]
    assert config.actor_rollout_ref.model.path == f"{tmp_path}/model"


@pytest.fixture
def trainable(files, model, tmp_path, monkeypatch):
    """``trainable(*overrides)``: a config that a run on this machine can start with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(inputs, "_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # datasets leaves a copy in place of os.environ, to which undoing a setenv would not reach.
    monkeypatch.setattr(os, "environ", os.environ)
    sizes = "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    paths = (
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.logger=[file]",
    )
    return lambda *overrides: files(pd.DataFrame([ROW] * 4), *sizes, *paths, *overrides)


def test_batch_needs_as_many_prompts(trainable):
    with pytest.raises(ConfigError, match=r"data\.train_batch_size=8: at most 4, the prompts of data\.train_files"):
        preflight.checked(trainable("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"))


def test_warm_up_that_outlasts_the_training_is_refused_before_ray(trainable):
    key = "actor_rollout_ref.actor.optim.lr_warmup_steps"
    with pytest.raises(ConfigError, match=rf"{key}=1000: below \d+: the warm-up would outlast"):
        preflight.checked(trainable(f"{key}=1000"))


def test_check_counts_prompts_that_are_too_long_and_shows_both_ends_of_a_long_one(trainable, capsys, tmp_path):
    contents = ["1" * 700, *("1" * length for length in (10, 700, 900)), *["1+1"] * 4]
    few = trainable("data.max_prompt_length=720", "actor_rollout_ref.rollout.max_model_len=4096")
    rows = [{**ROW, "prompt": [{"role": "user", "content": content}]} for content in contents]
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    assert check_run(few.copy()) == 0
    lines = capsys.readouterr().out
    assert "prompts         7, 1 steps an epoch; 1 others have more than 720 tokens (the longest has 908)\n" in lines
    assert r"708 tokens: '<|im_start|>user\n1111" in lines and r"1' ... '1111" in lines and r"assistant\n'" in lines
    few.data.max_prompt_length = 64
    few.data.train_batch_size = few.actor_rollout_ref.actor.ppo_mini_batch_size = 8
    assert check_run(few) == WRONG
    lines = capsys.readouterr().out
    assert (
        "data.train_batch_size=8: at most 5, the prompts" in lines and "3 others have more than 64 tokens (the" in lines
    )


def test_check_shows_what_dynamic_sampling_filters_by(trainable, capsys):
    keys = "enable=True", "metric=acc", "max_num_gen_batches=10"
    assert check_run(trainable(*(f"algorithm.filter_groups.{key}" for key in keys))) == 0
    assert (
        "have the same acc are replaced by others; batches of prompts that a step may take: 10\n"
        in capsys.readouterr().out
    )


def test_check_goes_on_after_a_mistake_and_prints_the_plan(trainable, capsys):
    assert check_run(trainable()) == 0
    lines = capsys.readouterr().out
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
    ("change", "variables", "line", "code"),
    [
        ([], {"VERL_PLATFORM": ""}, "FAIL  missing         trainer.device=cpu: VERL_PLATFORM=cpu in the", MISSING),
        (
            [],
            {"RAY_ADDRESS": "127.0.0.1:1"},
            "FAIL  missing         RAY_ADDRESS=127.0.0.1:1: HOST:PORT of a Ray",
            MISSING,
        ),
        (
            [],
            {"SWANLAB_MODE": "never"},
            "FAIL  setting         SWANLAB_MODE=never: cloud, local, offline or disabled",
            WRONG,
        ),
    ],
)
def test_check_refuses_what_the_run_refuses(trainable, capsys, monkeypatch, change, variables, line, code):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = trainable("trainer.logger=[file,swanlab]", *change)
    assert check_run(config.copy()) == code
    (failed,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("FAIL")]
    assert failed.startswith(line)
    with pytest.raises(ConfigError) as caught:
        preflight.checked(config)
    assert failed.endswith(str(caught.value))
