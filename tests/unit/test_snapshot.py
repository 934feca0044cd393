"""A snapshot comes back as it was, or is refused in one line; its manifest finds what is cut off it or changed in it."""

import pickle

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recipe.partial_rollout.checkpoint import plain_state
from recipe.partial_rollout.checkpoint.manifest import (
    ForeignCheckpointError,
    TornCheckpointError,
    read_snapshot,
    write_snapshot,
)

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
    except ForeignCheckpointError as error:
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
    with pytest.raises(ForeignCheckpointError, match=r"trainer\.resume_mode=disable"):
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
