"""No content of a file raises anything but an error with its path, or spoils what is beside it."""

import contextlib
import ctypes
import errno
import functools
import gc
import itertools
import json
import operator
import os
import pathlib
import shutil
import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.estimators import X, endless, make, times
from testing.refused import TEXTS, changed, paths
from testing.scenarios.evaluator import evaluate

import estimator as est
from estimator import inspect
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._export_folder import ExportFolder
from estimator.storage._json import NOT_JSON
from estimator.storage._sealed_folder import MANIFEST, _own_sum

OF_A_CHECKPOINT = [MANIFEST, "_CHECKPOINT_METADATA", "arrays/_METADATA", "arrays/_sharding"]
READS = [
    est.goodput,
    lambda path: est.load_variable(path, "w"),
    lambda path: est.load_variable(path / "ckpt-4", "w"),
    lambda path: inspect.main([str(path), "--variables"]),
]
RUNS = [
    lambda path: make(path).evaluate(times(1)),
    lambda path: make(path).evaluate(times(1), checkpoint_path=str(path / "ckpt-4")),
    lambda path: make(path).train(endless, steps=1),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model_dir with all files that a run, its evaluator and a tracker write."""
    path = tmp_path_factory.mktemp("trained")
    config = {"save_checkpoints_steps": 2, "save_summary_steps": 1, "trackers": [est.trackers.CsvTracker()]}
    evaluate(make(path, **config).train(endless, max_steps=4), 4)
    make(path, **config).evaluate(times(1))
    os.rename(make(path).export_model(path / "exports", X), path / "export")
    return path


def reseal(folder, name, contents):
    """Writes a file of a sealed folder, and a manifest that agrees with it."""
    file = pathlib.Path(folder.file(name))
    if name != folder.manifest:
        file.write_bytes(contents)
        folder.seal()
        return
    with contextlib.suppress(*NOT_JSON):
        manifest = json.loads(contents)
        manifest.pop("crc32c_of_this")
        contents = json.dumps(manifest | {"crc32c_of_this": _own_sum(manifest)}).encode()
    file.write_bytes(contents)


@pytest.fixture
def left_by_errors():
    """Collected once for all examples, since that takes seconds late in a run: orbax leaves a coroutine."""
    yield
    gc.collect()


@pytest.mark.quick
@pytest.mark.usefixtures("left_by_errors")
@pytest.mark.filterwarnings("ignore:coroutine 'ArrayHandler.metadata' was never awaited")
@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data(), run=st.sampled_from(RUNS))
def test_any_contents_of_a_checkpoint_are_read_or_an_error_that_names_it(trained, tmp_path_factory, name, data, run):
    path = shutil.copytree(trained, tmp_path_factory.mktemp("hostile"), dirs_exist_ok=True)
    reseal(Checkpoint(str(path / "ckpt-4")), name, data.draw(changed((path / "ckpt-4" / name).read_bytes())))
    assert est.checkpoints(path)[0].damage is None
    for read in (*READS, run):
        try:
            read(path)
        except (ValueError, SystemExit) as error:
            assert str(path) in str(error)


def evaluate_once(path):
    make(path, trackers=[est.trackers.CsvTracker()]).evaluate(times(1))


EMPTY, CUT, LIST, DICT = TEXTS[:4]
SMALL = {  # by file: what reads it, and contents that it tells apart
    "eval/evaluated.json": (lambda path: evaluate(make(path), 4), [CUT, LIST, DICT]),
    "run_id.txt": (evaluate_once, [EMPTY, CUT]),
    "eval/metrics.csv": (evaluate_once, [EMPTY, CUT]),
    "eval/history.jsonl": (evaluate_once, [CUT, DICT]),
    "history.jsonl": (lambda path: make(path).train(endless, steps=1), [EMPTY, LIST]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, contents", [(name, text) for name, (_, texts) in SMALL.items() for text in texts])
def test_a_damaged_small_file_ends_no_run(trained, tmp_path, errors, name, contents):
    path = shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (path / name).write_bytes(contents)
    for _ in range(2):
        SMALL[name][0](path)
    assert len(errors()) <= 1 and all(str(path / name) in error for error in errors())


@pytest.mark.parametrize("name", [MANIFEST, "_CHECKPOINT_METADATA", "arrays/variables/w/0.0"])
def test_an_object_of_a_store_that_cannot_be_read_is_damage_of_its_checkpoint(monkeypatch, name):
    url = f"memory://{uuid.uuid4().hex}/run"
    make(url, save_checkpoints_steps=2).train(endless, max_steps=4)
    open_object = MemoryFileSystem._open

    def fail(self, path, *args, **kwargs):
        if path.endswith(f"ckpt-4/{name}"):
            raise OSError(errno.EIO, "Internal error")  # as s3fs, after all its tries
        return open_object(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "_open", fail)
    assert est.load_variable(url, "global_step") == 2 and make(url).evaluate(times(1))["global_step"] == 2
    assert [each.step for each in est.checkpoints(url)] == [0, 2, 4]


@contextlib.contextmanager
def opened_in(directory):
    """Yields a list that has, after the block, what the system says was opened in a directory, by whatever library."""
    libc, opened = ctypes.CDLL(None), []
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, os.fsencode(directory), 0x20) > 0  # IN_OPEN
    try:
        yield opened
        with contextlib.suppress(BlockingIOError):
            opened.append(os.read(watch, 10_000))
    finally:
        os.close(watch)


def with_name(tree, path, name, is_key):
    """JSON in which a text, or a key, is a name, and each array of a checkpoint has a folder of its own."""
    tree = json.loads(json.dumps(tree)) | ({"use_ocdbt": False} if "use_ocdbt" in tree else {})
    *keys, last = path
    inner = functools.reduce(operator.getitem, keys, tree)
    if is_key:
        inner[name] = inner.pop(last)
    else:
        inner[last] = name
    return json.dumps(tree).encode()


OF_AN_EXPORT = ["checksums.json", "metadata.json"]
ARRAY = {"chunks": [2, 1], "compressor": None, "dtype": "<f4", "fill_value": None, "filters": None, "order": "C"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine 'ArrayHandler.metadata' was never awaited")
@pytest.mark.parametrize("name", [*OF_A_CHECKPOINT, *OF_AN_EXPORT])
def test_nothing_outside_of_a_folder_is_opened_by_any_name_in_any_file(trained, tmp_path, name):
    path, outside = shutil.copytree(trained, tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    for file in (".zarray", "0.0", "secret"):
        (outside / file).write_text(json.dumps(ARRAY | {"shape": [2, 1], "zarr_format": 2}))
    is_export = name in OF_AN_EXPORT
    folder = ExportFolder(str(path / "export")) if is_export else Checkpoint(str(path / "ckpt-4"))
    reads = [lambda path: est.load_variable(path, "w"), *[est.load_exported] * is_export]
    tree = json.loads(pathlib.Path(folder.file(name)).read_bytes())
    up = "../" * (2 + name.count("/")) + "outside"
    names = itertools.cycle([str(outside), up, f"{outside}/secret", f"{up}/secret"])
    with opened_in(outside) as opened:
        for at, text in zip(paths(tree), names, strict=False):
            for is_key in {True, False} if isinstance(at[-1], str) else {False}:
                reseal(folder, name, with_name(tree, at, text, is_key))
                for read in reads:
                    with contextlib.suppress(ValueError):
                        read(folder.path)
    assert opened == []
    gc.collect()
