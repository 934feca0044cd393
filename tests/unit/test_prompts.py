"""Prompt lengths: over-long prompts are counted before Ray starts, and a file is tokenized once."""

import pandas as pd
import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight.inputs import check_prompts, prompt_lengths
from tests.unit.shared import byte_tokenizer


def tokenizer_of(template="{% for m in messages %}{{ m['content'] }}{% endfor %}"):
    return byte_tokenizer(template)


class Rows:
    """A dataset that counts how often it is read."""

    def __init__(self, lengths):
        self.lengths, self.reads = lengths, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        self.reads += 1
        return {"raw_prompt": [{"role": "user", "content": "a" * self.lengths[i]}]}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "train.parquet")
    data = {"train_files": str(tmp_path / "train.parquet"), "max_prompt_length": 64, "filter_overlong_prompts": False}
    return OmegaConf.create({"data": data})


def test_over_long_prompts_are_counted_and_the_longest_is_named_unless_they_are_filtered(config):
    with pytest.raises(ConfigError, match=r"max_prompt_length=64: at least 70, the tokens of row 1 .*; 2 of 4 prompts"):
        check_prompts(config, tokenizer_of(), Rows([10, 70, 65, 64]))
    config.data.filter_overlong_prompts = True
    check_prompts(config, tokenizer_of(), rows := Rows([70]))
    assert rows.reads == 0, "verl leaves them out"


@pytest.mark.parametrize("change", ["file", "template", "rows"])
def test_cache_is_not_used_for_other_files_templates_or_rows(config, change):
    prompt_lengths(config, tokenizer_of(), Rows([3, 5]))
    tokenizer = tokenizer_of()
    if change == "file":
        pd.DataFrame({"a": [2]}).to_parquet(config.data.train_files)
    elif change == "template":
        tokenizer = tokenizer_of("a{% for m in messages %}{{ m['content'] }}{% endfor %}")
    else:
        config.data.train_max_samples = 1
    rows = Rows([7])
    assert prompt_lengths(config, tokenizer, rows).tolist() == [8 if change == "template" else 7]
    assert rows.reads == 1


def test_file_is_tokenized_once_but_for_a_dataset_class_of_ones_own(config):
    first, second = Rows([3, 5]), Rows([3, 5])
    for rows in (first, second):
        assert prompt_lengths(config, tokenizer_of(), rows).tolist() == [3, 5]
    assert (first.reads, second.reads) == (2, 0)
    config.data.custom_cls = {"path": "mine.py"}
    assert prompt_lengths(config, tokenizer_of(), Rows([4])).tolist() == [4]
