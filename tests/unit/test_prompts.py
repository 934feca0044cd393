"""Prompt lengths: over-long prompts are counted before Ray starts; a cache that cannot be written ends no run."""

import os
import subprocess
import sys

import pandas as pd
import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight.inputs import check_prompts
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


READ_ONLY = """
import os, sys
from pathlib import Path
from recipe.partial_rollout.main_ppo import spare_caches
spare_caches()
from huggingface_hub import constants
from ray._private.authentication import authentication_token_setup as token
import matplotlib
from vllm import envs
for directory in (envs.VLLM_CACHE_ROOT, envs.VLLM_CONFIG_ROOT, matplotlib.get_cachedir()):
    Path(directory).mkdir(parents=True, exist_ok=True)
token.enable_token_auth_by_default()
token.ensure_token_if_auth_enabled()
Path(constants.HF_HOME).mkdir(parents=True, exist_ok=True)
"""


@pytest.mark.parametrize("known", ["HOME", "XDG_CACHE_HOME"])
def test_home_or_cache_that_cannot_be_written_is_said_once_and_libraries_write_elsewhere(tmp_path, known):
    (tmp_path / "file").touch()
    unset = ("RAY_AUTH_MODE", "HF_HOME", "HOME", "XDG_CACHE_HOME")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env |= {"HOME": str(tmp_path), known: str(tmp_path / "file" / "home")}
    command = [sys.executable, "-W", "ignore", "-c", READ_ONLY]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("cannot be written: what this run caches is in ") == 1
