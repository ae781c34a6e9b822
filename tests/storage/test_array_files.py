"""Damaged and hostile `.npz` and `.safetensors` files: one error, which names the file and what is wrong."""

import json
import os
import re
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import estimator as est

ARRAYS = {"w": np.arange(4, dtype=np.float32), "n": np.array([[7, 8]]), "none": np.zeros((0, 3), np.float32)}
CODES = {"float32": "F32", "int64": "I64"}


def entry(begin, end, shape=(4,), dtype="F32", **changes):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **changes}


def safetensors(path, header, data=bytes(64), length=None):
    """A file with that header, which may be bytes, or something that JSON knows."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def npz(path, shape="(4,)", dtype="'<f4'", header=None):
    """A file of 16 bytes of data, whose header says something else."""
    text = header or f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("w.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode() + bytes(16))
    return path


TWICE = json.dumps({"w": entry(0, 16), "v": entry(16, 32)}).replace('"v"', '"w"').encode()
SAFETENSORS = {
    "before the data": ({"w": entry(-8, 8)}, "its array 'w' lies from -8 to 8"),
    "backwards": ({"w": entry(16, 0)}, "its array 'w' lies from 16 to 0"),
    "overlapping": ({"a": entry(0, 16), "b": entry(8, 24)}, "its arrays 'a' and 'b' overlap"),
    "too few bytes": ({"w": entry(0, 8)}, "its array 'w', float32[4], needs 16 bytes and has 8"),
    "huge": ({"w": entry(0, 16, [10**13])}, "its array 'w', float32[10000000000000], needs 40000000000000 bytes and"),
    "past the end": ({"w": entry(0, 4 * 10**13, [10**13])}, "its end is missing"),
    "negative sizes": ({"w": entry(0, 16, [-2, -2])}, "its array 'w' has the shape [-2, -2]"),
    "no integers": ({"w": entry(0, 16, [4.0])}, "its array 'w' has the shape [4.0]"),
    "shape of no list": (
        {"w": entry(0, 16, shape="4", dtype=3)},
        "its header says of 'w': {'dtype': 3, 'shape': ['4']",
    ),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 16]}}, "its header says of 'w': {'dtype': 'F32', 'data_of"),
    "three offsets": ({"w": entry(0, 16, data_offsets=[0, 8, 16])}, "its header says of 'w': {'dtype'"),
    "an entry of no dict": ({"w": [1]}, "its header says of 'w': [1]"),
    "unknown kind": ({"w": entry(0, 16, dtype="F4")}, "its arrays of the kinds ['F4'] are not known here"),
    "a header of no dict": ([["w", entry(0, 16)]], "its header is not a dict of arrays"),
    "a name twice": (TWICE, "its header has a name twice, one of ['w']"),
    "nested": (b'{"w":' + b"[" * 100_000, "maximum recursion depth exceeded"),
    "many values": (b'{"w":[' + b"[]," * 500_000 + b"0]}", "its header has 1000002 values, and may have 1000000"),
    "no text": (b"\xc3{}", "'utf-8' codec can't decode"),
}
NPZ = {
    "negative sizes": ({"shape": "(-4,)"}, "its array 'w' has the shape [-4]"),
    "huge": ({"shape": "(10000000000000,)"}, "its array 'w', float32[10000000000000], needs 40000000000000 bytes and"),
    "too few bytes": ({"shape": "(8,)"}, "its array 'w', float32[8], needs 32 bytes and has 16"),
    "too many bytes": ({"shape": "(2,)"}, "its array 'w', float32[2], needs 8 bytes and has 16"),
    "objects": ({"dtype": "'|O'"}, "its array 'w' holds objects of Python, which may run code when they are read"),
    "unknown dtype": ({"dtype": "'zz'"}, "descr is not a valid dtype descriptor: 'zz'"),
    "no header": ({"header": "{{{"}, ""),
}


def check_refused(path, message):
    message = f"cannot read {str(path)!r}, which is damaged: {message}"
    with pytest.raises(ValueError, match=rf"^`est.list_variables` {re.escape(message)}[^\0]*\. Copy it again\.$"):
        est.list_variables(path)
    with pytest.raises(ValueError, match=rf"^`est.load_variable` {re.escape(message)}[^\0]*\. Copy it again\.$"):
        est.load_variable(path, "w")


@pytest.mark.parametrize("header, message", SAFETENSORS.values(), ids=SAFETENSORS)
def test_a_safetensors_file_that_contradicts_itself_is_refused(tmp_path, header, message):
    check_refused(safetensors(tmp_path / "a.safetensors", header), message)


@pytest.mark.parametrize("contents, message", NPZ.values(), ids=NPZ)
def test_an_npz_file_that_contradicts_itself_is_refused(tmp_path, contents, message):
    check_refused(npz(tmp_path / "a.npz", **contents), message)


def test_a_header_of_many_bytes_is_not_read(tmp_path):
    path = safetensors(tmp_path / "a.safetensors", {"w": entry(0, 16)}, length=10**13)
    check_refused(path, "its header is not complete")
    os.truncate(path, 10**13 + 100)  # a sparse file, which takes no room
    check_refused(path, "its header has 10000000000000 bytes, and may have 100000000")


BOMB = 100_000_000  # bytes, which are some hundred thousand in a zip file
BOMBS = {
    "a header": (zipfile.ZIP_DEFLATED, b"\x93NUMPY\2\0" + struct.pack("<I", BOMB), "EOF: reading array header"),
    "an odd compression": (zipfile.ZIP_BZIP2, b"", "its array 'w' is compressed in a way that numpy does not write"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how, start, message", BOMBS.values(), ids=BOMBS)
def test_an_npz_file_is_not_unpacked_before_it_is_known_what_it_holds(tmp_path, how, start, message):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", how) as file:
        file.writestr("w.npy", start + bytes(BOMB))
    tracemalloc.start()
    check_refused(tmp_path / "a.npz", message)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("not yours")

    path = safetensors(tmp_path / "a.safetensors", {"w": entry(0, 16)})
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PermissionError, match="not yours"):
        est.list_variables(path)


def write(path):
    """ARRAYS in a file of that kind."""
    if path.suffix == ".npz":
        np.savez(path, **ARRAYS)
    else:
        ends = np.cumsum([array.nbytes for array in ARRAYS.values()]).tolist()
        header = {
            name: entry(end - array.nbytes, end, array.shape, CODES[array.dtype.name])
            for (name, array), end in zip(ARRAYS.items(), ends, strict=True)
        }
        safetensors(path, header, b"".join(array.tobytes() for array in ARRAYS.values()))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=3), st.floats(0, 1))
def test_any_damage_is_this_error_or_leaves_arrays_that_fit(tmp_path_factory, name, flips, rest):
    path = write(tmp_path_factory.mktemp("files") / name)
    data = bytearray(path.read_bytes())
    for place, bit in flips:
        data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data if flips else data[: int(rest * len(data))])
    try:
        got = {name: est.load_variable(path, name) for name, _ in est.list_variables(path)}
    except ValueError as error:
        assert f"cannot read {str(path)!r}, which is damaged: " in str(error)
        return
    if name == "a.npz":  # which has checksums of all but the names
        for array in got.values():
            np.testing.assert_array_equal(array, next(want for want in ARRAYS.values() if want.shape == array.shape))
    assert sum(array.nbytes for array in got.values()) <= len(data)
