"""A run that went back to an earlier step, or started over, goes on from where it is now: checkpoints, records, trackers.

Processes of either arm play their steps without engines; files, records and verl's file logger are real.
"""

import contextlib
import shutil
from unittest.mock import DEFAULT, Mock

import pytest
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from recipe.partial_rollout.checkpoint import run_checkpoints
from recipe.partial_rollout.checkpoint.manifest import TornCheckpointError, write_snapshot
from recipe.partial_rollout.checkpoint.run_checkpoints import TRACKER, RunCheckpoints
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.run_log import Arm, Checkpoint, Ended, RolloutPhase, Round
from recipe.partial_rollout.rollout.prompt_source import TrainingSteps
from recipe.partial_rollout.rollout.recorder import run_settings
from recipe.partial_rollout.rollout.replicas import ReplicaSlots
from recipe.partial_rollout.rollout.run_files import RunFiles
from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.run_record import load_run
from tests.unit.runs import large_group
from verl_ext.tracking_observer import observed_tracking

STEPS = 8


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(params=["PR", "noPR"])
def live(tmp_path, resolved_config, monkeypatch, request):
    """``live(who, until=, mode=)``: a process that trains to step ``until``, with a checkpoint at each even one."""
    partial = request.param == "PR"

    def save(files, weights):
        def write():
            actor = files.checkpoints.step_dir(files.completed_step) / "actor"
            actor.mkdir(parents=True)
            (actor / "weights").write_text(weights)

        parts = ("source", "manager") if partial else ()
        in_flight = {name: lambda path: write_snapshot(path, {}) for name in parts}
        files.checkpoints.save(files.completed_step, in_flight, write)

    def run(who, *, until, mode="auto", path=None, keep=None, directory=tmp_path / "run"):
        keys = "data.train_batch_size=1", f"trainer.default_local_dir={directory}", "actor_rollout_ref.rollout.n=8"
        config = resolved_config("quickstart_cpu", *keys, f"partial_rollout.enable={partial}")
        directory.mkdir(exist_ok=True)
        settings = PartialRolloutConfig.from_config(config)
        files = RunFiles(RunCheckpoints(directory, mode, path and str(path), keep))
        files.begin()
        slots = ReplicaSlots(4, given=True, kv_tokens=None, prompt=4, response=64)
        steps = TrainingSteps(STEPS, 1, STEPS)
        resumed = files.checkpoints.resumed_step
        facts = run_settings(settings, steps, slots, replicas=1, resumed=resumed, experiment="scripted", trainer="")
        log = files.open_log(facts, ["replica"])
        weights = files.checkpoints.chosen and (files.checkpoints.chosen / "actor" / "weights").read_text()
        with observed_tracking(lambda data, step: data, file=files.metrics):
            import verl.utils.tracking as tracking

            metrics = tracking.Tracking("project", "scripted", ["file"])
            for step in range(resumed + 1, until + 1):
                weights = f"{weights or ''}{who}"
                group = large_group(step - 1, staleness=0, birth=step - 1)
                phase = RolloutPhase(10.0 * step, 10.0 * step + 5, ())
                log.round(Round(step=step, phase=phase, trained=[group], admitted=[group.uid]))
                files.completed_step = step
                if step % 2 == 0:
                    save(files, weights)
                    log.add(Checkpoint(step), sync=True)
                figures = {"timing_s/step": 9.0, "timing_s/gen": 5.0, "critic/score/mean": float(ord(who))}
                metrics.log({"training/global_step": step, **figures}, step)
        if until == STEPS:
            log.add(Ended(STEPS, complete=True), sync=True)
        return files

    run.save = save
    return run


def trained_by(run_dir):
    """What the report shows of each step: the process whose reward it is; whoever ended on, a letter a step."""
    run = load_run(run_dir)
    assert not [warning for warning in run.warnings if "left out" in warning]
    return "".join(chr(int(step.metrics["critic/score/mean"])) for step in run.steps)


def saved_steps(run_dir):
    return sorted(int(path.name.rpartition("_")[2]) for path in run_dir.glob("global_step_*"))


def agrees(run_dir, files):
    """Tracker and audit agree with the process of ``files``, which has ended."""
    assert find_latest_ckpt_path(str(run_dir)) == str(run_dir / f"global_step_{files.completed_step // 2 * 2}")
    if load_run(run_dir).settings.arm is Arm.PR:
        assert audit(run_dir)[0].violations == []


def kept_aside(run_dir):
    """What a report shows of each superseded run: by whom its steps were trained, and which are saved."""
    return sorted((trained_by(log.parent), saved_steps(log.parent)) for log in run_dir.glob("superseded/*/run.jsonl"))


BACK, OVER, ANOTHER = "run/global_step_4", "disable", "other/global_step_4"
LEFT, BRANCH_OF_B = "run/superseded/*/global_step_6", ("aaaabbb", [2, 4, 6])
SCRIPTS = {
    "killed": ("a3 b5 c5 d8", [0, 2, 4, 4], "aabbdddd", "aaaa", []),
    "went back": (f"a8 b7:{BACK} c8", [0, 4, 6], "aaaabbcc", "abb", [("a" * 8, [6, 8])]),
    "went back, killed before a save": (f"a8 b5:{BACK} c8", [0, 4, 4], "aaaacccc", "abb", [("a" * 8, [6, 8])]),
    "started over": (f"a8 b3:{OVER} c8", [0, 0, 2], "bbcccccc", "abb", [("a" * 8, [2, 4, 6, 8])]),
    "started over before its end": (f"a6 b3:{OVER} c8", [0, 0, 2], "bbcccccc", "abb", [("a" * 6, [2, 4, 6])]),
    "returned": (f"a8 b7:{BACK} c7:{LEFT} d8", [0, 4, 6, 6], "a" * 6 + "dd", "abcd", [("a" * 8, [6, 8]), BRANCH_OF_B]),
    "finished": ("a8 b8", [0, 8], "a" * 8, "aa", []),
    # It has sealed none of its own, and takes the other run's history along.
    "from another run": (f"x4 b5:{ANOTHER} c8", [0, 4, 4], "oooocccc", "", [("xxxx", [2, 4])]),
}
"""processes (who, until which step: from where), resumed steps, who trained each step, the first ids for a tracker, kept
aside"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_run_continues_its_last_process_and_keeps_what_that_superseded(live, tmp_path, name):
    script, resumed, trained, ids, aside = SCRIPTS[name]
    run, other, processes = tmp_path / "run", tmp_path / "other", []
    live("o", until=6, directory=other)
    for word in script.split():
        who, how = word.partition(":")[::2]
        path = {"mode": "resume_path", "path": next(tmp_path.glob(how))} if "/" in how else {"mode": how or "auto"}
        processes.append(live(who[0], until=int(who[1:]), **path))
        agrees(run, processes[-1])
    assert [each.checkpoints.resumed_step for each in processes] == resumed
    assert trained_by(run) == trained and trained_by(other) == "oooooo" and load_run(run).complete
    known = [each.checkpoints.run for each in processes][: len(ids)]
    assert list(map(known.index, known)) == list(map(ids.index, ids))
    assert kept_aside(run) == aside, "each is a run that can be read and resumed"
    assert name == "finished" or (run / "global_step_8" / "actor" / "weights").read_text() == trained


def test_checkpoint_that_a_run_began_from_and_that_is_gone_is_named(live, tmp_path):
    other = tmp_path / "other"
    live("a", until=6, directory=other)
    live("b", until=5, mode="resume_path", path=other / "global_step_4")
    (other / "global_step_4").rename(tmp_path / "global_step_4")
    with pytest.raises(
        TornCheckpointError, match=r"run has no whole checkpoint: .* names step 4, which is gone; .*=resume_path"
    ):
        live("c", until=STEPS)
    live("d", until=STEPS, mode="resume_path", path=tmp_path / "global_step_4")
    assert saved_steps(tmp_path / "run") == [4, 6, 8], "the link to what is gone gives way"


@pytest.mark.parametrize("content", [b"", b"\xff"])
def test_tracker_that_verls_save_left_torn_counts_every_checkpoint(live, tmp_path, content):
    live("a", until=3)
    (tmp_path / "run" / TRACKER).write_bytes(content)
    assert live("b", until=STEPS).checkpoints.resumed_step == 2


def test_stop_after_a_start_from_another_runs_checkpoint_spares_that_run(live, tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    live("a", until=6, directory=other)
    manifest = other / "global_step_4" / "partial_rollout" / "manifest.json"
    before = manifest.read_bytes()
    files = live("b", until=4, mode="resume_path", path=other / "global_step_4")
    live.save(files, "aaaa")
    assert not (run / "global_step_4").is_symlink() and manifest.read_bytes() == before
    assert live("c", until=STEPS).checkpoints.chosen == run / "global_step_4"


def test_copied_run_directory_has_an_id_of_its_own_and_keeps_its_records(live, tmp_path):
    first = live("a", until=4)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    second = live("b", until=STEPS, directory=tmp_path / "copy")
    assert second.checkpoints.run != first.checkpoints.run and trained_by(tmp_path / "copy") == "aaaabbbb"


def test_retention_neither_counts_nor_removes_what_is_superseded(live, tmp_path):
    run = tmp_path / "run"
    live("a", until=STEPS, keep=2)
    live("b", until=3, mode="disable", keep=2)
    live("c", until=7, keep=2)
    assert saved_steps(run) == [4, 6] and kept_aside(run) == [("a" * 8, [6, 8])]


def test_checkpoint_that_is_named_through_a_link_is_the_runs_own(live, tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    live("a", until=6, keep=2)
    link.symlink_to(run)
    live("b", until=STEPS, mode="resume_path", path=link / "global_step_6", keep=2)
    assert saved_steps(run) == [6, 8], "retention knows the checkpoints of the process before"


@pytest.mark.parametrize("how", [BACK, OVER])
def test_start_cut_off_while_it_sets_things_aside_is_finished_by_the_next(live, tmp_path, how, monkeypatch):
    for survives in range(9):
        run = tmp_path / f"run{survives}"
        live("a", until=STEPS, directory=run)
        path = {"mode": "resume_path", "path": run / "global_step_4"} if how == BACK else {"mode": how}
        moves = Mock(wraps=shutil.move, side_effect=[DEFAULT] * survives + [Killed])
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(run_checkpoints.shutil, "move", moves)
            live("b", until=3, directory=run, **path)
        killed = moves.call_count > survives
        third = live("c", until=STEPS, directory=run)
        assert trained_by(run) == ("aaaacccc" if how == BACK else "cccccccc" if killed else "bbcccccc")
        agrees(run, third)
        if not killed:
            break
    assert survives > 0 and not killed


def test_start_says_which_steps_it_trains_again_and_what_it_supersedes(live, tmp_path, capsys):
    def said(who, until, **how):
        capsys.readouterr()
        live(who, until=until, **how)
        printed = capsys.readouterr().out
        return [line for line in printed.splitlines() if "again" in line], "replaces" in printed

    assert said("a", 1) == ([], False)
    # Killed before its first checkpoint.
    assert said("b", 3) == (["step 1 is trained again: the run starts from scratch"], True)
    # Killed after that of step 2, and that of step 4.
    assert said("c", 4) == (["step 3 is trained again: the run resumes from step 2"], False)
    assert said("d", 6) == ([], False)
    going_back = {"mode": "resume_path", "path": tmp_path / BACK}
    assert said("e", 5, **going_back) == (["steps 5 to 6 are trained again: the run resumes from step 4"], True)
    failed = tmp_path / "failed"
    failed.mkdir()
    for name in ("config.yaml", "error.log", "metrics.jsonl"):
        (failed / name).write_text("")
    assert said("f", 1, directory=failed) == ([], False), "it failed before it trained"
