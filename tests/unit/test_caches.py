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


HUB = """
import sys
from recipe.partial_rollout import main_ppo
main_ppo.writable = lambda directory: str(directory) not in sys.argv[1:]
main_ppo.spare_caches()
from datasets import config
from huggingface_hub import constants
print(constants.HF_HOME, config.HF_DATASETS_CACHE, config.HF_MODULES_CACHE, config.XDG_CACHE_HOME, sep="\\n")
"""


@pytest.mark.parametrize("given", [False, True])
def test_models_are_read_where_nothing_can_be_written_and_tables_of_data_files_are_made_elsewhere(tmp_path, given):
    """A model's home that is mounted for reading, or lies in a home that is: each start ended at its data files."""
    cache, hub = tmp_path / ".cache", tmp_path / (".cache/huggingface" if not given else "models")
    hub.mkdir(parents=True)
    unset = ("HF_HOME", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "XDG_CACHE_HOME")
    env = {key: value for key, value in os.environ.items() if key not in unset} | {"HOME": str(tmp_path)}
    refused = [hub] if given else [tmp_path, cache, hub]
    env |= {"HF_HOME": str(hub)} if given else {}
    command = [sys.executable, "-W", "ignore", "-c", HUB, *map(str, refused)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    home, datasets, modules, xdg = done.stdout.splitlines()
    assert home == str(hub) and "partial_rollout_caches_" in datasets and "partial_rollout_caches_" in modules
    assert ("partial_rollout_caches_" in xdg) is not given, "what can be written is"


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
