"""Names a run to the trackers, and has SwanLab log to the cloud or to this machine.

``SWANLAB_MODE`` is the one variable: ``cloud`` (or ``online``), ``local``, ``offline`` (files for ``swanlab sync``) or
``disabled``. Where it is not set, a user with a key gets the cloud, and anybody else the local board.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from shlex import quote

from recipe.partial_rollout.config.keys import fail
from verl_ext import swanlab_board

SWANLAB = "swanlab"
MODE, LOG_DIR = "SWANLAB_MODE", "SWANLAB_LOG_DIR"
CLOUD, LOCAL = ("cloud", "online"), "local"

_SET: dict[str, str] = {}
"""variables that this process has set"""


def set_variable(name: str, value: str | None) -> None:
    """Set a variable of the environment, or unset it, unless the user has set it; each run of a multirun sets its own."""
    # A value that this process has not set is the user's.
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
    chosen = os.environ.get(MODE)
    if chosen is not None and chosen not in (*CLOUD, LOCAL, "offline", "disabled"):
        raise fail(MODE, chosen, "cloud, local, offline or disabled")
    from swanlab import Settings

    # In the environment or from ``swanlab login``.
    keyed = bool(Settings().api_key)
    mode = os.environ.setdefault(MODE, CLOUD[0] if keyed else LOCAL)
    if mode in CLOUD and not keyed:
        raise fail(MODE, mode, "a key in SWANLAB_API_KEY or from `swanlab login`; without one: local or offline")


def open_run(loggers: Iterable[str], run: str | None) -> None:
    """Prepare the trackers for the run of id ``run``.

    SwanLab and wandb get the id, so a resumed run continues its curves. A run that went back to an earlier step has another
    id, because trackers drop what is logged again for a step that they have. What the user has set stays:
    ``SWANLAB_RUN_ID``, ``WANDB_RUN_ID``.

    Args:
        run: None: they draw one.
    """
    for tracker in ("SWANLAB", "WANDB"):
        set_variable(f"{tracker}_RUN_ID", run)
        set_variable(f"{tracker}_RESUME", run and "allow")
    if SWANLAB in loggers:
        swanlab_board.install()


def addresses(loggers: Iterable[str]) -> list[str]:
    """Return a line for each tracker of the present run: where to see its curves."""
    lines = []
    if SWANLAB in loggers and (mode := os.environ[MODE]) in (*CLOUD, LOCAL):
        import swanlab

        where = swanlab.get_run().url if mode in CLOUD else f"swanlab watch {quote(os.environ[LOG_DIR])}"
        lines.append(f"SwanLab: {where}")
    if "wandb" in loggers:
        import wandb  # pyright: ignore[reportMissingImports]

        # Offline it has none.
        if wandb.run and wandb.run.url:
            lines.append(f"wandb: {wandb.run.url}")
    return lines
