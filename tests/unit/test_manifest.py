"""A checkpoint directory is whole, torn or foreign, and the newest whole one is found."""

import json

import pytest

from recipe.partial_rollout.checkpoint import manifest
from recipe.partial_rollout.checkpoint.snapshot import ForeignCheckpointError, TornCheckpointError, write_snapshot

REFUSED = (TornCheckpointError, ForeignCheckpointError)


def checkpoint(run_dir, step, *, seal=True):
    step_dir = run_dir / f"global_step_{step}"
    ours = manifest.begin(step_dir)
    (step_dir / "actor").mkdir(exist_ok=True)
    (step_dir / "actor" / "weights.pt").write_bytes(b"w" * 100)
    write_snapshot(ours / "manager.snapshot", {"step": step})
    if seal:
        manifest.seal(step_dir, step, {"arm": "PR"})
    return step_dir


def test_sealed_checkpoint_lists_every_file_with_its_size(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    whole = manifest.verify(step_dir)
    assert whole.step == 4 and whole.facts == {"arm": "PR"}
    assert set(whole.files) == {"actor/weights.pt", "partial_rollout/manager.snapshot"}
    assert whole.files["actor/weights.pt"] == manifest.ListedFile(100, None)
    assert len(whole.files["partial_rollout/manager.snapshot"].blake2b) == 64


def test_checkpoint_that_was_begun_and_not_sealed_is_torn(tmp_path):
    with pytest.raises(TornCheckpointError, match="it has no manifest: the checkpoint was not finished"):
        manifest.verify(checkpoint(tmp_path, 4, seal=False))


def test_begin_unseals_the_checkpoint_that_was_there(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    manifest.begin(step_dir)
    with pytest.raises(TornCheckpointError):
        manifest.verify(step_dir)


def test_directory_without_our_mark_is_foreign(tmp_path):
    (tmp_path / "global_step_4" / "actor").mkdir(parents=True)
    with pytest.raises(ForeignCheckpointError, match=r"it has no partial_rollout/.*trainer.default_local_dir"):
        manifest.verify(tmp_path / "global_step_4")


def test_checkpoint_under_another_steps_name_is_foreign(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    with pytest.raises(ForeignCheckpointError, match="its content is of step 4"):
        manifest.verify(step_dir.rename(tmp_path / "global_step_9"))


@pytest.mark.parametrize("name", ["actor/weights.pt", "partial_rollout/manager.snapshot"])
def test_file_that_is_missing_or_cut_off_is_named(tmp_path, name):
    step_dir = checkpoint(tmp_path, 4)
    path = step_dir / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(TornCheckpointError, match=f"{name} has {len(data) - 1} bytes of {len(data)}"):
        manifest.verify(step_dir)
    path.unlink()
    with pytest.raises(TornCheckpointError, match=f"{name} is missing"):
        manifest.verify(step_dir)


def test_changed_file_is_found_by_its_checksum(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    snapshot = step_dir / "partial_rollout" / "manager.snapshot"
    snapshot.write_bytes(bytes(reversed(snapshot.read_bytes())))
    with pytest.raises(TornCheckpointError, match=r"the checksum of partial_rollout/manager.snapshot"):
        manifest.verify(step_dir)


def test_manifest_cut_off_or_changed_anywhere_never_verifies_as_something_else(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    whole = manifest.verify(step_dir)
    path = step_dir / "partial_rollout" / "manifest.json"
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(REFUSED):
            manifest.verify(step_dir)
    for offset in range(len(data)):
        for flip in (0x01, 0x20, 0x80):
            path.write_bytes(data[:offset] + bytes([data[offset] ^ flip]) + data[offset + 1 :])
            try:
                assert manifest.verify(step_dir) == whole
            except REFUSED:
                continue


def test_manifest_cannot_name_files_outside_its_directory(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    path = step_dir / "partial_rollout" / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["blake2b"]
    fields["files"] = {"../../secret": {"size": 1, "blake2b": None}}
    path.write_text(json.dumps({"blake2b": manifest._digest(fields), **fields}))
    with pytest.raises(ForeignCheckpointError, match="names files outside"):
        manifest.verify(step_dir)


def test_newest_whole_checkpoint_is_used_and_torn_ones_above_it_are_told(tmp_path):
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 11, seal=False)
    found, refused = manifest.newest_whole(tmp_path)
    assert found == newest
    assert len(refused) == 1 and "global_step_11 is torn" in refused[0]


def test_without_any_checkpoint_there_is_nothing_to_resume(tmp_path):
    assert manifest.newest_whole(tmp_path) == (None, [])
    assert manifest.newest_whole(tmp_path / "missing") == (None, [])


def test_foreign_checkpoint_above_the_newest_whole_one_stops_the_run(tmp_path):
    checkpoint(tmp_path, 2)
    (tmp_path / "global_step_3").mkdir()
    with pytest.raises(ForeignCheckpointError, match=r"trainer\.resume_mode=disable"):
        manifest.newest_whole(tmp_path)
