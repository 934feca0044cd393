"""``main_ppo`` with ``--check``, and before Ray starts: a user's mistake is one line and exit code 2, whoever finds it."""

import contextlib
import json
import logging
import re
import runpy
import sys
from datetime import datetime

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight.rows import check_files, check_prompts, check_rows, check_steps, dataset_of
from recipe.partial_rollout.preflight.settings_check import check_config, check_settings
from recipe.partial_rollout.tasks.clock10.model import build_model
from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer


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
    ([QUICK, "actor_rollout_ref.rollout=null"], "actor_rollout_ref.rollout=None: a section of keys such as"),
    ([QUICK, "reward.reward_model=null"], "reward.reward_model=None: a section of keys such as"),
    ([QUICK, "actor_rollout_ref.rollout.val_kwargs=null"], "val_kwargs=None: a section of keys such as"),
    ([QUICK, "partial_rollout=on"], "partial_rollout=on: a section of keys such as partial_rollout.enable"),
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


WRONG = [
    ("actor_rollout_ref.actor.optim.betas=[2,3]", r"optim.optimizer=AdamW: a class of torch.optim .*Invalid beta"),
    ("actor_rollout_ref.actor.optim.weight_decay=-1.0", r"optim.optimizer=AdamW: .*Invalid weight_decay"),
    ("+actor_rollout_ref.actor.optim.override_optimizer_config.epz=1", r"optim.optimizer=AdamW: .* argument 'epz'"),
    ("actor_rollout_ref.actor.optim.betas=0.9", r"optim.betas=0.9: a list such as \[0.9, 0.999\]"),
    ("actor_rollout_ref.actor.optim.clip_grad=0.0", r"optim.clip_grad=0.0: above 0"),
    ("actor_rollout_ref.actor.checkpoint.save_contents=[]", r"save_contents=\[\]: a list of .*with model"),
    ("actor_rollout_ref.actor.checkpoint.save_contents=null", r"save_contents=None: a list of .*with model"),
    ("algorithm.rollout_correction.rollout_rs=5", r"rollout_rs=5: null, or modes such as token_k1"),
    ("algorithm.rollout_correction.rollout_is_threshold=[1]", r"rollout_is_threshold=\[1\]: a number above 0"),
    ("trainer.logger=[[console]]", r"trainer.logger=\[\['console'\]\]: a list of wandb"),
    ("actor_rollout_ref.actor.checkpoint.save_contents=[modle]", r"save_contents=\['modle'\]: a list of"),
    ("actor_rollout_ref.model.override_config=x", r"model.override_config=x: a section of keys"),
    ("actor_rollout_ref.model.use_liger=True", r"model.use_liger=True: another, or the package liger_kernel"),
    (
        "actor_rollout_ref.rollout.max_model_len=9999",
        r"max_model_len or response_length=9999: at most 4096 with the prompt",
    ),
    ("actor_rollout_ref.rollout.max_num_seqs=0", r"max_num_seqs=0: at least 1"),
    ("actor_rollout_ref.rollout.max_num_batched_tokens=-5", r"max_num_batched_tokens=-5: at least 1"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=0", r"tensor_model_parallel_size=0: at least 1"),
    ("actor_rollout_ref.rollout.seed=-1", r"rollout.seed=-1: at least 0"),
    (
        "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
        r"logprobs_mode=raw_logprobs: processed_logprobs with",
    ),
    ("actor_rollout_ref.rollout.scheduling_policy=lifo", r"scheduling_policy=lifo: one of fcfs, priority"),
    ("actor_rollout_ref.rollout.val_kwargs.n=0", r"val_kwargs.n=0: at least 1"),
    ("actor_rollout_ref.rollout.val_kwargs.top_k=0", r"val_kwargs.top_k=0: -1 for all tokens"),
    ("actor_rollout_ref.rollout.val_kwargs.top_p=2", r"val_kwargs.top_p=2: above 0, at most 1"),
    ("data.dataloader_num_workers=-1", r"dataloader_num_workers=-1: at least 0"),
    ("data.val_batch_size=0", r"val_batch_size=0: at least 1, or null"),
    ("data.train_files=5", r"data.train_files=5: a parquet file, or a list of them"),
    ("data.seed=-3", r"data.seed=-3: at least 0"),
    ("data.seed=99999999999999999999", r"data.seed=9+: at least 0, below 2\*\*32"),
    ("actor_rollout_ref.rollout.seed=4294967296", r"rollout.seed=4294967296: .*below 2\*\*32"),
    ("+data.sampler.class_path=mine.py", r"data.sampler.class_path=mine.py: null: verl .* does not read it"),
    ("data.apply_chat_template_kwargs=x", r"apply_chat_template_kwargs=x: a section of keys"),
    ("trainer.logger=5", r"trainer.logger=5: a list of wandb"),
    ('trainer.project_name="my project"', r"project_name=my project: up to 100 letters"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[change for change, _ in WRONG])
def test_value_that_a_worker_or_an_engine_would_die_of_or_train_nothing_with_is_refused(
    resolved_config, tmp_path, model, change, message
):
    keys = f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={tmp_path}", change
    config = resolved_config("quickstart_cpu", *keys, f"data.val_files={model}/config.json")
    if not change.startswith("data.train_files"):
        config.data.train_files = config.data.val_files
    with pytest.raises(ConfigError, match=message) as caught:
        check_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ratio", ["null", 0.5, 1.0])
def test_dual_clip_that_verls_losses_assert_is_refused_under_nopr_too(resolved_config, ratio):
    keys = "partial_rollout.enable=False", f"actor_rollout_ref.actor.clip_ratio_c={ratio}"
    with pytest.raises(ConfigError, match=r"clip_ratio_c=.*: a number above 1 with loss_mode="):
        check_settings(resolved_config("quickstart_cpu", *keys))


ROW = {
    "prompt": [{"role": "user", "content": "1"}],
    "data_source": "mine",
    "reward_model": {"ground_truth": "1"},
}
READS = "data.train_files=.*: a file with columns data_source and reward_model.ground_truth, which .* naive reads; "


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


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pd.DataFrame([ROW]).iloc[:0], "data.train_files=.*: a file with rows that can be read"),
        (pd.DataFrame([without("prompt")]), "data.prompt_key=prompt: a column of .*: data_source, reward_model"),
        (pd.DataFrame([without("data_source")]), f"{READS}it has no data_source"),
        (pd.DataFrame([without("reward_model")]), f"{READS}it has no reward_model"),
        (
            pd.DataFrame([{**ROW, "reward_model": "1"}]),
            r"rows with reward_model.ground_truth; row 0 has reward_model='1'",
        ),
        (
            pd.DataFrame([{**ROW, "reward_model": {"style": "rule"}}]),
            r"rows with reward_model.ground_truth; row 0 has reward_model={'style': 'rule'}",
        ),
        (
            pd.DataFrame([{**ROW, "agent_name": "mine"}]),
            "column agent_name has single_turn_agent, tool_agent; it has mine",
        ),
        (pd.DataFrame([{**ROW, "output": "1", "input": "1"}]), "a file without a column output: verl's agent loops"),
        ("no parquet", r"data.train_files=.*: a file with rows that can be read \(Arrow"),
    ],
)
def test_data_file_that_verl_cannot_train_on_is_refused(files, rows, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_files(files(rows))
    assert "\n" not in str(caught.value)


def test_only_what_verl_reads_is_taken_for_data(files):
    check_files(files(pd.DataFrame([ROW])))
    check_files(files(json_lines(ROW), name="train.jsonl"))
    with pytest.raises(ConfigError, match=r"a file of \.parquet, \.json, \.jsonl"):
        check_files(files("x = 1", name="train.py"))
    with pytest.raises(ConfigError, match="a file with rows that can be read"):
        check_files(files("{{", name="train.json"))
    with pytest.raises(ConfigError, match="a file with rows that can be read"):
        check_files(files("", name="train.json"))
    with pytest.raises(ConfigError, match="column agent_name has single_turn_agent, tool_agent; it has mine"):
        check_files(files(json_lines({**ROW, "agent_name": "mine"}), name="train.json"))
    check_files(files("x", "data.custom_cls.path=own.py", name="train.py"))
    check_files(files(pd.DataFrame([without("data_source")]), *SCORED_BY_MODEL))


VERLS_SOURCES = (
    "openai/gsm8k HuggingFaceH4/MATH-500 math_dapo aime24 numina_cn_k12 codecontests hiyouga/geometry3k searchR1_nq"
)


def test_data_source_that_verl_has_no_reward_for_needs_a_reward_of_ones_own(files, tmp_path, capsys):
    none = "reward.custom_reward_function.path=null"
    with pytest.raises(
        ConfigError, match=r"function\.path=None: .* verl has none for data_source=mine of .*/train\.parq"
    ):
        check_files(files(pd.DataFrame([{**ROW, "data_source": "openai/gsm8k"}, ROW]), none))
    known = pd.DataFrame([{**ROW, "data_source": source} for source in VERLS_SOURCES.split()])
    with pytest.raises(ConfigError, match=r"data_source=mine of .*/val\.parquet"):
        check_files(files(known, none))
    check_files(files(known, none, f"data.val_files={tmp_path}/train.parquet"))
    check_files(files(pd.DataFrame([ROW]), *SCORED_BY_MODEL))
    # A loop of the user's own may score its samples itself.
    loops = "actor_rollout_ref.rollout.agent.agent_loop_config_path=conf/tools/agent_loops.yaml"
    check_files(files(pd.DataFrame([without("reward_model")]), none, loops))
    assert not capsys.readouterr().out


NULL, WORDS = {**ROW, "reward_model": None}, {**ROW, "reward_model": "one"}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (pd.DataFrame([ROW, NULL]), "rows with reward_model.ground_truth; row 1 has reward_model=None"),
        (json_lines(ROW, NULL), "rows with reward_model.ground_truth; row 1 has reward_model=None"),
        (json_lines(WORDS, ROW), "rows with reward_model.ground_truth; row 0 has reward_model='one'"),
        (pd.DataFrame([ROW, {**ROW, "prompt": None}]), "of rows 0 to 1 it refuses one (TypeError"),
        (
            pd.DataFrame([ROW, {**ROW, "prompt": [{"role": "user", "content": "1" * 99}]}]),
            "the tokens of row 1 of data.",
        ),
        (json_lines(ROW) + "{", "a file with rows that can be read"),
    ],
)
def test_row_that_verl_would_break_on_in_midst_of_a_run_is_named(files, tmp_path, model, rows, said, split):
    """The first three ended a run at its first validation, the fourth without a word of the key."""
    name = f"{split}.jsonl" if isinstance(rows, str) else f"{split}.parquet"
    config = files(rows, "data.filter_overlong_prompts=False", name=name)
    pd.DataFrame([ROW]).to_parquet(tmp_path / "good.parquet")
    config.data.train_files = config.data.val_files = f"{tmp_path}/good.parquet"
    config.data[f"{split}_files"] = f"{tmp_path}/{name}"
    tokenizer, key = build_tokenizer(), f"data.{split}_files"
    with pytest.raises(ConfigError, match=rf"^data\.(max_prompt_length|{split}_files)=.*{re.escape(said)}") as caught:
        check_files(config)
        check_prompts(config, tokenizer, dataset_of(config, split, tokenizer), key)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("refused", "enable", "save_freq"), [(True, True, 5), (False, True, -1), (False, False, 5)])
def test_column_that_no_checkpoint_can_hold_is_refused_by_name_where_there_are_any(refused, enable, save_freq):
    ours = {"partial_rollout": {"enable": enable}, "trainer": {"save_freq": save_freq}}
    config = OmegaConf.create({"data": {"train_files": "train.parquet"}, **ours})
    rows = [
        {"dummy_tensor": torch.zeros(1), "extra_info": {"made": made}} for made in ("2026-01-01", datetime(2026, 1, 1))
    ]
    check_rows(config, rows[:1])
    words = (
        r"^data.train_files=train.parquet: row 1, column extra_info.made: datetime.datetime cannot be saved: only plain"
    )
    with pytest.raises(ConfigError, match=words) if refused else contextlib.nullcontext():
        check_rows(config, rows)


def test_training_rows_without_a_ground_truth_are_for_the_loop_that_scores_them(files):
    loops = "actor_rollout_ref.rollout.agent.agent_loop_config_path=conf/tools/agent_loops.yaml"
    config = files(pd.DataFrame([NULL]), loops)
    check_files(config)
    config.data.val_files = config.data.train_files
    with pytest.raises(ConfigError, match="row 0 has reward_model=None"):
        check_files(config)


def test_files_of_one_split_make_one_table(files, tmp_path):
    config = files(pd.DataFrame([ROW]))
    pd.DataFrame([{**ROW, "data_source": 7}]).to_parquet(tmp_path / "other.parquet")
    config.data.train_files = [config.data.train_files, f"{tmp_path}/other.parquet"]
    check_files(config)
    with pytest.raises(ConfigError, match=r"data\.train_files=.*: files whose rows make one table \("):
        dataset_of(config, "train", build_tokenizer())


OWN = """
class Own:
    def __init__(self, **given): pass
    def __len__(self): return 4
    def __getitem__(self, i): {row}
"""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("return {'raw_prompt': [], 'output': 1}", "have no output: verl's agent loops have an argument of that name"),
        ("return {'prompt': [], 'level': 1}", "have raw_prompt, the messages of a prompt; they have prompt, level"),
        ("return [][i]", r"can be read \(IndexError"),
    ],
)
def test_rows_of_a_dataset_class_of_ones_own_that_no_agent_loop_can_take_are_refused_by_its_key(
    files, tmp_path, row, said
):
    """Each sample failed of the first, the check itself of the others, in a traceback."""
    (tmp_path / "own.py").write_text(
        "from torch.utils.data import Dataset\n" + OWN.replace("Own:", "Own(Dataset):").format(row=row)
    )
    own = f"data.custom_cls.path={tmp_path}/own.py", "data.custom_cls.name=Own"
    with pytest.raises(ConfigError, match=rf"^data\.custom_cls\.path=.*own\.py: a dataset class whose rows {said}"):
        dataset_of(files(pd.DataFrame([ROW]), *own), "train", build_tokenizer())


def test_paths_in_the_home_are_found_and_written_there(resolved_config, tmp_path, monkeypatch):
    """The check looked for them there, verl and the run's files did not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    given = "trainer.default_local_dir='~/run'", "data.train_files=['~/a.parquet',/b.parquet]"
    more = "data.val_files='~/v.parquet'", "actor_rollout_ref.model.path='~/model'"
    config = resolved_config("quickstart_cpu", *given, *more)
    main_ppo.prepare(config)
    assert config.trainer.default_local_dir == f"{tmp_path}/run" and config.data.val_files == f"{tmp_path}/v.parquet"
    assert config.data.train_files == [f"{tmp_path}/a.parquet", "/b.parquet"]
    assert config.actor_rollout_ref.model.path == f"{tmp_path}/model"


def test_a_batch_needs_as_many_prompts_and_validation_one():
    data = {"train_batch_size": 8, "val_files": "v.parquet", "max_prompt_length": 5, "filter_overlong_prompts": False}
    config = OmegaConf.create({"data": data})
    check_steps(config, 8, 1)
    with pytest.raises(
        ConfigError, match=r"data\.train_batch_size=8: at most 7, the prompts .*that data\.train_files gives"
    ):
        check_steps(config, 7)
    with pytest.raises(ConfigError, match=r"data\.val_files=v\.parquet: a file with prompts of at most .*=5 tokens"):
        check_steps(config, 8, 0)
    config.data.filter_overlong_prompts = True
    with pytest.raises(ConfigError, match=r"at most 0, .* which the chat template takes, that data\.train_files gives"):
        check_steps(config, 0)
