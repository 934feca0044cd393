"""The workspace of the chaos runs: effects of its commands happen once, however its worker dies."""

import asyncio
import signal
import subprocess
import sys
import time

from tests.chaos.workspace import Workspace

CONVERSATIONS, CALLS = 4, 6


def live(root, kill_after=()):
    """Run all conversations; one worker after another is killed once the journal has so many results."""
    root.mkdir()
    command = [sys.executable, "-m", "tests.unit.workspace_life", root / "root", root / "journal"]
    for results in (*kill_after, None):
        worker = subprocess.Popen([*command, str(CONVERSATIONS), str(CALLS)], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        try:
            while results is not None and worker.poll() is None and journaled(root) < results:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            if results is not None:
                worker.kill()
            _, error = worker.communicate(timeout=120)
        finally:
            worker.kill()
        assert worker.returncode == (0 if results is None else -signal.SIGKILL), error


def journaled(root):
    journal = root / "journal"
    return journal.read_text().count('"text"') if journal.exists() else 0


def contents(root):
    """By conversation and file."""
    return {path.relative_to(root): path.read_text() for path in (root / "root" / "live").glob("*/files/*")}


def test_effects_of_a_killed_worker_are_neither_lost_nor_doubled(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    live(undisturbed)
    live(killed, kill_after=(5, 12))
    logs = [text for path, text in contents(killed).items() if path.name == "log"]
    assert [log.split() for log in logs] == [[str(n) for n in range(CALLS)]] * CONVERSATIONS
    assert contents(killed) == contents(undisturbed)
    assert journaled(killed) == CONVERSATIONS * CALLS and '"error"' not in (killed / "journal").read_text()


def run(tool, command, **options):
    response, _, _ = asyncio.run(tool.execute("i0", {"command": command}, **options))
    return response.text


def test_status_answers_for_the_last_call_alone(tmp_path):
    tool = Workspace({"root": str(tmp_path)}, None)
    assert run(tool, "echo one > a; cat a", call_id="0/1#0/0") == "one"
    assert (tool.status("0/1#0/0"), tool.status("0/1#0/1")) == ("one", None)
    run(tool, "echo two", call_id="0/1#0/1")
    assert (tool.status("0/1#0/0"), tool.status("0/1#0/1")) == (None, "two")


def test_equal_content_has_one_snapshot_and_comes_back_as_it_was(tmp_path):
    tool = Workspace({"root": str(tmp_path)}, None)
    run(tool, "echo x > a; echo z > d", call_id="c/0")
    first = tool.snapshot("c")
    assert tool.snapshot("c") == first
    run(tool, "rm a; echo y > b", call_id="c/1")
    assert tool.snapshot("c") != first
    tool.restore("c", first)
    assert tool.status("c/0") == "" and run(tool, "cat a; ls", call_id="c/1") == "x\na\nd"
    tool.restore("c", None)
    assert run(tool, "ls", call_id="c/0") == ""


def test_failure_is_told_to_the_model_and_nothing_outlives_its_call(tmp_path):
    tool = Workspace({"root": str(tmp_path), "timeout_s": 0.5}, None)
    assert run(tool, "echo a; exit 3", call_id="c/0") == "a\n(exit status 3)"
    assert run(tool, "(sleep 1.5; touch late) & sleep 60", call_id="c/1") == "(no end within 0.5 s)"
    time.sleep(2)
    assert run(tool, "ls", call_id="c/2") == ""
