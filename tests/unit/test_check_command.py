"""``main_ppo`` with ``--check``, and before Ray starts: a user's mistake is one line and exit code 2, whoever finds it."""

import logging
import runpy
import sys

import pandas as pd
import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight.rows import check_files, check_steps


def ended(monkeypatch, capsys, *arguments):
    """Exit code of the command, and what it printed as errors."""
    monkeypatch.setattr(sys, "argv", ["main_ppo", *arguments])
    with pytest.raises(SystemExit) as caught:
        main_ppo.main()
    return caught.value.code, capsys.readouterr().err


QUICK = "--config-name=quickstart_cpu"


@pytest.mark.parametrize("check", [["--check"], []], ids=["check", "run"])
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([QUICK, "trainer.save_frek=3"], "trainer.save_frek=3: no such key; did you mean trainer.save_freq?"),
        (
            [QUICK, "actor_rollout_ref.actor.optm.lr=1"],
            "=1: no such key; did you mean actor_rollout_ref.actor.optim.lr?",
        ),
        ([QUICK, "lr=3"], "lr=3: no such key; did you mean actor_rollout_ref.actor.optim.lr?"),
        (["--config-name=recipe", "experiment=foo"], "experiment=foo: one of dapo_math17k_1gpu_0.6b, "),
        (
            ["--config-name=recipe", "experiment=gsm8k_8gpu"],
            "experiment=gsm8k_8gpu: did you mean gsm8k_8gpu_4b? one of",
        ),
        (["--config-name=nope"], "--config-name=nope: one of "),
        (
            [QUICK, "trainer.experiment_name=é"],
            "hydra cannot read it; other than plain letters need quotes that reach it",
        ),
        ([QUICK, "trainer.save_freq"], "trainer.save_freq: an override, KEY=VALUE"),
        ([QUICK, "+trainer.save_freq=3"], "Could not append to config. An item is already at"),
        ([QUICK, "trainer.save_freq=${oc.env:NO_SUCH}"], "trainer.save_freq=${oc.env:NO_SUCH}: KeyError raised while"),
        ([QUICK, "trainer.save_freq=${oc.env:HOME}"], "trainer.save_freq="),
        ([QUICK, "partial_rollout=on"], "partial_rollout=on: a section of keys such as partial_rollout.enable"),
        ([QUICK, "trainer=5"], "trainer=5: a section of keys such as trainer.balance_batch"),
        ([QUICK, "data.train_batch_size=abc"], "data.train_batch_size=abc: an integer"),
    ],
)
def test_mistake_that_hydra_or_omegaconf_finds_is_one_line(monkeypatch, capsys, arguments, line, check):
    code, said = ended(monkeypatch, capsys, *arguments, *check)
    assert code == 2 and said.startswith("config error: ") and line in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["arm=foo"], "arm=foo: one of colocate_async, nopr, pr"),
        (["trainer.save_frek=3"], "trainer.save_frek=3: no such key; did you mean trainer.save_freq?"),
        (["trainer.save_freq=${oc.env:NO_SUCH}"], "trainer.save_freq=${oc.env:NO_SUCH}: KeyError raised while"),
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
    monkeypatch.setattr(main_ppo, "prepare", lambda config: {}["mine"])
    code, said = ended(monkeypatch, capsys, QUICK, "--check")
    assert code == 1 and said.count("\n") == 1 and said.startswith("check failed: KeyError: 'mine' (")


ROW = {
    "prompt": [{"role": "user", "content": "1"}],
    "data_source": "mine",
    "reward_model": {"ground_truth": "1"},
}
READS = "data.train_files=.*: a file with columns data_source and reward_model.ground_truth, which .* naive reads; "


SCORED_BY_MODEL = ("reward.reward_model.enable=True", "reward.custom_reward_function.path=null")


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


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pd.DataFrame([ROW]).iloc[:0], "data.train_files=.*: a file with rows; it has none"),
        (pd.DataFrame([without("prompt")]), "data.prompt_key=prompt: a column of .*: data_source, reward_model"),
        (pd.DataFrame([without("data_source")]), f"{READS}it has no data_source"),
        (pd.DataFrame([without("reward_model")]), f"{READS}it has no reward_model"),
        (pd.DataFrame([{**ROW, "reward_model": "1"}]), f"{READS}its reward_model is .*string"),
        (pd.DataFrame([{**ROW, "reward_model": {"style": "rule"}}]), f"{READS}its reward_model is struct<style"),
        (
            pd.DataFrame([{**ROW, "agent_name": "mine"}]),
            "column agent_name has single_turn_agent, tool_agent; it has mine",
        ),
        ("no parquet", r"data.train_files=.*: a file that can be read \(Arrow"),
    ],
)
def test_data_file_that_verl_cannot_train_on_is_refused(files, rows, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_files(files(rows))
    assert "\n" not in str(caught.value)


def test_only_what_verl_reads_is_taken_for_data(files):
    check_files(files(pd.DataFrame([ROW])))
    check_files(files('{"prompt": [], "data_source": "a", "reward_model": {}}\n', name="train.jsonl"))
    with pytest.raises(ConfigError, match=r"a file of \.parquet, \.json, \.jsonl"):
        check_files(files("x = 1", name="train.py"))
    with pytest.raises(ConfigError, match="a file that can be read"):
        check_files(files("{{", name="train.json"))
    check_files(files("x", "data.custom_cls.path=own.py", name="train.py"))
    check_files(files(pd.DataFrame([without("data_source")]), *SCORED_BY_MODEL))


def test_a_batch_needs_as_many_prompts_and_validation_one():
    config = OmegaConf.create({"data": {"train_batch_size": 8, "val_files": "v.parquet", "max_prompt_length": 5}})
    check_steps(config, 8, 1)
    with pytest.raises(
        ConfigError, match=r"data\.train_batch_size=8: at most 7, the prompts that data\.train_files gives"
    ):
        check_steps(config, 7)
    with pytest.raises(ConfigError, match=r"data\.val_files=v\.parquet: a file with prompts of at most .*=5 tokens"):
        check_steps(config, 8, 0)
