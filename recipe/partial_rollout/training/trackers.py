"""Names a run to the trackers, and has SwanLab log to the cloud or to this machine. Refuses a tracker without a login.

``SWANLAB_MODE`` is the one variable: ``cloud`` (or ``online``), ``local``, ``offline`` (files for ``swanlab sync``) or
``disabled``. Where it is not set, a user with a key gets the cloud, and anybody else the local board.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from shlex import quote

from recipe.partial_rollout.config.keys import fail, refusing
from verl_ext import swanlab_board

SWANLAB, WANDB = "swanlab", "wandb"
MODE, LOG_DIR = "SWANLAB_MODE", "SWANLAB_LOG_DIR"
CLOUD, LOCAL = ("cloud", "online"), "local"

_SET: dict[str, str] = {}
"""variables that this process has set"""


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable, or unset it (``value`` None), unless the user has set it.

    A value that an earlier run of the same hydra multirun has set is replaced.
    """
    # A value that this process has not set is the user's.
    if os.environ.get(name) not in (None, _SET.get(name)):
        return
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = _SET[name] = value


def check_trackers(loggers: Iterable[str]) -> None:
    """Check that verl's trackers can log, which it would find out with its engines up. Choose SwanLab's mode.

    Raises:
        ConfigError: a tracker lacks a login, or SwanLab's mode is none.
    """
    if WANDB in loggers:
        _check_wandb()
    if SWANLAB in loggers:
        _choose_mode()


def _check_wandb() -> None:
    if os.environ.get("WANDB_API_KEY"):
        return
    import wandb  # pyright: ignore[reportMissingImports]

    words = "another value, or a login: WANDB_API_KEY or `wandb login`; without one: WANDB_MODE=offline"
    with refusing("trainer.logger", WANDB, words):
        online = wandb.setup().settings.mode not in ("offline", "disabled", "dryrun")
        # An older wandb cannot answer without a prompt.
        with suppress(TypeError):
            if online and not wandb.login(prompt=False, verify=False):
                raise RuntimeError("no key is configured")
        # It reads its variables once, and the run's id is not among them yet.
        wandb.teardown()


def _choose_mode() -> None:
    """Set ``SWANLAB_MODE`` for verl, which reads it, unless the user has.

    Raises:
        ConfigError: the user's value is no mode, or asks for the cloud without a key.
    """
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
    """Prepare the trackers: set the variables from which SwanLab and wandb read the run id, and patch SwanLab's board.

    With the same id a resumed run continues its curves. A run that went back to an earlier step has a new id, because a
    tracker drops values for a step that it already has. ``SWANLAB_RUN_ID`` and ``WANDB_RUN_ID`` of the user are kept.

    Args:
        run: the id; None: the trackers choose one.
    """
    for tracker in ("SWANLAB", "WANDB"):
        set_variable(f"{tracker}_RUN_ID", run)
        set_variable(f"{tracker}_RESUME", run and "allow")
    if SWANLAB in loggers:
        swanlab_board.install()
        if os.environ.get(MODE, CLOUD[0]) not in CLOUD:
            # With a key verl logs in to the cloud whatever the mode, and this machine may not reach it.
            os.environ.pop("SWANLAB_API_KEY", None)


def addresses(loggers: Iterable[str]) -> list[str]:
    """Return a line for each tracker of the present run: where to see its curves."""
    lines = []
    if SWANLAB in loggers and (mode := os.environ[MODE]) in (*CLOUD, LOCAL):
        import swanlab

        where = swanlab.get_run().url if mode in CLOUD else f"swanlab watch {quote(os.environ[LOG_DIR])}"
        lines.append(f"SwanLab: {where}")
    if WANDB in loggers:
        import wandb  # pyright: ignore[reportMissingImports]

        # Offline it has none.
        if wandb.run and wandb.run.url:
            lines.append(f"wandb: {wandb.run.url}")
    return lines
