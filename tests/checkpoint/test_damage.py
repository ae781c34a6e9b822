"""A checkpoint is sound or it is none: what is damaged is named, and never used."""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.estimators import Numbers, endless, make, same_bits, saved_at, step_of, times, values
from testing.model_fns import minimizing, zeros
from testing.outcomes import run
from testing.scenarios import object_store as scenario
from testing.scenarios import team_lives

import estimator as est
from estimator import inspect
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.checkpoint._model_dir import list_sound
from estimator.storage import _files, _sealed_folder
from estimator.storage._sealed_folder import MANIFEST, MARK, DamagedError, SealedFolder

METADATA = "_CHECKPOINT_METADATA"


def largest(path):
    """The file that holds the arrays."""
    files = {name: size for name, size in _files.files_in(str(path)).items() if "/d/" in name}
    return pathlib.Path(path, max(files, key=files.get))


def flip(file, at=-9):
    contents = bytearray(file.read_bytes())
    contents[at] ^= 4
    file.write_bytes(contents)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def renumber(file):
    """One bit in the step that a manifest names."""
    text = file.read_text()
    at = text.index("ckpt-") + len("ckpt-")
    file.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])


def rename(path, name):
    """Names another folder in a manifest, with the right checksum."""
    _, files = Checkpoint(path).read_manifest()
    SealedFolder(path)._write_manifest(name, files)


def put(make_one, name, *args):
    """Puts something else into the place of a file."""

    def harm(path):
        (path / name).unlink(missing_ok=True)
        make_one(*args, path / name)

    return harm


DAMAGES = {
    "no metadata": (lambda path: (path / METADATA).unlink(), f"{METADATA} is missing"),
    "zero-length metadata": (lambda path: (path / METADATA).write_bytes(b""), f"{METADATA} has 0 bytes"),
    "a bit in the metadata": (lambda path: flip(path / METADATA, 40), f"{METADATA} does not have the checksum"),
    "a bit in the arrays": (lambda path: flip(largest(path)), "arrays/.* does not have the checksum that"),
    "arrays that were cut": (lambda path: cut(largest(path)), r"arrays/.* has \d+ bytes; \d+ were written"),
    "no arrays": (lambda path: largest(path).unlink(), "arrays/.* is missing"),
    "no metadata of arrays": (lambda path: (path / "arrays/_METADATA").unlink(), "arrays/_METADATA is missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
    "half a manifest": (lambda path: cut(path / MANIFEST), "manifest.json is not what was written"),
    "another step in the manifest": (lambda path: renumber(path / MANIFEST), "manifest.json is not what was written"),
    "another name in the manifest": (lambda path: rename(path, "../ckpt-8"), r"manifest.json .* names the folder"),
    "a folder for a manifest": (put(os.mkdir, MANIFEST), r"manifest.json cannot be read \(Is a directory"),
    "an endless manifest": (put(os.symlink, MANIFEST, "/dev/zero"), "manifest.json cannot be read .*not a regular"),
    "a bad sector": (put(os.symlink, MANIFEST, "/proc/self/mem"), r"manifest.json .* read \(Input/output error"),
    "a link to itself": (put(os.symlink, METADATA, METADATA), f"{METADATA} is not a regular file"),
    "a pipe": (put(os.mkfifo, MARK), f"{MARK} is not a regular file"),
    "not whole": (lambda path: (path / "commit_success.txt").unlink(), "commit_success.txt is missing"),
}


# For what looks only at whether there is damage, one of each file, and one that must not be read.
few_damages = pytest.mark.parametrize(
    "damage", ["no metadata", "a bit in the arrays", "an endless manifest", "not whole"], indirect=True
)


@pytest.fixture(params=DAMAGES)
def damage(request):
    return DAMAGES[request.param]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model_dir with a checkpoint every two steps, up to 10."""
    return make(tmp_path_factory.mktemp("trained"), save_checkpoints_steps=2, keep_checkpoint_max=None).train(
        endless, max_steps=10
    )


@pytest.fixture
def copy_trained(trained, tmp_path):
    """Copies what that training had after some steps."""

    def copy(steps):
        for step in range(0, steps + 1, 2):
            shutil.copytree(f"{trained.model_dir}/ckpt-{step}", tmp_path / f"ckpt-{step}")

    return copy


@pytest.mark.quick
@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_replaced(tmp_path, damage, copy_trained, errors, messages):
    harm, reason = damage
    copy_trained(4)
    path = tmp_path / "ckpt-4"
    harm(path)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest(Checkpoint.verify) == str(tmp_path / "ckpt-2")
    (error,) = errors()
    assert re.match(f"The checkpoint {path} is damaged: {reason}", error)
    assert checkpoints.save(state_of(4)) == checkpoints.latest(Checkpoint.verify) == str(path)
    assert any(line.startswith(f"The checkpoint {path}, which is damaged, is replaced: ") for line in messages())
    assert {each.damage for each in est.checkpoints(tmp_path)} == {None}


def state_of(step):
    return est.State({"w": jnp.ones(2)}, {}, jnp.int32(step), jax.random.key(0))


@pytest.mark.quick
@pytest.mark.slow
@few_damages
def test_training_resumes_from_the_newest_sound_checkpoint(tmp_path, damage, trained, copy_trained, errors):
    """Whatever is damaged of older ones."""
    harm, reason = damage
    copy_trained(6)
    for step in (2, 6):
        harm(tmp_path / f"ckpt-{step}")
    resumed = make(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=3).train(endless, max_steps=10)
    (error,) = errors()
    assert re.match(f"The checkpoint {tmp_path / 'ckpt-6'} is damaged: {reason}", error)
    assert same_bits(resumed, trained)
    assert saved_at(tmp_path) in ([6, 8, 10], [2, 6, 8, 10])


@pytest.mark.quick
@pytest.mark.slow
@few_damages
def test_evaluation_and_prediction_read_the_newest_sound_checkpoint(tmp_path, damage, trained, copy_trained, errors):
    """Also once the damaged one has been mended, and was damaged again."""
    harm, _ = damage
    copy_trained(4)
    path = tmp_path / "ckpt-4"
    harm(path)
    assert make(tmp_path).evaluate(times(1))["global_step"] == 2
    rows = [row["y"] for row in make(tmp_path).predict(lambda: [scenario.X[:, :2]])]
    (expected,) = make(tmp_path).get_variable_value(["w"]).values()
    np.testing.assert_allclose(rows, (scenario.X[:, :2] @ expected)[:, 0], rtol=1e-6)
    assert step_of(make(tmp_path)) == 2 and len(errors()) == 1
    with pytest.raises(DamagedError, match="ckpt-4 is damaged: .*--verify` says which are sound"):
        make(tmp_path).evaluate(times(1), checkpoint_path=str(path))
    shutil.rmtree(path)
    shutil.copytree(f"{trained.model_dir}/ckpt-4", path)
    assert make(tmp_path).evaluate(times(1))["global_step"] == 4
    harm(path)
    assert make(tmp_path).evaluate(times(1))["global_step"] == 2


def test_an_evaluation_with_the_state_in_memory_needs_no_sound_files_but_training_does(tmp_path, trained):
    estimator = make(tmp_path, save_checkpoints_steps=2).train(endless, max_steps=4)
    before = estimator.evaluate(times(1))
    cut(largest(tmp_path / "ckpt-4"))
    assert estimator.evaluate(times(1)) == before
    assert make(tmp_path).evaluate(times(1))["global_step"] == 2
    assert same_bits(estimator.train(endless, max_steps=10), trained)


@pytest.mark.quick
@pytest.mark.slow
@few_damages
def test_training_never_begins_anew_beside_damaged_checkpoints(tmp_path, damage, copy_trained):
    harm, reason = damage
    copy_trained(2)
    for step in (0, 2):
        harm(tmp_path / f"ckpt-{step}")
    for call in (
        lambda: make(tmp_path).train(endless, max_steps=4),
        lambda: make(tmp_path).evaluate(times(1)),
        lambda: make(tmp_path).get_variable_value("w"),
        lambda: list(make(tmp_path).predict(lambda: [scenario.X[:, :2]])),
    ):
        with pytest.raises(DamagedError, match=f"ckpt-2 is damaged: {reason}"):
            call()
    assert saved_at(tmp_path) == [0, 2]


def test_the_input_resumes_at_the_position_of_the_sound_checkpoint(tmp_path):
    def train(batches, max_steps):
        def loss_of(features, labels):
            zeros("total", trainable=False)
            est.assign_add("total", features[0].astype(jnp.float32))
            return zeros("w")

        return make(tmp_path, minimizing(loss_of), save_checkpoints_steps=3).train(lambda: batches, max_steps=max_steps)

    train(Numbers(), 6)
    flip(tmp_path / "ckpt-6" / "_CHECKPOINT_METADATA", 40)
    batches = Numbers()
    estimator = train(batches, 8)
    assert batches.set == [3] and estimator.get_variable_value("total") == sum(range(8))


def test_a_damaged_checkpoint_is_listed_and_named_by_the_command(tmp_path, copy_trained, capsys):
    copy_trained(6)
    cut(tmp_path / "ckpt-6" / METADATA)
    flip(largest(tmp_path / "ckpt-4"))
    flip(tmp_path / "ckpt-0" / METADATA, 40)
    infos = est.checkpoints(tmp_path)
    assert [each.step for each in infos] == [0, 2, 4, 6] and [each.damage for each in infos[1:3]] == [None] * 2
    assert infos[3].damage.startswith(f"{METADATA} has ") and infos[3].time == 0.0
    assert infos[0].damage.startswith(f"{METADATA} does not have the checksum") and infos[0].time == 0.0
    assert make(tmp_path).latest_checkpoint() == str(tmp_path / "ckpt-4")
    inspect.main([str(tmp_path)])
    assert "damaged: _CHECKPOINT_METADATA has" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(SystemExit) as error:
        inspect.main([str(tmp_path), "--verify"])
    lines = capsys.readouterr().out.splitlines()
    assert error.value.code == 1
    assert [line.partition(": ")[2].split()[0] for line in lines] == ["damaged:", "sound", "damaged:", "damaged:"]
    inspect.main([str(tmp_path / "ckpt-2"), "--verify"])
    assert capsys.readouterr().out == f"{tmp_path}/ckpt-2: sound\n"


def test_damaged_checkpoints_do_not_count_as_those_to_keep(tmp_path, copy_trained):
    copy_trained(6)
    for step in (4, 6):
        cut(tmp_path / f"ckpt-{step}" / METADATA)
    Checkpoints(tmp_path, 2).save(state_of(9))
    assert saved_at(tmp_path) == [2, 4, 6, 9] and [each.step for each in list_sound(str(tmp_path))] == [2, 9]


def as_of_version_0_1(path):
    os.remove(path / MANIFEST)
    os.remove(path / MARK)


def test_a_checkpoint_without_a_manifest_of_an_earlier_version_still_loads(tmp_path, copy_trained, capsys, errors):
    copy_trained(4)
    before = values(make(tmp_path))
    as_of_version_0_1(tmp_path / "ckpt-4")
    assert values(make(tmp_path)).keys() == before.keys() and step_of(make(tmp_path)) == 4
    assert step_of(make(tmp_path).train(endless, max_steps=5)) == 5
    inspect.main([str(tmp_path), "--verify"])
    assert "ckpt-4: cannot be verified, it has no checksums" in capsys.readouterr().out
    assert errors() == []


@pytest.mark.parametrize("name", [METADATA, "arrays/_METADATA"])
def test_an_empty_file_in_a_checkpoint_of_an_earlier_version_is_named(tmp_path, copy_trained, name):
    copy_trained(4)
    for step in (0, 2, 4):
        as_of_version_0_1(tmp_path / f"ckpt-{step}")
    (tmp_path / "ckpt-4" / name).write_bytes(b"")
    assert est.checkpoints(tmp_path)[-1].damage.startswith(f"{name} is not what was written")
    assert make(tmp_path).evaluate(times(1))["global_step"] == 2


def test_all_is_on_the_disk_before_the_checkpoint_has_its_name_and_before_others_go(tmp_path, monkeypatch):
    happened = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(file):
        happened.append(("sync", os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def noted_rename(old, new):
        happened.append(("rename", str(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    make(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=1).train(endless, max_steps=1)
    written = str(tmp_path / "ckpt-1")
    named = happened.index(("rename", written))
    unfinished = f"{written}.unfinished/ckpt-1"
    inside = {unfinished, *(os.path.join(unfinished, name) for name in _files.files_in(written) if "ENDED" not in name)}
    folders = {os.path.dirname(name) for name in inside if name != unfinished}
    synced = {name for what, name in happened[:named] if what == "sync"}
    assert inside | folders <= synced and len(inside) > 8
    assert happened.index(("sync", str(tmp_path)), named) < happened.index(("rename", str(tmp_path / "ckpt-0.removed")))


def test_the_end_of_the_input_is_in_the_manifest(tmp_path):
    make(tmp_path).train(times(3))
    assert json.loads((tmp_path / "ckpt-3" / MANIFEST).read_text())["crc32c"]["INPUT_ENDED"] == [0, "00000000"]
    os.remove(tmp_path / "ckpt-3" / "INPUT_ENDED")
    assert est.checkpoints(tmp_path)[-1].damage == "INPUT_ENDED is missing"


@pytest.mark.slow
def test_a_checkpoint_is_listed_and_verified_while_files_are_added_to_it(tmp_path, copy_trained):
    path = str(tmp_path / "ckpt-2")
    copy_trained(2)

    def add():
        for index in range(40):
            SealedFolder(path).add_empty_file(f"MARK_{index % 3}")

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        added = thread.submit(add)
        while not added.done():
            assert Checkpoints(tmp_path).latest(Checkpoint.verify) == path
            assert est.checkpoints(tmp_path)[-1].damage is None
        added.result()


def test_a_file_is_hashed_once_while_it_does_not_change(tmp_path, copy_trained, monkeypatch):
    copy_trained(2)
    hashed, open_regular = [], _sealed_folder.open_regular
    monkeypatch.setattr(_sealed_folder, "open_regular", lambda path: hashed.append(path) or open_regular(path))
    estimator = make(tmp_path)
    estimator.evaluate(times(1))
    values(estimator)
    assert len(hashed) == len(set(hashed)) and str(largest(tmp_path / "ckpt-2")) in hashed


@pytest.mark.slow
def test_two_processes_agree_on_the_sound_checkpoint(tmp_path):
    alone, both = scenario.sharded(str(tmp_path / "alone")), str(tmp_path / "both")
    alone.train(lambda: team_lives.Source(positions=False), max_steps=8)
    shutil.copytree(tmp_path / "alone", both)
    flip(largest(f"{both}/ckpt-8"))
    (one,), (other,) = run("testing.scenarios.object_store.train_sharded", both, 8)
    assert one == other
    for name, value in alone.get_variable_value("*").items():
        np.testing.assert_allclose(one["values"][name], value, rtol=2e-5, atol=2e-6, err_msg=name)
