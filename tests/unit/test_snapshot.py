"""A snapshot comes back as it was, or is refused in one line; a checkpoint directory is whole, torn or foreign."""

import contextlib
import json
import pickle

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recipe.partial_rollout.checkpoint import manifest, plain_state, run_checkpoints
from recipe.partial_rollout.checkpoint.manifest import (
    CheckpointError,
    TornCheckpointError,
    read_snapshot,
    write_snapshot,
)
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from tests.unit.shared import damaged

STATE = {
    "row": {"raw_prompt": [{"role": "user", "content": "2 + 2?"}], "index": 7, "extra_info": {"split": "train"}},
    "tokens": np.arange(20, dtype=np.int32),
    "pair": (1, "b"),
    "score": np.float32(0.5),
}


def same(a, b):
    """Equal in type, dtype, shape and value; bytes of an array may be in another order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        little = a.dtype.newbyteorder("<")
        if little != b.dtype.newbyteorder("<") or a.shape != b.shape:
            return False
        if a.dtype == object:
            return all(same(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
        return a.astype(little).tobytes() == b.astype(little).tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "manager.snapshot"
    write_snapshot(path, STATE)
    return path


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
    assert same(plain_state.unpack(plain_state.pack({"v": value}))["v"], value)


def test_arrays_that_come_back_can_be_written():
    back = plain_state.unpack(plain_state.pack(STATE))
    assert same(back, STATE) and back["tokens"].flags.writeable


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
        ({"a": (1, [2**70])}, r"a\[1\]\[0\]: an integer of 71 bits cannot be saved: at most 64"),
        ({"a": np.zeros(2, complex)}, "a: an array of dtype complex128 cannot be saved"),
    ],
)
def test_value_that_cannot_be_saved_is_named_by_its_path(tmp_path, state, message):
    with pytest.raises(plain_state.UnsaveableError, match=message) as caught:
        write_snapshot(tmp_path / "s", state)
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "Ray carries it to the trainer"
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=150)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 200),
    tail=st.binary(max_size=40),
)
def test_no_damage_to_a_file_does_worse_than_an_error(tmp_path_factory, changes, cut, tail):
    """Its manifest agrees with the damage: what a hostile checkpoint looks like."""
    payload = bytearray(plain_state.pack(STATE))
    for offset, flip in changes:
        payload[offset % len(payload)] ^= flip
    path = tmp_path_factory.mktemp("s") / "s"
    path.write_bytes(bytes(payload[: len(payload) - cut % len(payload)]) + tail)
    try:
        assert isinstance(read_snapshot(path), dict)
    except CheckpointError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps(STATE),
        msgpack.packb([1, 2]),
        msgpack.packb({"a": msgpack.ExtType(9, b"x")}),
        msgpack.packb({"a": msgpack.ExtType(1, b"|O8 1\n" + bytes(8))}),
        msgpack.packb({"a": msgpack.ExtType(1, f"<i4 {2**62}\n".encode() + bytes(8))}),
        msgpack.packb({"a": msgpack.ExtType(1, b"<i4 3\n" + bytes(8))}),
        b"\x91" * 5000,
    ],
    ids=["pickle", "list", "extension", "objects", "huge shape", "short", "deep"],
)
def test_payload_that_was_never_packed_is_foreign(tmp_path, payload):
    (tmp_path / "s").write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"trainer\.resume_mode=disable"):
        read_snapshot(tmp_path / "s")


def test_missing_snapshot_is_torn(good):
    good.unlink()
    with pytest.raises(TornCheckpointError, match="it is missing; resume from an earlier step"):
        read_snapshot(good)


def test_write_that_dies_leaves_the_snapshot_before_it(good, monkeypatch):
    def power_cut(descriptor):
        raise OSError("power cut")

    monkeypatch.setattr("os.fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        write_snapshot(good, {"other": 1})
    assert same(read_snapshot(good), STATE)


# -- checkpoint directories --------------------------------------------------------------------------------------------


def checkpoint(run_dir, step, *, seal=True):
    step_dir = run_dir / f"global_step_{step}"
    manifest.begin(step_dir)
    (step_dir / "actor").mkdir(exist_ok=True)
    (step_dir / "actor" / "weights.pt").write_bytes(b"w" * 100)
    for state in ("old", "new"):
        write_snapshot(manifest.state_file(step_dir, "manager", state), {"step": step})
    if seal:
        manifest.seal(
            step_dir, manifest.Manifest(step=step, run="a", run_dir="r", state="new", made_of={"rows": 3}, kept=[step])
        )
    return step_dir


def test_checkpoint_is_torn_from_its_beginning_until_it_is_sealed(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    whole = manifest.verify(step_dir)
    assert (whole.step, whole.run, whole.made_of, whole.kept) == (4, "a", {"rows": 3}, [4])
    assert whole.files.keys() == {"actor/weights.pt", "partial_rollout/manager-new.state"}
    manifest.begin(step_dir)
    for unsealed in (step_dir, checkpoint(tmp_path, 5, seal=False)):
        with pytest.raises(TornCheckpointError, match="it has no manifest: the checkpoint was not finished"):
            manifest.verify(unsealed)


def test_directory_without_our_mark_or_under_another_steps_name_is_foreign(tmp_path):
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"it has no partial_rollout/.*trainer.default_local_dir"):
        manifest.verify(tmp_path / "global_step_3")
    with pytest.raises(CheckpointError, match="its content is of step 4"):
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
        with contextlib.suppress(TornCheckpointError, CheckpointError):
            assert manifest.verify(step_dir) == whole


def test_manifest_of_an_earlier_version_is_foreign(tmp_path):
    step_dir = checkpoint(tmp_path, 4)
    path = step_dir / "partial_rollout" / "manifest.json"
    path.write_text(json.dumps({"blake2b": "0", "format": 3, "step": 4, "life": "a", "facts": {}, "files": {}}))
    with pytest.raises(CheckpointError, match=r"^[^\n]*is not of this version's format[^\n]*disable to start over$"):
        manifest.verify(step_dir)


def test_newest_whole_checkpoint_is_chosen_torn_ones_are_named_and_foreign_ones_stop(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(run_checkpoints.logger, "warning", lambda *words: warned.append(words))
    assert RunCheckpoints(tmp_path / "missing").chosen is RunCheckpoints(tmp_path).chosen is None
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 11, seal=False)
    found = RunCheckpoints(tmp_path)
    assert found.chosen == newest and found.resumed == manifest.verify(newest)
    assert "global_step_11 is torn" in warned[0][1]
    (tmp_path / "global_step_12" / "actor").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"trainer\.resume_mode=disable"):
        RunCheckpoints(tmp_path)
