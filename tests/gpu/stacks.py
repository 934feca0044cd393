"""Stacks of a training's driver and engine, sampled every 20 ms by py-spy."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import psutil

_RATE = "50"
"""samples a second"""
_ENGINE = ("VLLMServer", "VLLMHttpServer", "VLLM::")
"""in the command line of the processes that serve and run the engine"""
_SHOWN = 25
_END_S = 20.0


class Sampler:
    """Writes a summary of the stacks to ``path`` when it is stopped."""

    def __init__(self, path: Path) -> None:
        self._path, self._folder = path, Path(tempfile.mkdtemp(prefix="stacks_"))
        self._sampled: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}

    def attach(self, driver: int) -> None:
        """Sample ``driver``, and those of its engine's processes that have begun."""
        try:
            tree = psutil.Process(driver).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self._sample(driver, "driver")
        for process in tree:
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if any(name in title for name in _ENGINE):
                self._sample(process.pid, title.split(" ")[0])

    def _sample(self, pid: int, title: str) -> None:
        if pid not in self._sampled:
            spy = shutil.which("py-spy") or "py-spy"
            command = [spy, "record", "--rate", _RATE, "--format", "raw", "--nonblocking"]
            command += ["--output", str(self._folder / str(pid)), "--pid", str(pid), "--duration", "unlimited"]
            spying = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self._sampled[pid] = title, spying

    def stop(self) -> None:
        """End sampling, and write the summary."""
        for _, spy in self._sampled.values():
            spy.send_signal(signal.SIGINT)
        lines = []
        for pid, (title, spy) in self._sampled.items():
            try:
                spy.wait(_END_S)
            except subprocess.TimeoutExpired:
                spy.kill()
            raw = self._folder / str(pid)
            lines += [f"== {title}", *(summary(raw.read_text()) if raw.exists() else ["no sample"])]
        self._path.write_text("\n".join(lines) + "\n")


def summary(raw: str) -> list[str]:
    """The functions in which most samples lie, themselves and with what they call, as shares of all samples.

    Args:
        raw: of py-spy, lines ``frame;frame;frame count``.
    """
    alone, within, total = Counter[str](), Counter[str](), 0
    # A last line without its end was cut off.
    for line in raw.splitlines(keepends=True):
        stack, _, count = line.rpartition(" ")
        if not count.endswith("\n"):
            continue
        frames = stack.split(";")
        alone[frames[-1]] += int(count)
        within.update(dict.fromkeys(frames, int(count)))
        total += int(count)
    lines = [f"{total} samples"]
    total = max(total, 1)
    for what, counted in (("in", alone), ("below", within)):
        lines += [f"{what:<5} {count / total:6.1%} {frame}" for frame, count in counted.most_common(_SHOWN)]
    return lines
