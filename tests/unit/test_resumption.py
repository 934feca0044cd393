"""A start goes on from what its run was made of, or is refused before Ray in one line with both values.

``main_ppo`` runs here up to where Ray would start; then a checkpoint is sealed, as a training would.
"""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from recipe.partial_rollout import main_ppo, task_runner
from recipe.partial_rollout.checkpoint.manifest import write_snapshot
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints, locked
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.tasks.clock10.model import build_model
from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer
from recipe.partial_rollout.tools.check.command import check_run

ARMS = {"PR": True, "noPR": False}
BATCH_OF_8 = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
TRAIN = task_runner.TaskRunner.train
ENDED = '{"type":"ended","step":6,"complete":true,"exhausted":false}\n'


def rows(*numbers):
    return [
        {
            "prompt": [{"role": "user", "content": f"{number % 9}+1"}], "reward_model": {"ground_truth": str(number)},
            "extra_info": {"index": number}, "index": number, "data_source": "clock10",
        }
        for number in numbers
    ]  # fmt: skip


@pytest.fixture
def inputs(tmp_path):
    """Directory ``model``; ``write(rows)`` writes the training file."""
    import pandas as pd

    model, files = tmp_path / "model", tmp_path / "train.parquet"
    build_tokenizer().save_pretrained(model)
    build_model(seed=0).save_pretrained(model)
    made = SimpleNamespace(model=model, files=files, write=lambda rows: pd.DataFrame(rows).to_parquet(files))
    made.write(rows(*range(24)))
    return made


@pytest.fixture
def start(tmp_path, inputs, resolved_config, monkeypatch):
    """``start(*overrides, arm=, save=)``: a process; returns its runner. ``save``: step of the checkpoint that it seals.

    ``checks``: it is one with ``--check``; returns its exit code.
    """
    for name in ("VERL_FILE_LOGGER_PATH", "SWANLAB_LOG_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(task_runner, "start_ray", lambda *_: None)
    keys = (
        f"actor_rollout_ref.model.path={inputs.model} data.train_files={inputs.files} data.val_files={inputs.files} "
        f"trainer.default_local_dir={tmp_path}/run data.train_batch_size=4 actor_rollout_ref.rollout.n=2 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=4 trainer.logger=[file] trainer.resume_mode=auto"
    )

    def run(*overrides, arm="PR", save=None, checks=False):
        started = []

        def train(runner):
            started.append(runner)
            checkpoints = runner.files.checkpoints
            if save is not None:
                actor = checkpoints.step_dir(save) / "actor"
                in_flight = {"manager": lambda path: write_snapshot(path, {})} if arm == "PR" else {}
                checkpoints.save(save, in_flight, lambda: (actor.mkdir(), (actor / "model.pt").touch()))

        monkeypatch.setattr(task_runner.TaskRunner, "train", train)
        enable = f"partial_rollout.enable={ARMS[arm]}"
        config = resolved_config("quickstart_cpu", *keys.split(), enable, *overrides)
        if checks:
            return check_run(config)
        main_ppo.run(config)
        return started[0]

    return run


def listing(directory, *but):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.name not in but}


def goes_on(runner):
    return runner.files.checkpoints.resumed_step == 2


OPTIM, CONTENTS = "actor_rollout_ref.actor.optim", "actor_rollout_ref.actor.checkpoint.load_contents"
CHANGES = [
    ("data.train_batch_size=8", "data.train_batch_size=8: must be 4, as in"),
    ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n=4: must be 2, as in"),
    ("data.seed=7", r"data.seed=7: must be \d+, as in"),
    ("data.shuffle=False", "data.shuffle=False: must be True, as in"),
    ("data.train_max_samples=12", r"data.train_files=12 rows, hash \w+: must be 24 rows, hash \w+, as in"),
    ("data.dataloader_num_workers=3", r"data.dataloader_num_workers=3: must be \d+, as in"),
    ("trainer.n_gpus_per_node=2", r"trainer.nnodes \* trainer.n_gpus_per_node=2: must be 1, as in"),
    ("partial_rollout.max_staleness=1", "partial_rollout.max_staleness=1: must be at least 2, as in"),
    ("data.max_response_length=8", r"data.max_response_length=8: must be at least \d+, as in"),
    ("data.max_prompt_length=16", r"data.max_prompt_length=16: must be at least \d+, as in"),
    (f"{OPTIM}.lr=1e-7", rf"{OPTIM}.lr=1e-07: must be [\d.e-]+, as in"),
    (f"{OPTIM}.betas=[0.8,0.9]", rf"{OPTIM}.betas=\[0.8, 0.9\]: must be \[0.9, 0.999\], as in"),
    (f"{OPTIM}.weight_decay=0.5", rf"{OPTIM}.weight_decay=0.5: must be 0.01, as in"),
    (f"+{OPTIM}.override_optimizer_config.eps=1", rf"{OPTIM}.override_optimizer_config={{'eps': 1}}: must be None, as"),
]
KEEPS = ("partial_rollout.overlap=1", "partial_rollout.max_staleness=2")


def test_key_that_differs_from_the_checkpoints_is_refused(start, inputs, tmp_path):
    start(*KEEPS, save=2)
    before = listing(tmp_path / "run", "run.lock")
    other, moved = (shutil.copytree(inputs.model, tmp_path / name) for name in ("other", "moved/model"))
    key = "actor_rollout_ref.model.path"
    changes = [*CHANGES, (f"{key}={other}", f"{key}=other: must be model, as in")]
    for change, message in changes:
        with pytest.raises(ConfigError, match=rf"^{message}[^\n]*global_step_2[^\n]*resume_mode=disable[^\n]*$"):
            start(*KEEPS, change, *[BATCH_OF_8] * ("batch" in change))
        assert listing(tmp_path / "run", "run.lock") == before, change
    # A number that is falsy is told as the number that it is.
    with pytest.raises(ConfigError, match=r"^partial_rollout.max_staleness=0: must be at least 2, as in"):
        start("partial_rollout.overlap=0", "partial_rollout.max_staleness=0")
    longer = "data.max_response_length=2000", "actor_rollout_ref.rollout.max_model_len=3000"
    assert goes_on(start(*KEEPS, *longer, "trainer.total_epochs=9", f"{key}={moved}"))
    over = start(*KEEPS, *[change for change, _ in changes], BATCH_OF_8, "trainer.resume_mode=disable")
    assert over.files.checkpoints.resumed_step == 0, "it starts over"


@pytest.mark.parametrize(
    ("key", "contents", "accepted"),
    [
        ("lr=1e-7", "[model]", True),
        ("lr=1e-7", "[model,optimizer]", False),
        ("lr=1e-7", "[model,extra]", False),
        ("weight_decay=0.5", "[model,optimizer]", False),
        ("clip_grad=0.5", "[model,optimizer,extra]", True),
        ("lr_scheduler_type=cosine", "[model,optimizer,extra]", True),
    ],
)
def test_optimizer_setting_may_change_unless_the_checkpoint_brings_it_back(start, key, contents, accepted):
    """The schedule's base rate is in ``extra``; with ``optimizer`` alone the first update has the checkpoint's rate."""
    start(arm="noPR", save=2)
    again = f"{OPTIM}.{key}", f"{CONTENTS}={contents}"
    if accepted:
        assert goes_on(start(*again, arm="noPR", save=4))
        # The next checkpoint has the new value.
        assert start(again[0], arm="noPR").files.checkpoints.resumed_step == 4
    else:
        with pytest.raises(ConfigError, match=rf"^{OPTIM}.{key[:-1]}.*{CONTENTS}=\[model\] starts the optimizer anew"):
            start(*again, arm="noPR")


def test_critic_resumes_only_from_a_checkpoint_with_one_and_with_its_optimizer(start, inputs, tmp_path):
    start(save=2)
    critic = "algorithm.adv_estimator=gae", f"critic.model.path={inputs.model}"
    with pytest.raises(
        ConfigError, match=r"^algorithm.adv_estimator=gae: one without a critic, as in .*global_step_2;"
    ):
        start(*critic)
    start(*critic, "trainer.resume_mode=disable", save=2)
    (tmp_path / "run" / "global_step_2" / "critic").mkdir()
    assert goes_on(start(*critic))
    with pytest.raises(
        ConfigError, match=r"^critic.optim.lr=1e-09: must be .*critic.checkpoint.load_contents=\[model\]"
    ):
        start(*critic, "critic.optim.lr=1e-9")


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    "changed", [range(32), range(16), range(100, 124), [1, 0, *range(2, 24)]], ids=["grown", "shrunk", "other", "order"]
)
def test_changed_rows_are_refused_with_both_counts_and_moved_ones_are_not(start, inputs, arm, changed):
    start(arm=arm, save=2)
    moved = shutil.copy(inputs.files, inputs.files.with_name("moved.parquet"))
    assert goes_on(start(f"data.train_files={moved}", arm=arm))
    inputs.write(rows(*changed))
    words = rf"^data.train_files={len(changed)} rows, hash \w+: must be 24 rows, hash \w+, as in [^\n]*global_step_2"
    with pytest.raises(ConfigError, match=words):
        start(arm=arm)


def test_longer_prompts_that_now_fit_are_named_as_the_cause_of_other_rows(start, inputs):
    long = [{**each, "prompt": [{"role": "user", "content": "1+1" * 30}]} for each in rows(*range(24, 28))]
    inputs.write(rows(*range(24)) + long)
    start("data.max_prompt_length=64", save=2)
    fits = "data.max_prompt_length=128", "actor_rollout_ref.rollout.max_model_len=3000"
    cause = r"global_step_2: data.max_prompt_length is 128 and was 64, so that other rows fit, or the files differ;"
    with pytest.raises(ConfigError, match=rf"^data.train_files=28 rows, hash \w+: must be 24 rows, .*{cause}"):
        start(*fits)
    inputs.write(rows(*range(24)))
    assert goes_on(start(*fits))


def test_rows_are_the_same_however_a_file_is_written(start, inputs, tmp_path):
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = rows(*range(24))
    made[5]["note"] = "x"
    inputs.write(made)
    start(save=2)
    pd.DataFrame(made).to_parquet(tmp_path / "grouped.parquet", row_group_size=7)
    pq.write_table(pa.table(pd.DataFrame(made)).slice(0, 10), tmp_path / "first.parquet")
    pq.write_table(pa.table(pd.DataFrame(made)).slice(10), tmp_path / "rest.parquet")
    for files in ("{0}/grouped.parquet", "[{0}/first.parquet,{0}/rest.parquet]"):
        assert goes_on(start(f"data.train_files={files.format(tmp_path)}"))
    with pytest.raises(ConfigError, match=r"^data.train_files=24 rows, hash \w+: must be 24 rows"):
        start(f"data.train_files=[{tmp_path}/rest.parquet,{tmp_path}/first.parquet]")


def test_validation_alone_needs_only_the_checkpoints_model(start, inputs):
    start(save=2)
    inputs.write(rows(*range(12)))
    alone = "trainer.val_only=True", "actor_rollout_ref.rollout.n=4", "data.max_response_length=32", "data.seed=9"
    for arm in ARMS:
        assert goes_on(start(*alone, arm=arm))
    with pytest.raises(ConfigError, match=r"^trainer.nnodes \* trainer.n_gpus_per_node=2: must be 1, as in"):
        start(*alone, "trainer.n_gpus_per_node=2")


def test_validation_alone_makes_its_directory_for_the_output_of_libraries(start, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(main_ppo, "keep_output", lambda path: kept.append(path.parent.is_dir()))
    start("trainer.val_only=True")
    assert kept == [True] and not [*(tmp_path / "run").iterdir()]


def test_other_place_for_the_metrics_is_refused(start, monkeypatch, tmp_path):
    """A new run would move another run's metrics away there, and no tool would find its own."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "run" / "metrics.jsonl"))
    start()
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "all.jsonl"))
    with pytest.raises(ConfigError, match=r"^VERL_FILE_LOGGER_PATH=.*all.jsonl: unset, or .*run/metrics.jsonl: "):
        start()


@pytest.mark.parametrize(("arm", "other"), [("PR", "noPR"), ("noPR", "PR")])
def test_other_arms_checkpoint_and_one_that_names_no_step_are_refused(start, tmp_path, arm, other):
    start(arm=other, save=2)
    words = rf"^partial_rollout.enable={ARMS[arm]}: must be {ARMS[other]}, as in .*global_step_2; trainer.resume_mode="
    with pytest.raises(ConfigError, match=words):
        start(arm=arm)
    for name in ("global_step_2.bak", "best_global_step_2", "global_step_"):
        shutil.copytree(tmp_path / "run" / "global_step_2", tmp_path / name)
        with pytest.raises(ConfigError, match=r"^trainer.resume_from_path=.*: an existing .*/global_step_K"):
            start("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/{name}", arm=other)


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_path_to_resume_that_the_mode_ignores_is_refused(start, tmp_path, mode):
    keys = f"trainer.resume_mode={mode}", f"trainer.resume_from_path={tmp_path}/run/global_step_2"
    with pytest.raises(
        ConfigError, match=r"^trainer.resume_from_path=.*/global_step_2: null, or with trainer.resume_mode="
    ):
        start(*keys)
    if mode == "auto":
        # It may be left over from the start that began there.
        start(save=2)
        start(*keys)


@pytest.mark.parametrize(
    ("steps", "last"),
    [("trainer.total_training_steps=6", 6), ("trainer.total_epochs=1", 6), ("trainer.total_epochs=2", 12)],
)
def test_check_counts_the_steps_left_and_a_finished_run_starts_nothing(
    start, tmp_path, capsys, monkeypatch, steps, last
):
    assert start(steps, checks=True) == 0
    assert f"ok    steps           {last} of {last} are left\n" in capsys.readouterr().out
    start(steps, save=6)
    newest = tmp_path / "run" / "global_step_6"
    said = f"{last - 6} of {last} are left, after step 6: it resumes from {newest}"
    over = f"nothing to do: {newest} is the checkpoint of the last step"
    assert start(steps, checks=True) == 0
    assert f"ok    steps           {said if last > 6 else over}\n" in capsys.readouterr().out
    runner = start(steps)
    monkeypatch.setattr(task_runner, "start_ray", Mock(side_effect=RuntimeError("it starts")))
    # Of a run that was killed before it noted its end.
    for log, starts in ((None, False), (ENDED, False), (ENDED.replace("true", "false"), True)):
        if log:
            (tmp_path / "run" / "run.jsonl").write_text(log)
        with pytest.raises(RuntimeError, match="it starts") if starts or last > 6 else contextlib.nullcontext():
            TRAIN(runner)
        assert (over in capsys.readouterr().out) == (not starts and last == 6)


def test_second_start_in_a_directory_names_its_holder_and_writes_nothing(start, tmp_path):
    with pytest.raises(ConfigError, match="resume_mode=never: one of"):
        start("trainer.resume_mode=never")
    assert not (tmp_path / "run").exists(), "a start that is refused leaves no directory"
    start(save=2)
    processes = multiprocessing.get_context("fork")
    ours, theirs = processes.Pipe()

    def hold():
        with locked(tmp_path / "run"):
            theirs.send("held")
            theirs.recv()

    other = processes.Process(target=hold, daemon=True)
    other.start()
    assert ours.recv() == "held"
    before = listing(tmp_path / "run")
    held = f"process {other.pid} on host {os.uname().nodename} "
    with pytest.raises(ConfigError, match=rf"^trainer.default_local_dir=.*/run: another directory, or wait: {held}"):
        start()
    start("trainer.val_only=True")
    assert listing(tmp_path / "run") == before, "a validation needs no lock and leaves nothing"
    ours.send("end")
    other.join(60)
    assert goes_on(start())


def test_start_whose_checkpoints_change_before_it_has_the_lock_is_refused(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    (tmp_path / "global_step_1").mkdir()
    with pytest.raises(ConfigError, match=r"^trainer.default_local_dir=.*checkpoints have changed during this start"):
        checkpoints.begin()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_without_locks_takes_a_run_all_the_same(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with locked(tmp_path):
        assert (tmp_path / "run.lock").exists()
