"""What a run leaves behind for the report: ``run.json`` and ``trace.jsonl`` beside verl's ``metrics.jsonl``.

``trace.jsonl`` has one JSON object a line, whose ``event`` is ``probe``, ``round`` or ``phase``; times are unix seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipe.partial_rollout.llm_client import EngineCall


class RunTrace:
    """Appends to the trace of one run directory.

    Args:
        directory: of the run; created if missing. A trace of an earlier run in it is started over.
        replicas: server ids, in replica order; calls are filed under their index.
    """

    def __init__(self, directory: Path, replicas: list[str], run: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._run_file = directory / "run.json"
        self._run = {**run, "complete": False}
        self._index = {address: i for i, address in enumerate(replicas)}
        self._write_run()
        self._file = (directory / "trace.jsonl").open("w", buffering=1)

    def complete(self) -> None:
        """The training reached its last step."""
        self._run["complete"] = True
        self._write_run()

    def probe(self, start: float, end: float, tokens: int, concurrency: int) -> None:
        """The engine was kept at ``concurrency`` running samples."""
        rate = tokens / (end - start)
        self._add("probe", start=start, end=end, tokens=tokens, tokens_per_s=rate, concurrency=concurrency)

    def round(self, *, calls: tuple[EngineCall, ...], **fields: Any) -> None:
        """One rollout phase; ``fields`` as the report reads them."""
        rows = [[self._index[c.replica], c.start, c.end, c.tokens, c.version] for c in calls]
        self._add("round", calls=rows, **fields)

    def phase(self, name: str, step: int, start: float, end: float) -> None:
        """Something else than a rollout took place: ``train`` or ``validate``."""
        self._add("phase", name=name, step=step, start=start, end=end)

    def _add(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")

    def _write_run(self) -> None:
        self._run_file.write_text(json.dumps(self._run, indent=2) + "\n")
