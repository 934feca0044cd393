"""Patch: swanlab's local board groups charts into sections, shows a resumed run as one run, and survives a nan.

The cloud makes a section of what stands before a key's first slash, and continues the run that ``SWANLAB_RUN_ID``
names. The local board (``SWANLAB_MODE=local``) puts every chart into one section, in the order of their names' first
appearance, and makes a resumed run a second one beside the first. Here it does as the cloud does. Once a metric has
been nan or inf, its page on the local board answers with error 500 for ever. Here such values are left out; the printed
line of the step names them. The patch may go with the local board.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from verl_ext.guard import around, require, when_imported

SWANLAB = "0.10.3"
_DEFAULT = "default"
"""section of keys without a slash, and swanlab's own for all of them"""


def section_of(key: str) -> str:
    """The section of a metric's chart.

    >>> section_of("timing_s/step"), section_of("epoch")
    ('timing_s', 'default')
    """
    return key.split("/", 1)[0] if "/" in key else _DEFAULT


def install() -> None:
    """Patch the local board in this process; before ``swanlab.init``. Safe to call twice."""
    require("swanlab", SWANLAB, "swanlab_board")
    when_imported("swanlab.deprecated.local", _patch)


def _patch(module: Any) -> None:
    @around(module._ColumnInfo, "__init__")
    def describe_in_section(swanlabs: Any, self: Any, key: str, kid: str, chart_type: Any) -> None:
        swanlabs(self, key, kid, chart_type)
        self.section_name = section_of(key)
        # None: after the sections that exist.
        self.section_sort = None

    @around(module.LocalCallbacker, "on_run_initialized")
    def begin_or_continue(swanlabs: Any, self: Any, run_dir: Path, path: str, settings: Any, *args: Any, **kwargs: Any):
        swanlabs(self, run_dir, path, settings, *args, **kwargs)
        # The board's table looks for a metric in the folder of its rank, which counts from 0.
        self._next_kid = 0
        _continue_earlier(self, settings.run.id, module._MetricContext)

    @around(module.LocalCallbacker, "_handle_metric")
    def handle_finite(swanlabs: Any, self: Any, record: Any, scalar: bool) -> None:
        if not scalar or math.isfinite(record.value.number):
            swanlabs(self, record, scalar)


def _continue_earlier(callback: Any, run_id: str, context: Any) -> None:
    """Make ``callback`` log into the board's earlier run of the same id, if there is one; its files move along."""
    from swanboard.db.models import Experiment

    new = callback.exp
    ours = [each for each in Experiment.select() if each.run_id.endswith(f"-{run_id}") and each.id != new.id]
    if not ours:
        return
    (earlier,) = ours
    new.delete_instance()
    old_dir = callback._run_dir.parent / earlier.run_id
    for part in ("logs", "media"):
        if (old_dir / part).is_dir():
            shutil.copytree(old_dir / part, callback._run_dir / part, symlinks=True, dirs_exist_ok=True)
    earlier.run_id, earlier.status, earlier.finish_time = callback._run_dir.name, 0, None
    earlier.save()
    callback.exp = earlier
    for tag in earlier.tags:
        known = context(tag.name, tag.folder, scalar=tag.type == "line")
        for file in sorted((callback._run_dir / "logs" / tag.folder).glob("*.log"), key=lambda file: int(file.stem)):
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                known.add(entry["index"], entry["data"], entry["create_time"], entry.get("more"))
        callback._metrics[tag.name] = known
        callback._created_columns.add(tag.name)
    callback._next_kid = len(callback._metrics)
