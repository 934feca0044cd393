"""What a run leaves behind for the report: ``run.json`` and ``trace.jsonl`` beside verl's ``metrics.jsonl``.

``trace.jsonl`` has one JSON object a line, whose ``event`` is ``probe``, ``begin``, ``round``,
``phase`` or ``resumed``; times are unix seconds.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe.partial_rollout.records.round import Round


class RunTrace:
    """Appends to the trace of one run directory.

    Args:
        directory: of the run; created if missing.
        replicas: server ids, in replica order; calls are filed under their index.
        resumed_step: the step that the run goes on from; events of later steps are undone. 0: all of them.
        append: to the trace of an earlier run in the directory, instead of starting it over.
    """

    def __init__(
        self,
        directory: Path,
        replicas: list[str],
        run: dict[str, Any],
        resumed_step: int = 0,
        *,
        append: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._run_file = directory / "run.json"
        self._run = {**run, "complete": False}
        self._index: dict[str | int, int] = {address: i for i, address in enumerate(replicas)}
        self._write_run()
        path = directory / "trace.jsonl"
        goes_on = append and path.exists()
        cut_off = goes_on and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("a" if append else "w", buffering=1)
        if cut_off:
            # What a killed process left of its last line must not swallow the next one.
            self._file.write("\n")
        if goes_on:
            self._add("resumed", step=resumed_step)

    def use_replicas(self, replicas: list[str]) -> None:
        """The replicas are these from here on, in replica order."""
        self._index.update({address: i for i, address in enumerate(replicas)})

    def complete(self) -> None:
        """The training reached its last step."""
        self._run["complete"] = True
        self._write_run()

    def probe(self, start: float, end: float, tokens: int, concurrency: int) -> None:
        """The engine was kept at ``concurrency`` running samples."""
        rate = tokens / (end - start)
        self._add("probe", start=start, end=end, tokens=tokens, tokens_per_s=rate, concurrency=concurrency)

    def begin(self, step: int) -> None:
        """The rollout of ``step`` begins."""
        self._add("begin", step=step, start=time.time())

    def round(self, round_: Round) -> None:
        """One rollout phase and what it trains; its calls are of replicas that the trace knows."""
        calls = tuple(replace(call, replica=self._index[call.replica]) for call in round_.phase.calls)
        self._add("round", **replace(round_, phase=replace(round_.phase, calls=calls)).to_json())

    def phase(self, name: str, step: int, start: float, end: float) -> None:
        """Something else than a rollout took place: ``train`` or ``validate``."""
        self._add("phase", name=name, step=step, start=start, end=end)

    def sync(self) -> None:
        """Return once every line is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def _add(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")

    def _write_run(self) -> None:
        self._run_file.write_text(json.dumps(self._run, indent=2) + "\n")
