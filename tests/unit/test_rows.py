"""Before Ray starts: each row reaches the model as it is written, or the run is refused by file, row and what is wrong."""

import json
import os
from datetime import date, datetime, timedelta
from decimal import Decimal

import datasets
import pandas as pd
import pytest
from torch.utils.data import Dataset
from verl.utils.dataset.rl_dataset import RLHFDataset

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight import inputs
from recipe.partial_rollout.preflight.columns import check_columns
from recipe.partial_rollout.preflight.inputs import cache_by_content, missing_inputs
from recipe.partial_rollout.preflight.rows import check_rows, dataset_of, file_rows
from recipe.partial_rollout.preflight.verl_keys import check_verl_keys
from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer
from tests.unit.shared import settings_of

ASKED = "what is 3+4?"
USER = {"role": "user", "content": ASKED}
SYSTEM = {"role": "system", "content": "be brief"}
BRANCHES = """\
{%- for message in messages %}
{%- if message.role in ('user', 'system', 'assistant') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{- message.content | tojson }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""a branch for each role, as Qwen2.5's has, and none for others"""
FORGIVING = BRANCHES.replace("message.content + '<", "(message.content or '') ~ '<")
NO_SYSTEM = BRANCHES.replace("'user', 'system', 'assistant'", "'user', 'assistant'")
PRINTS = "{%- for message in messages %}{{- message.role ~ ': ' ~ message.content }}{%- endfor %}"
PARTS = """\
{%- for message in messages %}{{- message.role }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}
{%- endif %}{%- endfor %}"""
STRIPS = "{%- for message in messages %}{{- message.role + ': ' + (message.content | trim) + ';' }}{%- endfor %}"
THINKS = """\
{%- for message in messages %}{%- set text = message.content %}
{%- if message.role == 'assistant' %}{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- message.role + ': ' + text + ';' }}{%- endfor %}"""
CALLS = """\
{%- for message in messages %}{{- message.role + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{- call.function.name }}{%- endfor %}{%- endfor %}"""
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
TOOL = {"role": "tool", "content": 'it says "7"\nand more'}
IN_PARTS = {"role": "user", "content": [{"type": "text", "text": ASKED}]}
TURN = {"role": "assistant", "content": "<think>\nmany a thought\n</think>\n\nseven"}


def row(prompt=(USER,), **columns):
    prompt = list(prompt) if isinstance(prompt, tuple) else prompt
    return {"prompt": prompt, "data_source": "mine", "reward_model": {"ground_truth": "7"}, **columns}


@pytest.fixture
def check(tmp_path, resolved_config, monkeypatch):
    """``check(rows, template, *overrides, split=)``: what a start checks of a file with these rows; its dataset."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def run(rows, template=BRANCHES, *overrides, split="train", kind="parquet"):
        file = tmp_path / f"rows.{kind}"
        if kind == "parquet":
            pd.DataFrame(rows).to_parquet(file)
        else:
            file.write_text("".join(json.dumps(each) + "\n" for each in rows))
        given = f"data.train_files={file}", f"data.val_files={file}", "data.max_prompt_length=512"
        config = resolved_config("quickstart_cpu", *given, *overrides)
        tokenizer = build_tokenizer()
        tokenizer.chat_template = template
        dataset, key = dataset_of(config, split, tokenizer), f"data.{split}_files"
        check_columns(config, dataset, key)
        check_rows(config, settings_of(enable=True), dataset, key, tokenizer)
        return dataset

    return run


LOST = {
    "text": (ASKED, BRANCHES, "no list of messages: 'what is 3"),
    "no messages": ([], BRANCHES, r"no list of messages: \[\]"),
    "ShareGPT's keys": ([{"from": "human", "value": ASKED}], BRANCHES, "leaves out text of {'from': 'human'"),
    "a role that the template has no branch for": ([{"role": "human", "content": ASKED}], BRANCHES, "'role': 'human'"),
    "None as content": ([{"role": "user", "content": None}], FORGIVING, "'content': None"),
    "a system prompt that the template leaves out": ([SYSTEM, USER], NO_SYSTEM, "leaves out text of .*be brief"),
    "a list of parts that a template prints": ([IN_PARTS], PRINTS, "prints its content as a Python list"),
    "a part without its text": ([{"role": "user", "content": [{"type": "text", "value": ASKED}]}], PARTS, "'value'"),
}


@pytest.mark.parametrize(("prompt", "template", "words"), LOST.values(), ids=LOST)
def test_row_whose_messages_do_not_reach_the_model_is_refused(check, prompt, template, words):
    said = r"^data.val_files=.*rows.parquet: rows whose prompt is a list of messages.*; row 0 .*" + words
    with pytest.raises(ConfigError, match=said) as caught:
        check([row(prompt)] * 3, template, "data.filter_overlong_prompts=False", split="val")
    assert "\n" not in str(caught.value)


READ = {
    "system, tool and JSON": ([SYSTEM, USER, TURN, TOOL], BRANCHES),
    "text that a template strips": ([{"role": "user", "content": f"  {ASKED}\n\n"}], STRIPS),
    "a thought of an earlier turn": ([USER, TURN, USER], THINKS),
    "parts": ([IN_PARTS], PARTS),
    "a call without content": ([USER, CALL, TOOL, USER], CALLS),
    "an empty system prompt": ([{"role": "system", "content": ""}, USER], BRANCHES),
}


@pytest.mark.parametrize(("prompt", "template"), READ.values(), ids=READ)
def test_row_that_reaches_the_model_is_taken(check, prompt, template):
    assert len(check([row(prompt)] * 3, template, "data.filter_overlong_prompts=False", kind="jsonl")) == 3


def test_number_of_a_row_is_that_in_the_file(check):
    long, lost = row([{"role": "user", "content": "a" * 600}]), row([{"role": "human", "content": ASKED}])
    with pytest.raises(ConfigError, match=r"; row 3 .*'role': 'human'"):
        check([long, long, row(), lost, row()])
    assert [*file_rows(check([long, row(), row()]))] == [1, 2]


READS = "rows with data_source and reward_model.ground_truth, which .* naive reads; these rows have no"
OWN_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=mine"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"extra_info": json.dumps({"index": 3})}, "extra_info is a dictionary.*row 0 .*AttributeError: 'str' object"),
        ({"priority": "high"}, "priority a number.*row 0 .*ValueError: invalid literal"),
        ({"images": ["a.png"]}, "images need a model that sees.*row 0 .*AssertionError: processor is needed"),
        ({"reward_model": json.dumps({"ground_truth": "7"})}, f"{READS} reward_model.ground_truth"),
        (
            {"agent_name": "mine"},
            "must be one of single_turn_agent, tool_agent; rows name mine, which is not registered",
        ),
        ({"extra_info": {"made": datetime(2026, 1, 1)}}, "row 0, column extra_info.made: datetime.datetime cannot be"),
    ],
)
def test_column_that_verl_cannot_read_is_refused(check, columns, words):
    with pytest.raises(ConfigError, match=rf"^data\.train_files=.*{words}"):
        check([row(**columns)] * 3, BRANCHES, "trainer.save_freq=5")
    if "datetime" in words:
        check([row(**columns)], BRANCHES, "trainer.save_freq=-1")
    assert len(check([row(extra_info=None, priority=3, images=[])] * 3)) == 3


def test_file_of_the_same_name_and_time_stamp_brings_its_own_rows(tmp_path, resolved_config, monkeypatch):
    """``datasets`` knows a file by both, and verl trained the rows of the old one."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(inputs, "_CACHE", tmp_path / "cache")
    file = tmp_path / "train.parquet"
    config = resolved_config("quickstart_cpu", f"data.train_files={file}", f"data.val_files=[{file}]")
    for content in ("1+1", "2+2"):
        pd.DataFrame([row([{"role": "user", "content": content}])]).to_parquet(file)
        os.utime(file, (1.7e9, 1.7e9))
        cache_by_content(config)
        assert dataset_of(config, "train", build_tokenizer())[0]["raw_prompt"][0]["content"] == content


def test_data_source_without_a_reward_of_verls_needs_one_of_ones_own(check):
    none, nameless = (
        "reward.custom_reward_function.path=null",
        {key: value for key, value in row().items() if key != "data_source"},
    )
    with pytest.raises(ConfigError, match=r"function\.path=None: .* none for data_source=mine of data.train_files"):
        check([row(data_source="openai/gsm8k"), row()], BRANCHES, none)
    with pytest.raises(ConfigError, match=rf"^data\.train_files=.*{READS} data_source"):
        check([nameless])
    known = "openai/gsm8k HuggingFaceH4/MATH-500 math_dapo aime24 codecontests hiyouga/geometry3k searchR1_nq"
    check([row(data_source=source) for source in known.split()], BRANCHES, none)
    check([nameless], BRANCHES, none, "reward.reward_model.enable=True")
    # A loop of the user's own may score its samples itself.
    for own_loop in (OWN_LOOP, "actor_rollout_ref.rollout.agent.agent_loop_config_path=conf/tools/agent_loops.yaml"):
        check([nameless], BRANCHES, none, own_loop)


def test_file_or_class_that_makes_no_dataset_is_refused_by_its_key(check, tmp_path):
    own = "data.custom_cls.path=pkg://math", "data.custom_cls.name=Own"
    with pytest.raises(ConfigError, match=r"^data\.custom_cls\.path=pkg://math: files, or a class of data.custom_cls"):
        check([row()], BRANCHES, *own)
    (tmp_path / "torn.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"^data.train_files=.*that verl can make a dataset of \(Arrow"):
        check([row()], BRANCHES, f"data.train_files={tmp_path}/torn.parquet")


def test_own_loop_may_read_another_kind_of_prompt(check):
    check([row(ASKED)], BRANCHES, OWN_LOOP)
    with pytest.raises(ConfigError, match="'role': 'human'"):
        check([row(({"role": "human", "content": ASKED},))], BRANCHES, OWN_LOOP)


def test_row_whose_keys_differ_from_the_first_rows_is_refused(resolved_config):
    """Rows of a user's own dataset class."""
    rows = [{**row(), "raw_prompt": [USER], **({"hint": "h"} if i != 2 else {"other": "o"})} for i in range(4)]
    tokenizer, config = build_tokenizer(), resolved_config("quickstart_cpu")
    said = r"^data.train_files=.*: rows that all have the same keys; row 2 lacks hint, has other, unlike the first row$"
    with pytest.raises(ConfigError, match=said):
        check_rows(config, settings_of(enable=True), rows, "data.train_files", tokenizer)
    check_rows(config, settings_of(enable=True), rows[:2], "data.train_files", tokenizer)


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("made", datetime(2026, 1, 1), "timestamp"),
        ("made", date(2026, 1, 1), "date32"),
        ("price", Decimal("1.5"), "decimal128"),
        ("extra_info", {"took": [timedelta(1)]}, "duration"),
    ],
)
def test_rare_value_that_no_checkpoint_can_hold_is_refused_by_its_columns_type(check, column, value, kind):
    rows = [row(**{column: value if i == 5 else None}) for i in range(600)]
    name = r"extra_info\.took" if kind == "duration" else column
    with pytest.raises(ConfigError, match=rf"^data.train_files=.*rows that .*: column {name} has the type {kind}"):
        check(rows, BRANCHES, "trainer.save_freq=5")
    check(rows[:4], BRANCHES, "trainer.save_freq=-1")
    check(rows[:4], BRANCHES, "trainer.save_freq=5", split="val")


def test_ground_truth_may_be_a_dictionary(check):
    check([row(reward_model={"ground_truth": {"target": 24, "numbers": [1, 2]}})])


@pytest.mark.parametrize("column", ["self", "sampling_params", "trace", "trajectory"])
def test_column_named_like_a_parameter_of_verls_worker_is_refused(check, column):
    with pytest.raises(ConfigError, match=rf"^data.train_files=.*rows without a column {column}: "):
        check([row(**{column: "x"})] * 3)


def test_ragged_column_of_which_verls_reward_call_makes_no_array_is_refused(check):
    ragged = [row(tests=[["1"], ["2"]]), row(tests=[["1", "2"], ["3"]])]
    with pytest.raises(ConfigError, match=r"^data.train_files=.*row 1, column tests: .*\(ValueError: setting an array"):
        check(ragged)
    check(ragged, BRANCHES, OWN_LOOP)
    check(ragged[:1] * 2)


class Adds(RLHFDataset):
    """Makes verl's columns of others."""

    def maybe_filter_out_long_prompts(self, dataframe=None):
        return dataframe

    def __getitem__(self, item):
        asked = self.dataframe[item]
        messages = [{"role": "user", "content": asked["question"]}]
        return {"raw_prompt": messages, "data_source": "mine", "reward_model": {"ground_truth": asked["answer"]}}


class Frame(Dataset):
    """Keeps a frame of pandas."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.dataframe = pd.read_parquet(data_files)

    def __len__(self):
        return len(self.dataframe)

    def __getitem__(self, item):
        kept = self.dataframe.iloc[item].to_dict()
        return {**kept, "raw_prompt": [*kept["prompt"]]}


class Nameless(Frame):
    def __getitem__(self, item):
        return {key: value for key, value in super().__getitem__(item).items() if key != "data_source"}


def own(name):
    return f"data.custom_cls.path={__file__}", f"data.custom_cls.name={name}"


def test_rows_of_a_dataset_class_of_ones_own_are_checked_as_it_makes_them(check):
    asked = [{"question": ASKED, "answer": "7"}] * 3
    assert len(check(asked, BRANCHES, *own("Adds"))) == len(check([row()] * 3, BRANCHES, *own("Frame"))) == 3
    with pytest.raises(ConfigError, match=rf"^data\.train_files=.*{READS} data_source"):
        check([row()] * 3, BRANCHES, *own("Nameless"))


def test_dataset_class_of_ones_own_may_read_keys_that_verl_does_not(resolved_config):
    check_verl_keys(resolved_config("quickstart_cpu", *own("Frame"), "data.truncation=left"))


def test_dataset_class_of_ones_own_may_read_a_folder_or_a_name_of_the_hub(tmp_path, resolved_config, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    given = f"data.train_files={tmp_path}", "data.val_files=openai/gsm8k"
    keys = [str(error).split("=")[0] for error in missing_inputs(resolved_config("quickstart_cpu", *given))]
    assert keys[-2:] == ["data.train_files", "data.val_files"]
    config = resolved_config("quickstart_cpu", *given, *own("Frame"))
    assert not [error for error in missing_inputs(config) if str(error).startswith("data.")]
    cache_by_content(config)
    torn = resolved_config("quickstart_cpu", "data.train_files=/nowhere/train.parquet", *own("Frame"))
    assert "data.train_files=/nowhere/train.parquet: an existing parquet file" in map(str, missing_inputs(torn))
