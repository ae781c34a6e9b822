"""Files in a store are written, listed and removed as in a local directory."""

import os
import pathlib
import uuid

import pytest

import estimator as est
from estimator.storage import _files
from estimator.storage._folders import LocalCopy, WorkingFolder, upload


@pytest.fixture(params=["local", "memory"])
def base(request, tmp_path):
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def test_files_by_path(base):
    path = f"{base}/run/a.txt"
    assert not _files.exists(path) and _files.list_dir(f"{base}/run") == [] and not _files.is_dir(f"{base}/run")
    for missing in (_files.read, _files.remove):
        with pytest.raises(FileNotFoundError):
            missing(path)
    if not _files.is_url(base):
        os.makedirs(f"{base}/run/deep")
    for contents in (b"one", b"another"):
        _files.write(path, contents)
        assert _files.read(path) == contents
    _files.write(f"{base}/run/deep/b", b"")
    assert _files.is_dir(f"{base}/run") and not _files.is_dir(path) and _files.exists(path)
    assert sorted(_files.list_dir(f"{base}/run")) == ["a.txt", "deep"]
    assert _files.files_in(f"{base}/run") == {"a.txt": 7, "deep/b": 0}
    _files.remove(path)
    assert _files.list_dir(f"{base}/run") == ["deep"]
    _files.remove_dir(f"{base}/run")
    assert not _files.is_dir(f"{base}/run")
    with pytest.raises(FileNotFoundError):
        _files.remove_dir(f"{base}/run")


def test_paths_are_compared_in_one_form():
    assert _files.normalize("s3://bucket/run/") == "s3://bucket/run" == _files.make_absolute("s3://bucket/run/")
    assert _files.normalize("/tmp//run/") == "/tmp/run"


def test_a_working_folder_is_written_back(base):
    WorkingFolder(f"{base}/run", ["log"]).upload()
    for line in (b"one\n", b"two\n"):
        folder = WorkingFolder(f"{base}/run", ["log"])
        with open(f"{folder.path}/log", "ab") as file:
            file.write(line)
        folder.upload()
    assert _files.read(f"{base}/run/log") == b"one\ntwo\n"


def test_copies_live_as_long_as_what_holds_them():
    base = f"memory://{uuid.uuid4().hex}"
    _files.write(f"{base}/deep/a", b"one")
    _files.write(f"{base}/b", b"another")
    copy = LocalCopy(base)
    path = copy.path
    copy.fetch(lambda name: name == "deep/a")
    assert _files.files_in(path) == {"deep/a": 3}
    copy.fetch()
    assert _files.files_in(path) == {"deep/a": 3, "b": 7}
    del copy
    assert not _files.exists(path)


def test_the_mark_of_a_whole_folder_comes_last(tmp_path, monkeypatch):
    for name in ("a", "mark", "z"):
        (tmp_path / name).write_text(name)
    base = f"memory://{uuid.uuid4().hex}"
    store, _ = _files.store_of(base)
    uploads = []
    monkeypatch.setattr(type(store), "put", lambda self, sources, urls: uploads.append([url[-1] for url in urls]))
    upload(str(tmp_path), base, last=("mark",))
    assert uploads == [["a", "z"], ["k"]]


def test_the_package_of_a_store_that_is_missing_is_one_clear_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")  # as fsspec does

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    for url, extra in [("s3://bucket/run", "s3"), ("gs://bucket/run", "gcs")]:
        with pytest.raises(ImportError) as error:
            est.Estimator(lambda features, mode: None, url)
        assert str(error.value) == (
            f"{url!r} is in a store that needs another package. Install it in your clone: "
            f"pip install -e '.[{extra}]'. (Install s3fs to access S3)"
        )


def test_a_url_that_pathlib_has_changed_is_an_error():
    with pytest.raises(ValueError, match="must have two slashes in the URL of a store; got 's3:/bucket/run'. `pathlib"):
        est.Estimator(lambda features, mode: None, pathlib.Path("s3://bucket/run"))


def test_a_url_of_no_known_store_is_an_error():
    with pytest.raises(ValueError, match="'s4://bucket/run' is neither a local path nor a URL that fsspec knows"):
        est.Estimator(lambda features, mode: None, "s4://bucket/run")
