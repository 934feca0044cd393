"""A checkpoint directory is whole, torn or foreign, and the newest whole one is found."""

import contextlib
import json

import pytest

from recipe.partial_rollout.checkpoint import manifest
from recipe.partial_rollout.checkpoint.manifest import ForeignCheckpointError, TornCheckpointError, write_snapshot
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from tests.unit.shared import damaged


def checkpoint(run_dir, step, *, seal=True):
    step_dir = run_dir / f"global_step_{step}"
    manifest.begin(step_dir)
    (step_dir / "actor").mkdir(exist_ok=True)
    (step_dir / "actor" / "weights.pt").write_bytes(b"w" * 100)
    for state in ("old", "new"):
        write_snapshot(manifest.state_file(step_dir, "manager", state), {"step": step})
    if seal:
        manifest.seal(step_dir, manifest.Manifest(step=step, life="a", state="new", made_of={"rows": 3}, kept=[step]))
    return step_dir


def test_checkpoint_is_torn_from_its_beginning_until_it_is_sealed(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    whole = manifest.verify(step_dir)
    assert (whole.step, whole.life, whole.made_of, whole.kept) == (4, "a", {"rows": 3}, [4])
    assert whole.files.keys() == {"actor/weights.pt", "partial_rollout/manager-new.state"}
    manifest.begin(step_dir)
    for unsealed in (step_dir, checkpoint(tmp_path, 5, seal=False)):
        with pytest.raises(TornCheckpointError, match="it has no manifest: the checkpoint was not finished"):
            manifest.verify(unsealed)


def test_directory_without_our_mark_or_under_another_steps_name_is_foreign(tmp_path):
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    with pytest.raises(ForeignCheckpointError, match=r"it has no partial_rollout/.*trainer.default_local_dir"):
        manifest.verify(tmp_path / "global_step_3")
    with pytest.raises(ForeignCheckpointError, match="its content is of step 4"):
        manifest.verify(checkpoint(tmp_path, 4).rename(tmp_path / "global_step_9"))


def test_file_that_is_missing_cut_off_or_changed_is_named(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    for name in ("actor/weights.pt", "partial_rollout/manager-new.state"):
        path, data = step_dir / name, (step_dir / name).read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(TornCheckpointError, match=f"{name} has {len(data) - 1} bytes of {len(data)}"):
            manifest.verify(step_dir)
        path.unlink()
        with pytest.raises(TornCheckpointError, match=f"{name} is missing"):
            manifest.verify(step_dir)
        path.write_bytes(data)
    for each in damaged(data, flips=(0x01, 0x80, 0xFF)):
        path.write_bytes(each)
        with pytest.raises(TornCheckpointError, match=r"partial_rollout/manager-new.state"):
            manifest.verify(step_dir)


def test_manifest_cut_off_or_changed_anywhere_never_verifies_as_something_else(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    whole = manifest.verify(step_dir)
    path = step_dir / "partial_rollout" / "manifest.json"
    for each in damaged(path.read_bytes(), flips=(0x01, 0x20, 0x80)):
        path.write_bytes(each)
        with contextlib.suppress(TornCheckpointError, ForeignCheckpointError):
            assert manifest.verify(step_dir) == whole


def test_manifest_of_an_earlier_version_is_foreign(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    path = step_dir / "partial_rollout" / "manifest.json"
    path.write_text(json.dumps({"blake2b": "0", "format": 3, "step": 4, "life": "a", "facts": {}, "files": {}}))
    with pytest.raises(
        ForeignCheckpointError, match=r"^[^\n]*is not of this version's format[^\n]*disable to start over$"
    ):
        manifest.verify(step_dir)


def test_newest_whole_checkpoint_is_used_and_torn_ones_above_it_are_told_while_foreign_ones_stop_the_run(tmp_path):
    assert RunCheckpoints(tmp_path / "missing").newest_whole() == RunCheckpoints(tmp_path).newest_whole() == (None, [])
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 11, seal=False)
    found, (refused,) = RunCheckpoints(tmp_path).newest_whole()
    assert found == manifest.verify(newest) and "global_step_11 is torn" in refused
    (tmp_path / "global_step_12").mkdir()
    with pytest.raises(ForeignCheckpointError, match=r"trainer\.resume_mode=disable"):
        RunCheckpoints(tmp_path)
