"""TFRecord files: what TensorFlow 1.12 wrote is read, what is written is read, and damage is named."""

import gzip
import pathlib
import re
import struct
import tracemalloc
import zlib

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

import estimator as est

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "tfrecord"
OPTIONS = (None, "GZIP", "ZLIB")


def read(path, options=None):
    return list(est.io.tf_record_iterator(path, options))


def write(path, records, options=None):
    with est.io.TFRecordWriter(path, options) as writer:
        for record in records:
            writer.write(record)
    return path


def test_files_of_tensorflow_are_read_in_each_compression():
    records = [record for i in range(3) for record in read(GOLDEN / f"part-{i}.tfrecord")]
    assert [len(read(GOLDEN / f"part-{i}.tfrecord")) for i in range(3)] == [5, 1, 7]
    assert read(GOLDEN / "all.tfrecord.gz", "GZIP") == read(GOLDEN / "all.tfrecord.z", "ZLIB") == records
    assert read(GOLDEN / "empty.tfrecord") == []


def test_a_file_is_written_as_tensorflow_writes_it(tmp_path):
    for i in range(3):
        golden = GOLDEN / f"part-{i}.tfrecord"
        assert write(tmp_path / "file", read(golden)).read_bytes() == golden.read_bytes()


@given(st.lists(st.binary(max_size=300), max_size=5), st.sampled_from(OPTIONS))
def test_what_was_written_is_read(tmp_path_factory, records, options):
    path = write(tmp_path_factory.mktemp("records") / "file", records, options)
    assert read(path, options) == records


def test_a_writer_flushes_and_replaces(tmp_path):
    for options in OPTIONS:
        writer = est.io.TFRecordWriter(tmp_path / "file", options)
        writer.write(b"one" * 1000)
        writer.flush()
        if options is None:
            assert read(tmp_path / "file") == [b"one" * 1000]
        writer.close(), writer.close()
        assert read(tmp_path / "file", options) == [b"one" * 1000]


def test_every_damaged_byte_is_named_with_the_file_and_the_record(tmp_path):
    whole = write(tmp_path / "whole", [b"first", b"second"]).read_bytes()
    first = 12 + len(b"first") + 4
    for i in range(len(whole)):
        damaged = bytearray(whole)
        damaged[i] ^= 1
        (tmp_path / "file").write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{tmp_path}/file' is damaged at byte {first * (i >= first)}: the"):
            read(tmp_path / "file")
    for end in range(1, len(whole)):
        (tmp_path / "file").write_bytes(whole[:end])
        if end == first:
            assert read(tmp_path / "file") == [b"first"]
            continue
        with pytest.raises(ValueError, match=rf"is damaged at byte {first * (end > first)}: the"):
            read(tmp_path / "file")


@pytest.mark.parametrize(("options", "pack"), [("GZIP", gzip.compress), ("ZLIB", zlib.compress)])
def test_a_damaged_compressed_file_is_named(tmp_path, options, pack):
    whole = write(tmp_path / "file", [b"x" * 1000], options).read_bytes()
    plain = write(tmp_path / "plain", [b"x" * 1000]).read_bytes()
    for contents in (whole[:-9], b"\0" + whole[1:], plain, pack(plain[:-1])):
        (tmp_path / "file").write_bytes(contents)
        with pytest.raises(ValueError, match=rf"is damaged at byte 0 of what is unpacked by {options}: "):
            read(tmp_path / "file", options)
    (tmp_path / "file").write_bytes(whole)
    with pytest.raises(ValueError, match="Copy it again, or give the compression that it was written with"):
        read(tmp_path / "file")


def test_a_hostile_length_takes_no_memory(tmp_path):
    length = struct.pack("<Q", 2**62)
    crc = google_crc32c.value(length)
    check = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    (tmp_path / "file").write_bytes(length + struct.pack("<I", check) + b"data")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="the file ends within a record"):
            read(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_files_in_a_store_are_written_and_read():
    for options in OPTIONS:
        path = f"memory://records/{options}"
        write(path, [b"one", b"two"], options)
        assert read(path, options) == [b"one", b"two"]


@pytest.mark.parametrize("call", [est.io.TFRecordWriter, lambda *args: list(est.io.tf_record_iterator(*args))])
def test_an_unknown_compression_is_refused(tmp_path, call):
    with pytest.raises(ValueError, match=re.escape('knows the compressions "GZIP" and "ZLIB", or None; got 4.0')):
        call(tmp_path / "file", 4.0)
