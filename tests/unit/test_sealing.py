"""A checkpoint is sealed with the trainer's files, whole, wherever the processes of a cluster run."""

from pathlib import Path

import pytest

from recipe.partial_rollout.checkpoint.manifest import CheckpointError, read, verify, write_snapshot
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints

STATES = {part: lambda path: write_snapshot(path, {"x": 1}) for part in ("manager", "source")}


def saved(checkpoints, step, words="weights", within=None):
    """Save ``step``; the trainer writes ``words`` into the step's directory, or into that of ``within``."""
    written = []

    def save_verl():
        directory = within or checkpoints.step_dir(step)
        (directory / "actor").mkdir(parents=True, exist_ok=True)
        (directory / "actor" / "model.pt").write_text(words)
        checkpoints.step_dir(step).joinpath("data.pt").write_text("x")
        written.append(step)

    checkpoints.save(step, STATES, save_verl)
    return bool(written)


def begun(run_dir, *choice, **limits):
    checkpoints = RunCheckpoints(run_dir, *choice, **limits)
    checkpoints.begin()
    return checkpoints


def test_step_whose_trainer_wrote_elsewhere_is_not_sealed_and_takes_no_other_with_it(tmp_path):
    checkpoints = begun(tmp_path / "run")
    saved(checkpoints, 1)
    with pytest.raises(RuntimeError, match=r"step 2 is not saved: .*global_step_2/actor .*trainer\.default_local_dir"):
        saved(checkpoints, 2, within=tmp_path / "elsewhere")
    assert begun(tmp_path / "run").resumed_step == 1
    saved(checkpoints, 3)
    assert verify(checkpoints.step_dir(1)) and verify(checkpoints.step_dir(3))


def test_states_are_written_to_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "driver").mkdir()
    monkeypatch.chdir(tmp_path / "driver")
    checkpoints = begun(Path("run"))
    monkeypatch.chdir(tmp_path)
    saved(checkpoints, 1)
    assert verify(tmp_path / "driver" / "run" / "global_step_1").step == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("tracked", [True, False])
def test_empty_step_directory_is_torn_and_one_of_another_trainer_is_not_ours(tmp_path, tracked):
    checkpoints = begun(tmp_path)
    saved(checkpoints, 2)
    saved(checkpoints, 6)
    checkpoints.step_dir(6).joinpath("actor", "model.pt").unlink()
    checkpoints.step_dir(4).mkdir()
    if not tracked:
        (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert RunCheckpoints(tmp_path).resumed_step == 2
    checkpoints.step_dir(4).joinpath("data.pt").touch()
    with pytest.raises(CheckpointError, match="another trainer made it"):
        read(checkpoints.step_dir(4))


def test_step_is_saved_again_where_its_files_are_not_those_that_were_sealed(tmp_path):
    checkpoints = begun(tmp_path)
    assert saved(checkpoints, 4) and not saved(checkpoints, 4), "only what is in flight has changed"
    (checkpoints.step_dir(4) / "actor" / "model.pt").write_text("cut")
    assert saved(checkpoints, 4) and verify(checkpoints.step_dir(4))
    resumed = begun(tmp_path)
    assert resumed.resumed_step == 4 and not saved(resumed, 4)


def test_checkpoint_of_another_name_does_not_stand_in_for_its_step(tmp_path):
    checkpoints = begun(tmp_path / "run", keep=1)
    saved(checkpoints, 4)
    checkpoints.step_dir(4).rename(tmp_path / "run" / "kept")
    by_path = begun(tmp_path / "run", "resume_path", str(tmp_path / "run" / "kept"))
    assert by_path.resumed_step == 4 and saved(by_path, 4)
    assert verify(by_path.step_dir(4))
