"""How a run appears in the trackers: under which id, with which configuration, SwanLab's in the cloud or on this machine.

``SWANLAB_MODE`` is the one variable: ``cloud`` (or ``online``), ``local``, ``offline`` (files for ``swanlab sync``) or
``disabled``. Where it is not set, a user with a key gets the cloud, and anybody else the local board.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.keys import fail, leaves
from recipe.partial_rollout.config.settings import ROOT
from recipe.partial_rollout.records.run_log import Arm
from verl_ext import swanlab_board
from verl_ext.guard import installed_pair

SWANLAB = "swanlab"
MODE = "SWANLAB_MODE"
CLOUD, LOCAL = ("cloud", "online"), "local"
LONGEST = 100
"""characters of a value in SwanLab's table of configurations"""

_SHOWN = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.strategy",
    "algorithm.adv_estimator",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
    "trainer.total_training_steps",
)
"""verl's keys in the table, besides those that the command line sets"""


_SET: dict[str, str] = {}
"""variables that this process has set"""


def set_variable(name: str, value: str | None) -> None:
    """Set a variable of the environment, or unset it, unless the user has set it; each run of a multirun sets its own."""
    if os.environ.get(name) not in (None, _SET.get(name)):
        return
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = _SET[name] = value


def choose_mode(loggers: Iterable[str]) -> None:
    """Set ``SWANLAB_MODE`` for verl, which reads it, unless the user has.

    Raises:
        ConfigError: the user's value is no mode, or asks for the cloud without a key.
    """
    if SWANLAB not in loggers:
        return
    asked = os.environ.get(MODE)
    if asked is not None and asked not in (*CLOUD, LOCAL, "offline", "disabled"):
        raise fail(MODE, asked, "cloud, local, offline or disabled")
    keyed = has_key()
    mode = os.environ.setdefault(MODE, CLOUD[0] if keyed else LOCAL)
    if mode in CLOUD and not keyed:
        raise fail(MODE, mode, "a key in SWANLAB_API_KEY or from `swanlab login`; without one: local or offline")


def has_key() -> bool:
    """Whether SwanLab finds the user's key, in the environment or from ``swanlab login``."""
    from swanlab import Settings

    return bool(Settings().api_key)


def open_run(config: DictConfig, run: str | None) -> dict[str, Any] | None:
    """Prepare the trackers for the run of id ``run``; returns SwanLab's config table, None if it is not asked for.

    SwanLab and wandb get the id, so a resumed run continues its curves. A run that went back to an earlier step has another
    id, because trackers drop what is logged again for a step that they have. What the user has set stays:
    ``SWANLAB_RUN_ID``, ``WANDB_RUN_ID``.

    Args:
        run: None: they draw one.
    """
    for tracker in ("SWANLAB", "WANDB"):
        set_variable(f"{tracker}_RUN_ID", run)
        set_variable(f"{tracker}_RESUME", run and "allow")
    if SWANLAB not in config.trainer.logger:
        return None
    swanlab_board.install()
    return config_table(config)


def config_table(config: DictConfig) -> dict[str, Any]:
    """What tells this run from others, a column a key: arm, commit, versions, recipe's keys, verl's main ones, overrides.

    Values are short; ``config.yaml`` in the run directory has the whole configuration.
    """
    table: dict[str, Any] = {
        "arm": str(Arm.PR if config[ROOT].enable else Arm.NOPR),
        "commit": commit_of(Path(__file__).parent),
        "verl": version("verl"),
        "vllm": installed_pair().vllm,
    }
    for key in (*_SHOWN, *_overridden()):
        value = OmegaConf.select(config, key)
        table |= {key: value} if not isinstance(value, DictConfig) else dict(leaves(value, f"{key}."))
    table |= dict(leaves(config[ROOT], f"{ROOT}."))
    return {key: _short(value) for key, value in table.items() if value is not None}


def commit_of(directory: Path) -> str | None:
    """The git commit checked out around ``directory``, with ``-dirty`` if files have changed since; None without git."""
    command = ["git", "-C", str(directory), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _overridden() -> Iterator[str]:
    """Keys that the command line sets."""
    if HydraConfig.initialized():
        for override in HydraConfig.get().overrides.task:
            key = override.partition("=")[0].lstrip("+~")
            if "@" not in key and "/" not in key:
                yield key


def _short(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2 - 1]} … {text[-LONGEST // 2 + 2 :]}"
