"""Ctrl-C, SIGTERM and SIGHUP end a start in one line, and are obeyed by a training at a safe point."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_waits_for_the_check_and_a_sigterm_at_once_belongs_to_it(number, code):
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
    [
        (signal.SIGTERM, signal.SIGTERM, 6),
        (signal.SIGHUP, signal.SIGHUP, 6),
        (signal.SIGINT, signal.SIGINT, 0),
        (signal.SIGTERM, signal.SIGINT, 0),
    ],
)
def test_second_order_ends_the_process_at_once(monkeypatch, first, second, later_s):
    now = time.monotonic()
    stop = StopSignals()
    with stop.caught():
        os.kill(os.getpid(), first)
        monkeypatch.setattr(time, "monotonic", lambda: now + later_s)
        with pytest.raises(KeyboardInterrupt, match=second.name):
            os.kill(os.getpid(), second)
    stop._too_late.cancel()


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


def test_signal_to_the_whole_process_group_does_not_fail_the_save():
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


def test_handlers_of_libraries_and_nohup_change_nothing_at_the_start():
    """``tests/integration/test_stop.py`` has Ray's own handlers, and the one line."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt, match="SIGINT"), StopSignals().in_force():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("starts", [True, False])
def test_pool_ends_its_processes_as_ever(starts, capfd):
    stop = StopSignals()
    with stop.in_force() if starts else stop.caught():
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=lambda: (theirs.send("runs"), time.sleep(60)))
        child.start()
        # Python forgets a signal that comes while it forks.
        assert ours.recv() == "runs"
        os.kill(child.pid, signal.SIGINT)
        child.terminate()
        child.join(20)
    assert child.exitcode == -signal.SIGTERM and capfd.readouterr() == ("", "")


def test_signal_that_a_library_swallows_ends_the_run_before_training():
    stop = StopSignals()
    with stop.in_force():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopTraining, match="SIGTERM"), stop.caught():
            raise AssertionError("it began")
