"""Patches for verl's v1 trainers: verl's own command can train the recipe, and TransferQueue has a deadline.

``get_trainer_cls`` knows only classes whose modules have been imported, and verl's command imports no module of a
recipe. Here it imports the recipe's module when the recipe's trainer is asked for. Hydra learns the recipe's keys
before verl's command composes its config. These patches may go when verl's command imports the modules that a config
names. They are made in every process that imports verl, and do nothing if another package hides the recipe.

TransferQueue's clients wait for its controller without end, even after its death. Here they have a deadline. That patch
may go when they have one of their own.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator
from typing import Any

from omegaconf import OmegaConf

from verl_ext.command import OURS, imported_here
from verl_ext.guard import RECIPE, around, enter_recipe, in_recipe, require

_MODE = "partial_rollout"
"""``trainer.v1.trainer_mode``, and the section of the recipe's keys"""
_REGISTERS = "recipe.partial_rollout.verl_command"
"""module that registers the recipe's trainer"""
CONTROLLER_S = 200
"""seconds for an answer of TransferQueue's controller, as many as TransferQueue gives its own storage"""


def know_recipe(module: Any) -> None:
    """Let ``module``, verl's ``trainer_base``, find the recipe's trainer by its name."""

    @around(module, "get_trainer_cls")
    def get_trainer_cls(verls: Any, name: str) -> Any:
        if name == _MODE and imported_here() == OURS:
            importlib.import_module(_REGISTERS)
        return verls(name)


def know_keys(module: Any) -> None:
    """Register the recipe's keys with hydra.

    ``module`` is not used: verl's command imports it before it composes a config.
    """
    if imported_here() == OURS:
        importlib.import_module("recipe.partial_rollout.config.settings").register_keys()


def mark_workers(module: Any) -> None:
    """Mark Ray's workers of a recipe's run as the recipe's; ``module`` is ``verl.trainer.constants_ppo``."""

    @around(module, "get_ppo_ray_runtime_env")
    def get_ppo_ray_runtime_env(verls: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        environment = verls(*args, **kwargs)
        if in_recipe():
            environment["env_vars"][RECIPE] = "1"
        return environment


def keep_to_recipe(module: Any) -> None:
    """Let verl's commands refuse a config of the recipe that another trainer would train, ignoring the recipe's keys.

    If the recipe's own v1 trainer is to train it, mark this process as the recipe's. All of verl's commands call
    ``auto_set_device`` of ``module`` (``verl.utils.device``) first; the recipe's commands do not.
    """

    @around(module, "auto_set_device")
    def auto_set_device(verls: Any, config: Any) -> None:
        section: Any = OmegaConf.select(config, _MODE)
        if OmegaConf.is_dict(section) and imported_here() == OURS:
            use_v1, mode = (OmegaConf.select(config, f"trainer.{key}") for key in ("use_v1", "v1.trainer_mode"))
            if use_v1 and mode == _MODE:
                enter_recipe()
            elif section.get("enable"):
                raise ValueError(
                    f"trainer.use_v1={use_v1} trainer.v1.trainer_mode={mode}: must be True and {_MODE} by verl's own "
                    "command, if partial_rollout.enable=True; partial-rollout train takes use_v1=False too"
                )
        verls(config)


def bound_controller(module: Any) -> None:
    """Let clients of ``module``, ``transfer_queue.client``, give up on the controller after ``CONTROLLER_S`` seconds.

    Raises:
        UnsupportedVersionError: another release is installed; verl takes any from 0.1.10 on.
    """
    import zmq

    require("TransferQueue", "0.1.11", "v1.bound_controller")

    class BoundPool(module.ZMQSocketPool):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{"timeout": CONTROLLER_S, **kwargs})

        @contextlib.asynccontextmanager
        async def alease(self, peer: Any) -> AsyncIterator[Any]:
            try:
                async with super().alease(peer) as socket:
                    yield socket
            except Exception as error:
                if not isinstance(error, zmq.Again) and not isinstance(error.__cause__, zmq.Again):
                    raise
                raise TimeoutError(
                    f"TransferQueue's controller gave no answer within {CONTROLLER_S} s: it or its node has died; "
                    f"start the run again to resume from its last checkpoint"
                ) from error

    module.ZMQSocketPool = BoundPool
