"""``tests.chaos`` inflicts faults, resumes, and accounts for what was decoded; nightly e2e has real trainings."""

import json
import sys
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.records.calls import EngineCall, RolloutPhase
from recipe.partial_rollout.records.jsonl import Resumed
from recipe.partial_rollout.records.trace import Begin, RoundRecord, to_json
from recipe.partial_rollout.records.trained_group import TrainedGroup
from tests.chaos import __main__ as command
from tests.chaos import victim
from tests.chaos.faults import Kind, Outcome, step_ends
from tests.chaos.survival import survival

TRAINING = """#!{python}
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("Training Progress", *sys.argv[3:], flush=True)
time.sleep(600)
"""


def test_kill_ends_every_process_that_the_training_started(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(TRAINING.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(victim, "sys", SimpleNamespace(executable=str(script)))
    training = victim.Victim(["--config-name=c", "a=1"], tmp_path / "log")
    training.wait_for("Training Progress", 60)
    assert training.terminal.split() == ["Training", "Progress", "--config-name=c", "a=1"]
    leader = training._process.pid
    assert len(victim.processes_of_session(leader)) == 2 and training.exit_code is None
    training.kill()
    assert victim.processes_of_session(leader) == [] and training.exit_code is not None


class Life:
    """Stands in for ``Victim``: a training that outlives its fault's delay, or ends with ``code``."""

    lives, codes = (), ()
    last_words = "its last words"

    def __init__(self, overrides, log, environment):
        self.overrides, self.exit_code, self.started = overrides, None, 0.0
        self.ends = Life.codes[len(Life.lives)]
        Life.lives += (self,)

    def wait_for(self, text, deadline_s):
        assert text == "Training Progress"

    def wait(self, deadline_s):
        self.exit_code = self.ends
        return self.ends

    def kill(self):
        self.exit_code = -9 if self.exit_code is None else self.exit_code
        return 100.0 + len(Life.lives)


@pytest.fixture
def chaos(tmp_path, monkeypatch):
    """``chaos(codes, violations)``: exit code, lives, and chaos.json of two kills; a life of code None is killed."""

    def run(codes, violations=()):
        Life.lives, Life.codes = (), codes
        found = SimpleNamespace(
            lost=len(violations), repeated=0, violations=list(violations), trained=[], sizes=None, undone=0, table=str
        )
        monkeypatch.setattr(command, "Victim", Life)
        monkeypatch.setattr(command, "audit", lambda run_dir: (found, None))
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "trace.jsonl").write_text("")
        code = command.main(["--out", str(tmp_path), "--faults", "2", "--kinds", "kill", "--", "quickstart_cpu", "a=1"])
        report = tmp_path / "chaos.json"
        return code, Life.lives, json.loads(report.read_text()) if report.exists() else None

    return run


def test_every_life_resumes_the_same_run_and_the_last_one_ends_by_itself(chaos, tmp_path):
    code, lives, report = chaos((None, None, 0))
    assert (
        code == 0 and [fault["kind"] for fault in report["faults"]] == ["kill", "kill"] and report["violations"] == []
    )
    assert len({tuple(life.overrides) for life in lives}) == 1
    assert {f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.resume_mode=auto", "trainer.save_freq=1"} < {
        *lives[0].overrides
    }


def test_training_that_ends_with_an_error_before_its_fault_is_an_error(chaos):
    assert chaos((None, 1))[0] == 1


def test_loss_is_an_error(chaos):
    code, _, report = chaos((None, None, 0), ["prompt 0/1 was lost: never trained"])
    assert code == 1 and report["lost"] == 1


def test_survival_estimates_the_round_that_a_kill_cut_off_and_counts_a_step_once(tmp_path):
    def round_of(step, start, tokens, trained):
        phase = RolloutPhase(start, start + 10.0, (EngineCall(0, start, start + 10.0, tokens, step - 1),))
        group = TrainedGroup(order=step, epoch=0, lengths=[trained], staleness=[0], segments=[1], tokens=trained)
        return RoundRecord(step, step - 1, phase, [group])

    events = [
        Begin(1, 0.0),
        round_of(1, 0.0, 100, 80),
        Begin(2, 20.0),
        round_of(2, 20.0, 100, 80),
        Begin(3, 40.0),
        # The kill at 45 s cuts a round of 10 tokens a second off; the next life does step 2 again.
        Resumed(1),
        Begin(2, 60.0),
        round_of(2, 60.0, 100, 90),
    ]
    lines = [json.dumps(to_json(event)) for event in events]
    (tmp_path / "trace.jsonl").write_text("\n".join([*lines[:5], '{"event": "rou', *lines[5:]]))
    found = survival(tmp_path, [45.0])
    assert (found.logged, found.estimated, found.trained) == (300, 50.0, 170)
    assert found.share == pytest.approx(170 / 350)


@pytest.mark.parametrize(
    ("ended", "silent_s", "wrong"),
    [
        (None, 20.0, None),
        ("training failed: worker w0 ...", 5.0, None),
        (None, 41.0, "stop: nothing for 41 s, where 40 s are allowed"),
        ("Segmentation fault", 5.0, "stop: the training ended without a cause"),
    ],
)
def test_fault_is_survived_in_time_or_ends_the_training_with_its_cause(ended, silent_s, wrong):
    assert Outcome(Kind.STOP, 0.0, ended, silent_s, allowed_s=40.0).violation == wrong


def test_steps_of_a_live_trace_are_its_weight_syncs_since_the_life_began(tmp_path):
    sync = '{"event": "phase", "name": "sync", "step": 1, "start": 1.0, "end": 2.5}'
    (tmp_path / "trace.jsonl").write_text(
        "\n".join([sync, '{"event": "begin"}', sync.replace("2.5", "7.5"), sync[:40]])
    )
    assert step_ends(tmp_path, since=3.0) == [7.5]
