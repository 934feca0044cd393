"""A cache that cannot be written ends no run."""

import os
import subprocess
import sys

import pytest

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
