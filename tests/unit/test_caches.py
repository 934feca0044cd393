"""A cache that cannot be written ends no run."""

import os
import subprocess
import sys

import pytest

READ_ONLY = """
from pathlib import Path
from recipe.partial_rollout.main_ppo import spare_caches
spare_caches()
from huggingface_hub import constants
from ray._private.authentication import authentication_token_setup as token
import matplotlib
from vllm import envs
for directory in (envs.VLLM_CACHE_ROOT, envs.VLLM_CONFIG_ROOT, matplotlib.get_cachedir(), constants.HF_HOME):
    Path(directory).mkdir(parents=True, exist_ok=True)
token.enable_token_auth_by_default()
token.ensure_token_if_auth_enabled()
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


def run(script, *args, **known):
    unset = ("RAY_AUTH_MODE", "HF_HOME", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HOME", "XDG_CACHE_HOME")
    env = {key: value for key, value in os.environ.items() if key not in unset} | known
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize("given", [False, True])
def test_models_are_read_from_a_read_only_home_and_tables_made_elsewhere(tmp_path, given):
    """A model's home that is mounted for reading, or lies in a home that is: each start ended at its data files."""
    cache, hub = tmp_path / ".cache", tmp_path / ("models" if given else ".cache/huggingface")
    hub.mkdir(parents=True)
    refused = [hub] if given else [tmp_path, cache, hub]
    done = run(HUB, *refused, HOME=str(tmp_path), **{"HF_HOME": str(hub)} if given else {})
    home, *tables, xdg = done.stdout.splitlines()
    assert home == str(hub) and all("partial_rollout_caches_" in path for path in tables)
    assert ("partial_rollout_caches_" in xdg) is not given, "what can be written is"


@pytest.mark.parametrize("known", ["HOME", "XDG_CACHE_HOME"])
def test_read_only_home_or_cache_is_said_once_and_not_written_to(tmp_path, known):
    (tmp_path / "file").touch()
    done = run(READ_ONLY, **{"HOME": str(tmp_path), known: str(tmp_path / "file" / "home")})
    assert done.stderr.count("cannot be written: the caches of this run are in ") == 1
