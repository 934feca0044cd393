"""Paths of a run: written in full, so that they mean the same in every process, and short enough for the sockets in them.

Ray's processes have the working directory of whoever started the cluster, which need not be the user's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.keys import fail, leaves

_PATHS = re.compile(r"(^|_)(path|dir|files?)$")
"""last parts of the keys that hold paths"""
_WRITTEN = (
    "default_local_dir",
    "rollout_data_dir",
    "validation_data_dir",
    "dump_dir",
    "save_path",
    "timeline_json_file",
)
"""those of what a run writes; other files exist, or are no files: names of the hub, of classes, of verl's own files"""
_SOCKET_BYTES = 107
"""longest path of a Unix socket on Linux"""
_SOCKET = "session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""Ray's longest, in its temporary directory"""


def write_in_full(config: DictConfig) -> None:
    """Make the relative paths of ``config``, which is resolved, absolute in place."""
    values: Any = OmegaConf.to_container(config)
    for key, value in leaves(values):
        name = key.rpartition(".")[2]
        if not (_PATHS.search(name) or name in _WRITTEN):
            continue
        given = value if isinstance(value, list) else [value]
        full = [_full(each, written=name in _WRITTEN) for each in given]
        if full != given:
            OmegaConf.update(config, key, full if isinstance(value, list) else full[0])


def _full(path: Any, *, written: bool) -> Any:
    local = isinstance(path, str) and path and "://" not in path
    return os.path.abspath(path) if local and (written or os.path.exists(path)) else path


def check_sockets(config: DictConfig) -> None:
    """Raise ``ConfigError`` where the run would start a Ray whose sockets have too long a path."""
    options = config.ray_kwargs.get("ray_init") or {}
    if (options.get("address") or os.environ.get("RAY_ADDRESS") or "local") != "local":
        return
    # As Ray chooses its directory.
    keys = {"ray_kwargs.ray_init._temp_dir": options.get("_temp_dir")}
    keys |= {name: os.environ.get(name) for name in ("RAY_TMPDIR", "TMPDIR")}
    key, folder = next(((key, folder) for key, folder in keys.items() if folder), ("TMPDIR", "/tmp"))
    socket = Path(folder, "" if folder == options.get("_temp_dir") else "ray", _SOCKET.format(pid=os.getpid()))
    if (over := len(os.fsencode(socket)) - _SOCKET_BYTES) > 0:
        most = len(os.fsencode(folder)) - over
        raise fail(key, folder, f"a path of at most {most} bytes, or Ray's sockets there have names that are too long")
