"""The tests' own cache of compiled programs (`testing/compiled.py`)."""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest
from testing import compiled


@pytest.fixture
def entry(tmp_path):
    return compiled.Renamed(compiled.SCHEME + str(tmp_path)) / "entry"


def test_an_entry_is_there_when_it_is_whole(entry, monkeypatch):
    replace, before = os.replace, []

    def watched(*paths):
        before.append(entry.exists())
        replace(*paths)

    monkeypatch.setattr(os, "replace", watched)
    entry.write_bytes(b"program")
    assert (before, entry.read_bytes()) == ([False], b"program")


def test_a_writer_that_is_stopped_leaves_no_entry(entry, monkeypatch):
    def stopped(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        entry.write_bytes(b"program")
    assert not entry.exists()


def test_what_was_not_used_for_a_week_is_removed(entry, monkeypatch):
    monkeypatch.delenv(compiled.FOLDER)
    folder = entry.path.parent
    for name in ("entry", "old"):
        (folder / name).write_bytes(b"program")
        os.utime(folder / name, (0, 0))
    entry.read_bytes()
    compiled.make_folder(folder)
    assert [path.name for path in folder.iterdir()] == ["entry"]


def test_programs_are_kept_in_the_folder_of_all_processes():
    def only_compiled_here(x):
        return x * 3.25

    def kept():
        return [*pathlib.Path(os.environ[compiled.FOLDER]).glob("*only_compiled_here*-cache")]

    for path in kept():  # of an earlier run
        path.unlink()
    jax.jit(only_compiled_here)(jnp.ones(7))
    assert len(kept()) == 1
