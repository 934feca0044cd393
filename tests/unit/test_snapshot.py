"""A snapshot comes back as it was; a checkpoint is whole, torn or foreign, and sealed with all of the trainer's files."""

import contextlib
import json
import pickle
from pathlib import Path
from unittest.mock import Mock

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recipe.partial_rollout.checkpoint import manifest, plain_state
from recipe.partial_rollout.checkpoint.manifest import (
    CheckpointError,
    TornCheckpointError,
    read_snapshot,
    verify,
    write_snapshot,
)
from recipe.partial_rollout.checkpoint.run_checkpoints import TRACKER, RunCheckpoints
from tests.unit.shared import damaged

STATE = {
    "row": {"raw_prompt": [{"role": "user", "content": "2 + 2?"}], "index": 7, "extra_info": {"split": "train"}},
    "tokens": np.arange(20, dtype=np.int32),
    "pair": (1, "b"),
}


def same(a, b):
    """Equal in type, dtype, shape and value; bytes of an array may be in another order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic) and a.dtype != object:
        little = a.dtype.newbyteorder("<")
        alike = little == b.dtype.newbyteorder("<") and a.shape == b.shape
        return alike and a.astype(little).tobytes() == b.astype(little).tobytes()
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and same(a.ravel().tolist(), b.ravel().tolist())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


class Text(str):
    pass


def objects_of(values):
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array


DTYPES = ["?", "i1", "i2", "<i4", "<i8", "u1", "<f2", "<f4", "<f8", ">i4", ">f8"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(max_size=8))
TEXT = st.text(st.characters(), max_size=8)
KEYS = st.none() | st.floats(allow_nan=False) | st.binary(max_size=2) | st.tuples(st.integers(0, 9), TEXT)
VALUES = st.recursive(
    PLAIN | TEXT | ARRAYS | st.floats(width=32).map(np.float32) | st.integers(0, 99).map(np.int64),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(TEXT | st.integers(-9, 9) | KEYS, inner, max_size=4)
        | st.lists(inner, max_size=4).map(objects_of)
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(VALUES)
def test_values_come_back_as_they_were(value):
    back = plain_state.unpack(plain_state.pack({**STATE, "v": value}))
    assert same(back["v"], value) and back["tokens"].flags.writeable


def inside(kind):
    """A value that holds itself."""
    value = kind()
    (value.append if kind is list else lambda held: value.update(a=held))((value,))
    return value


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"reserve": [1, {"row": {"image": object()}}]}, r"reserve\[1\].row.image: builtins.object cannot be saved"),
        ({"a": [{2.5: object()}]}, r"a\[0\].2.5: builtins.object cannot be saved"),
        ({"a": [{Text("b"): 1}]}, r"a\[0\].b: .*Text cannot be saved"),
        ({"a": inside(list)}, "it cannot be saved: .*recursion"),
        ({"a": inside(dict)}, "it cannot be saved: .*recursion"),
        ({"a": (1, [2**70])}, r"a\[1\]\[0\]: builtins.int cannot be saved: only plain values \(integers of at most 64"),
        ({"a": np.zeros(2, complex)}, "a: an array of dtype complex128 cannot be saved"),
    ],
)
def test_value_that_cannot_be_saved_is_named_by_its_path(tmp_path, state, message):
    with pytest.raises(plain_state.UnsaveableError, match=message) as caught:
        write_snapshot(tmp_path / "s", state)
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "Ray carries it to the trainer"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps(STATE),
        msgpack.packb({"a": msgpack.ExtType(9, b"x")}),
        msgpack.packb({"a": msgpack.ExtType(1, b"|O8 1\n" + bytes(8))}),
        msgpack.packb({"a": msgpack.ExtType(1, f"<i4 {2**62}\n".encode() + bytes(8))}),
        msgpack.packb({"a": msgpack.ExtType(1, b"<i4 3\n" + bytes(8))}),
        b"\x91" * 5000,
    ],
    ids=["pickle", "extension", "objects", "huge shape", "short", "deep"],
)
def test_payload_that_was_never_packed_gives_no_value(payload):
    with pytest.raises((ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException)):
        plain_state.unpack(payload)


def test_write_that_dies_leaves_the_snapshot_before_it(tmp_path, monkeypatch):
    path = tmp_path / "manager.snapshot"
    write_snapshot(path, STATE)
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        write_snapshot(path, {"other": 1})
    assert same(read_snapshot(path), STATE)


# -- checkpoint directories --------------------------------------------------------------------------------------------


def checkpoint(run_dir, step):
    checkpoints = started(run_dir)
    saved(checkpoints, step)
    return checkpoints.step_dir(step)


def test_checkpoint_is_torn_from_its_beginning_until_it_is_sealed(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    whole = verify(step_dir)
    states = {f"partial_rollout/{part}-{whole.state}.state" for part in STATES}
    assert whole.step == 4 and whole.files.keys() == {"actor/model.pt", "data.pt", *states}
    manifest.begin(step_dir)
    manifest.state_file(step_dir, "manager", "of-an-earlier-seal").touch()
    with pytest.raises(TornCheckpointError, match="it has no manifest: the checkpoint was not finished"):
        verify(step_dir)
    manifest.seal(step_dir, whole)
    assert verify(step_dir) == whole


def test_record_that_cannot_be_read_is_named(tmp_path):
    ours = checkpoint(tmp_path, 4) / "partial_rollout"
    for path in (ours / "manifest.json", tmp_path / TRACKER):
        path.unlink()
        path.mkdir()
        with pytest.raises(CheckpointError, match=r"cannot be (read|resumed).*\(?Is a directory"):
            RunCheckpoints(tmp_path)
        path.rmdir()
        path.touch()


def test_directory_of_another_trainer_step_or_version_is_foreign(tmp_path):
    moved = checkpoint(tmp_path, 4).rename(tmp_path / "global_step_9")
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"it has no partial_rollout/.*trainer.default_local_dir"):
        verify(tmp_path / "global_step_3")
    with pytest.raises(CheckpointError, match="its content is of step 4"):
        verify(moved)
    earlier = {"blake2b": "0", "format": 3, "step": 4, "life": "a", "facts": {}, "files": {}}
    (moved / "partial_rollout" / "manifest.json").write_text(json.dumps(earlier))
    with pytest.raises(CheckpointError, match=r"^[^\n]*is not of this version's format[^\n]*disable to start over$"):
        verify(moved)


def test_file_that_is_missing_cut_off_or_changed_is_named(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    state = f"partial_rollout/manager-{verify(step_dir).state}.state"
    for name in ("actor/model.pt", state):
        path, data = step_dir / name, (step_dir / name).read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(TornCheckpointError, match=f"{name} has {len(data) - 1} bytes of {len(data)}"):
            verify(step_dir)
        path.unlink()
        with pytest.raises(TornCheckpointError, match=f"{name} is missing"):
            verify(step_dir)
        path.write_bytes(data)
    for each in damaged(data, flips=(0x01, 0x80, 0xFF)):
        path.write_bytes(each)
        with pytest.raises(TornCheckpointError, match=state):
            verify(step_dir)


def test_damaged_manifest_never_verifies_as_something_else(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    whole, path = verify(step_dir), step_dir / "partial_rollout" / "manifest.json"
    for each in damaged(path.read_bytes(), flips=(0x01, 0x20, 0x80)):
        path.write_bytes(each)
        with contextlib.suppress(CheckpointError):
            assert verify(step_dir) == whole


def test_newest_whole_checkpoint_is_chosen_and_a_foreign_one_stops(tmp_path, capsys):
    assert RunCheckpoints(tmp_path / "missing").chosen is RunCheckpoints(tmp_path).chosen is None
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 10)
    manifest.begin(checkpoint(tmp_path, 11))
    (tmp_path / TRACKER).unlink()
    # Killed between its first two directories.
    (tmp_path / "global_step_12").mkdir()
    found = RunCheckpoints(tmp_path)
    assert found.chosen == newest and found.resumed == verify(newest)
    first, second = capsys.readouterr().err.splitlines()
    assert "global_step_12 is torn" in first and "global_step_11 is torn" in second
    (tmp_path / "global_step_12" / "actor").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"another trainer made it; .*trainer\.resume_mode=disable"):
        RunCheckpoints(tmp_path)


# -- saving ------------------------------------------------------------------------------------------------------------

STATES = {part: lambda path: write_snapshot(path, {"x": 1}) for part in ("manager", "source")}


def saved(checkpoints, step, within=None):
    """Save ``step``; the trainer writes into the step's directory, or into that of ``within``. Returns whether it wrote."""
    written = []

    def save_verl():
        directory = within or checkpoints.step_dir(step)
        (directory / "actor").mkdir(parents=True, exist_ok=True)
        (directory / "actor" / "model.pt").write_text("weights")
        checkpoints.step_dir(step).joinpath("data.pt").write_text("x")
        written.append(step)

    checkpoints.save(step, STATES, save_verl)
    return bool(written)


def started(run_dir, *choice, **limits):
    run_dir.mkdir(exist_ok=True)
    checkpoints = RunCheckpoints(run_dir, *choice, **limits)
    checkpoints.begin()
    return checkpoints


def test_step_whose_trainer_wrote_elsewhere_is_not_sealed(tmp_path):
    checkpoints = started(tmp_path / "run")
    saved(checkpoints, 1)
    with pytest.raises(RuntimeError, match=r"step 2 is not saved: .*global_step_2/actor .*trainer\.default_local_dir"):
        saved(checkpoints, 2, within=tmp_path / "elsewhere")
    assert started(tmp_path / "run").resumed_step == 1
    saved(checkpoints, 3)
    assert verify(checkpoints.step_dir(1)) and verify(checkpoints.step_dir(3))


def test_states_are_written_to_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "driver").mkdir()
    monkeypatch.chdir(tmp_path / "driver")
    checkpoints = started(Path("run"))
    monkeypatch.chdir(tmp_path)
    saved(checkpoints, 1)
    assert verify(tmp_path / "driver" / "run" / "global_step_1").step == 1 and not (tmp_path / "run").exists()


def test_step_is_saved_again_where_its_sealed_files_have_changed(tmp_path):
    checkpoints = started(tmp_path)
    assert saved(checkpoints, 4) and not saved(checkpoints, 4), "only what is in flight has changed"
    (checkpoints.step_dir(4) / "actor" / "model.pt").write_text("cut")
    assert saved(checkpoints, 4) and verify(checkpoints.step_dir(4))
    resumed = started(tmp_path)
    assert resumed.resumed_step == 4 and not saved(resumed, 4)


def test_checkpoint_of_another_name_does_not_stand_in_for_its_step(tmp_path):
    checkpoints = started(tmp_path / "run", keep=1)
    saved(checkpoints, 4)
    checkpoints.step_dir(4).rename(tmp_path / "run" / "kept")
    by_path = started(tmp_path / "run", "resume_path", str(tmp_path / "run" / "kept"))
    assert by_path.resumed_step == 4 and saved(by_path, 4)
    assert verify(by_path.step_dir(4))
