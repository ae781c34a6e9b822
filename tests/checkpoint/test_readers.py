"""Reading values from checkpoints of TensorFlow, .npz and .safetensors files, and this library's own."""

import json
import os
import pathlib
import re
import shutil
import struct

import google_crc32c
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.estimators import make, times

import estimator as est
from estimator.tf_checkpoint import _sstable, _tf_bundle

TENSORFLOW = pathlib.Path(__file__).parents[1] / "golden" / "tf_checkpoint"
VALUES = json.loads((TENSORFLOW / "values.json").read_text())
NAME = "model.ckpt-3"
SAFETENSORS = {np.dtype("float32"): "F32", jnp.dtype("bfloat16"): "BF16", np.dtype("int64"): "I64"}


def save_safetensors(path, arrays, **more):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": SAFETENSORS[array.dtype], "shape": array.shape, "data_offsets": offsets, **more}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.fixture
def copied(tmp_path):
    """A copy of the checkpoint, to damage it."""
    return pathlib.Path(shutil.copytree(TENSORFLOW, tmp_path / "tensorflow"))


@pytest.mark.parametrize("path", [TENSORFLOW, TENSORFLOW / NAME, TENSORFLOW / f"{NAME}.data-00000-of-00001"])
def test_names_and_shapes_of_a_tensorflow_checkpoint_are_as_tensorflow_lists_them(path):
    assert est.list_variables(path) == [(name, VALUES[name]["shape"]) for name in sorted(VALUES)]


@pytest.mark.parametrize("name", VALUES)
def test_the_values_of_a_tensorflow_checkpoint_are_those_that_it_wrote(name):
    got, want = est.load_variable(TENSORFLOW / NAME, name), VALUES[name]
    assert got.dtype == want["dtype"]
    np.testing.assert_array_equal(got, np.array(want["values"], want["dtype"]).reshape(want["shape"]))


def test_slices_of_a_partitioned_variable_have_the_keys_that_tensorflow_gives_them():
    """Written by TensorFlow 2.21, of variables of the shapes (200, 3) and (4, 70000)."""
    keys = {
        ("p/table", ((0, 67), (0, 3))): b"\x00p/table\x00\x01\x01\x02\x80\xc0C\x80\x83",
        ("p/table", ((134, 66), (0, 3))): b"\x00p/table\x00\x01\x01\x02\xc0\x86\xc0B\x80\x83",
        ("q/w", ((0, 4), (35000, 35000))): b"\x00q/w\x00\x01\x01\x02\x80\x84\xe0\x88\xb8\xe0\x88\xb8",
    }
    for (name, extents), key in keys.items():
        assert _tf_bundle._slice_key(name, list(extents)) == key


def test_slices_of_a_partitioned_variable_are_put_together(tmp_path, monkeypatch):
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    pieces = {((0, 1), (0, -1)): whole[:1], ((1, 3), (0, -1)): whole[1:]}
    data = b"".join(piece.tobytes() for piece in pieces.values())
    mask = lambda crc: ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF  # noqa: E731

    def varints(*numbers):
        return b"".join(bytes([n]) for n in numbers)  # all are below 128

    def entry(shape, offset, size, crc, slices=()):
        dims = b"".join(b"\x12\x02\x08" + varints(n) for n in shape)
        fields = b"\x08\x01\x12" + varints(len(dims)) + dims + b"\x20" + varints(offset) + b"\x28" + varints(size)
        extents = [b"\x0a\x04\x08" + varints(start) + b"\x10" + varints(size) + b"\x0a\x00" for start, size in slices]
        return (
            fields + b"\x35" + struct.pack("<I", mask(crc)) + b"".join(b"\x3a" + varints(len(e)) + e for e in extents)
        )

    table, offset = {b"": b"\x08\x01", b"w": entry((4, 3), 0, 0, 0, [extents[0] for extents in pieces])}, 0
    for extents, piece in pieces.items():
        key = _tf_bundle._slice_key("w", list(extents))
        table[key] = entry(piece.shape, offset, piece.nbytes, google_crc32c.value(piece.tobytes()))
        offset += piece.nbytes
    (tmp_path / "m.index").touch()
    (tmp_path / "m.data-00000-of-00001").write_bytes(data)
    monkeypatch.setattr(_tf_bundle, "read_table", lambda path: dict(table))
    np.testing.assert_array_equal(est.load_variable(tmp_path / "m", "w"), whole)
    del table[_tf_bundle._slice_key("w", [(1, 3), (0, -1)])]
    with pytest.raises(ValueError, match="it has no entry for the slice .* of the variable 'w'"):
        est.load_variable(tmp_path / "m", "w")


def test_npz_and_safetensors_files_give_what_was_saved(tmp_path):
    arrays = {"encoder/kernel": np.ones((2, 3), np.float32), "layer.0.bias": np.arange(4), "s": np.float32(2)}
    np.savez(tmp_path / "a.npz", **arrays)
    arrays["half"] = np.array([1.5, -2], jnp.bfloat16)
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    save_safetensors(tmp_path / "a.safetensors", arrays)
    for path in (tmp_path / "a.npz", str(tmp_path / "a.safetensors")):
        names = [name for name, _ in est.list_variables(path)]
        assert names == sorted(arrays.keys() - ({"half"} if str(path).endswith("npz") else set()))
        for name in names:
            got = est.load_variable(path, name)
            assert (got.dtype, got.tolist()) == (arrays[name].dtype, arrays[name].tolist())


def test_a_checkpoint_and_an_export_of_this_library_are_listed_too(tmp_path):
    estimator = make(tmp_path / "model").train(times(2))
    assert [name for name, _ in est.list_variables(estimator.model_dir)] == estimator.get_variable_names()
    exported = estimator.export_model(tmp_path / "exports", np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(est.load_variable(exported, "w"), estimator.get_variable_value("w"))


def dense_model(features, labels, mode):
    logits = est.layers.dense(features, 5, name="dense")
    est.get_variable("counter", (), jnp.int32, trainable=False)
    return est.EstimatorSpec(mode, predictions=logits, loss=logits.mean(), train_op=est.group())


def test_a_warm_start_takes_a_tensorflow_checkpoint(tmp_path):
    settings = est.WarmStartSettings(TENSORFLOW, ["dense/", "global_step"])
    estimator = est.Estimator(dense_model, tmp_path, warm_start_from=settings)
    estimator.train(lambda: [np.ones((2, 80), np.float32)])
    assert estimator.get_variable_value("global_step") == VALUES["global_step"]["values"][0] + 1
    for name in ("dense/kernel", "dense/bias"):
        np.testing.assert_array_equal(estimator.get_variable_value(name), est.load_variable(TENSORFLOW, name))


def test_a_warm_start_takes_numbers_of_64_bits_that_fit(tmp_path):
    np.savez(tmp_path / "a.npz", **{"dense/kernel": np.ones((80, 5)), "dense/bias": np.full(5, 0.5)})
    estimator = est.Estimator(dense_model, tmp_path / "model", warm_start_from=tmp_path / "a.npz")
    assert next(estimator.predict(lambda: [np.ones((1, 80), np.float32)])).tolist() == [80.5] * 5
    settings = est.WarmStartSettings(TENSORFLOW, ["counter"])
    estimator = est.Estimator(dense_model, tmp_path / "other", warm_start_from=settings)
    with pytest.raises(ValueError, match=r"'counter' in .*ckpt-3 holds 1099511627779, which the dtype int32 does not"):
        next(estimator.predict(lambda: [np.ones((1, 80), np.float32)]))


@pytest.mark.parametrize("call", [est.list_variables, lambda path: est.load_variable(path, "w")])
def test_a_path_without_a_checkpoint_is_an_error(tmp_path, call):
    (tmp_path / "weights.h5").touch()
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "weights.h5"):
        with pytest.raises(
            ValueError, match=rf"cannot read {str(path)!r}: it is neither a checkpoint, nor .* Give the"
        ):
            call(path)
    with pytest.raises(TypeError, match="needs a path, a string; got 3"):
        call(3)


def test_a_name_that_is_not_there_is_an_error_with_names_that_are():
    message = "has no variable 'dense/kernal'. Did you mean one of ['dense/kernel'"
    with pytest.raises(ValueError, match=re.escape(message)):
        est.load_variable(TENSORFLOW, "dense/kernal")


def damaged(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_tensorflow_checkpoint_is_an_error(copied):
    damaged(copied / f"{NAME}.data-00000-of-00001", 100)
    with pytest.raises(ValueError, match=r"data-00000-of-00001 is damaged where '.*' is. Copy it again."):
        [est.load_variable(copied, name) for name in VALUES]
    os.remove(copied / f"{NAME}.data-00000-of-00001")
    with pytest.raises(ValueError, match="the file 'model.ckpt-3.data-00000-of-00001' is not beside it"):
        est.load_variable(copied, "dense/kernel")
    damaged(copied / f"{NAME}.index", 100)
    with pytest.raises(ValueError, match=r"model.ckpt-3.index is damaged"):
        est.list_variables(copied)
    (copied / f"{NAME}.index").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"has another format, or is not complete"):
        est.list_variables(copied)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_index_of_a_tensorflow_checkpoint_is_read_or_an_error_that_names_it(data):
    table = _sstable.read_table(f"{TENSORFLOW / NAME}.index")
    key, at = data.draw(st.sampled_from(sorted(table))), data.draw(st.integers(0, 30))
    value, new = table.pop(key), data.draw(st.binary(max_size=12) | st.just(b"\xff" * 9 + b"\x7f"))
    kind = data.draw(st.integers(0, 2))
    name = data.draw(st.sampled_from([key, key, key, b"", b"\xff\xfe", b"\0x", b"../w"]))
    table[name] = [value[:at], value[:at] + new + value[at:], value[:at] + new + value[at + len(new) :]][kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tf_bundle, "read_table", lambda path: dict(table))
        try:
            for each, shape in est.list_variables(TENSORFLOW):
                assert list(est.load_variable(TENSORFLOW / NAME, each).shape) == shape
        except ValueError as error:
            assert str(TENSORFLOW / NAME) in str(error)


def test_the_index_of_a_tensorflow_checkpoint_takes_no_more_memory_than_its_size(copied):
    """Each key begins as the one before, so that a few bytes may stand for many."""
    block = b"\0\xff\x7f\0" + b"k" * 16383 + b"\xfe\x7f\1\0k" * 10_000 + struct.pack("<II", 0, 1)
    with pytest.raises(ValueError, match=r"model.ckpt-3.index has keys of \d{7} bytes in a block of 66395"):
        _sstable_of(copied / f"{NAME}.index", block)
        est.list_variables(copied)


def _sstable_of(path, block):
    mask = lambda crc: ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF  # noqa: E731
    varint = lambda n: bytes([n & 127 | 128, n >> 7 & 127 | 128, n >> 14])  # noqa: E731
    index = b"\0\1\4k" + b"\0" + varint(len(block)) + struct.pack("<II", 0, 1)
    blocks = [each + b"\0" + struct.pack("<I", mask(google_crc32c.value(each + b"\0"))) for each in (block, index)]
    footer = b"\0\0" + varint(len(blocks[0])) + bytes([len(index)])
    path.write_bytes(b"".join(blocks) + footer.ljust(40, b"\0") + struct.pack("<Q", _sstable._MAGIC))


@pytest.mark.parametrize("name", [f"../elsewhere/{NAME}", "{tmp}/elsewhere/" + NAME])
def test_a_file_called_checkpoint_leads_to_nothing_outside_of_its_directory(tmp_path, copied, name):
    copied.rename(tmp_path / "elsewhere")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "checkpoint").write_text(f'model_checkpoint_path: "{name.format(tmp=tmp_path)}"\n')
    with pytest.raises(ValueError, match="it is neither a checkpoint"):
        est.list_variables(tmp_path / "here")
    (tmp_path / "elsewhere" / "checkpoint").rename(tmp_path / "old")
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "here", dirs_exist_ok=True)
    assert len(est.list_variables(tmp_path / "here")) == len(VALUES)  # as after a copy to another place


def test_strings_are_refused_by_name(copied, monkeypatch):
    monkeypatch.setattr(_tf_bundle, "_DTYPES", {9: "int64"})  # as if the others were strings
    assert est.load_variable(copied, "counter") == VALUES["counter"]["values"][0]
    with pytest.raises(ValueError, match="'half' holds no numbers: its type is number 19 of TensorFlow's"):
        est.load_variable(copied, "half")


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_damaged_file_is_an_error(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"PK nothing else, and no header")
    with pytest.raises(ValueError, match="which is damaged: .* Copy it again"):
        est.list_variables(path)
    if name == "a.safetensors":
        save_safetensors(path, {"w": np.ones(4, np.float32)})
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ValueError, match="which is damaged: its end is missing"):
            est.list_variables(path)
        save_safetensors(path, {"w": np.ones(4, np.float32)}, dtype="F4")
        with pytest.raises(ValueError, match=re.escape("its arrays of the kinds ['F4'] are not known here")):
            est.list_variables(path)
