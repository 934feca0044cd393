"""Patches for verl's v1 trainers: a name in their registry, a deadline of TransferQueue.

``get_trainer_cls`` knows the classes whose modules somebody has imported, and verl's command imports none of a recipe's.
So it imports the recipe's here when it is asked for it, and hydra learns the recipe's keys before that command
composes its config. They may go when verl's command imports what a config names. Where another package hides the recipe,
they do nothing: they are there for whatever imports verl.

TransferQueue's clients wait for its controller without end, whoever has died. It may go when they have a deadline.
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
"""seconds for an answer of TransferQueue's controller; what it gives its own storage"""


def know_recipe(module: Any) -> None:
    """``module``, verl's ``trainer_base``, finds the recipe's trainer by its name."""

    @around(module, "get_trainer_cls")
    def get_trainer_cls(verls: Any, name: str) -> Any:
        if name == _MODE and imported_here() == OURS:
            importlib.import_module(_REGISTERS)
        return verls(name)


def know_keys(module: Any) -> None:
    """Hydra finds the recipe's keys; ``module`` is one that verl's command imports first."""
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
    """verl's commands refuse a config of the recipe that another trainer would train, without a word of its keys.

    All call ``auto_set_device`` of ``module`` (``verl.utils.device``) first, and the recipe's commands do not.
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
                    f"trainer.use_v1={use_v1} trainer.v1.trainer_mode={mode}: True and {_MODE} by verl's own command, with "
                    "partial_rollout.enable=True; partial-rollout train takes use_v1=False too"
                )
        verls(config)


def bound_controller(module: Any) -> None:
    """Clients of ``module``, ``transfer_queue.client``, give up on a controller that does not answer.

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
                    f"TransferQueue's controller gave no answer within {CONTROLLER_S} s: it has died, or its node; "
                    f"the run goes on from its last checkpoint"
                ) from error

    module.ZMQSocketPool = BoundPool
