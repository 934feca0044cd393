"""Ctrl-C and SIGTERM are obeyed at a safe point."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.waits import beside


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_waits_for_the_check_and_a_sigterm_that_follows_at_once_belongs_to_it(number, code):
    """``scancel`` with ``proctrack/linuxproc`` signals the batch script and the trainer, and the script passes it on."""
    stop, before = StopSignals(), signal.getsignal(number)
    with stop.caught():
        stop.check()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopTraining) as raised:
            stop.check()
    assert raised.value.exit_code == code and signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("first", "second", "later_s"),
    [(signal.SIGTERM, signal.SIGTERM, 6), (signal.SIGINT, signal.SIGINT, 0), (signal.SIGTERM, signal.SIGINT, 0)],
)
def test_second_order_ends_the_process_at_once(monkeypatch, first, second, later_s):
    now = time.monotonic()
    stop = StopSignals()
    with stop.caught():
        os.kill(os.getpid(), first)
        monkeypatch.setattr(time, "monotonic", lambda: now + later_s)
        with pytest.raises(SystemExit) as raised:
            os.kill(os.getpid(), second)
    assert raised.value.code == 128 + second


async def test_wait_ends_with_the_signal():
    stop = StopSignals()

    with stop.caught(), pytest.raises(StopTraining, match="SIGTERM"):
        assert await beside(asyncio.sleep(0, 7), stop.watch()) == 7
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
        await beside(asyncio.sleep(30), stop.watch())


LOADING = """
import time
from torchdata.stateful_dataloader import StatefulDataLoader
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining

loader = StatefulDataLoader(list(range(99)), batch_size=1, num_workers=1)
stop = StopSignals()
with stop.caught():
    batches = iter(loader)
    next(batches)
    print("loading", flush=True)
    try:
        for _ in range(300):
            time.sleep(0.1)
            stop.check()
    except StopTraining:
        while batches._workers[0].is_alive():
            time.sleep(0.1)
        print("saved", len(loader.state_dict()) > 0)
"""


def test_signal_to_the_whole_process_group_does_not_fail_the_save_when_the_loaders_worker_dies():
    """``ray job stop`` signals the driver and each of its children."""
    command = [sys.executable, "-W", "ignore", "-c", LOADING]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        os.killpg(process.pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and output == "saved True\n", errors[-2000:]
