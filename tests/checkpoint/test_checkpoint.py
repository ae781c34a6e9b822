import json
import os
import pathlib
import re
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from testing.cluster import shared_cluster
from testing.scenarios.lives import State, make_state

from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints, CheckpointWriteError
from estimator.checkpoint._model_dir import list_sound
from estimator.storage._sealed_folder import SealedFolder


def abstract(state, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(lambda: state),
    )


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_state_comes_back_as_it_was(tmp_path):
    state = make_state(7)
    path = Checkpoints(tmp_path / "not" / "yet").save(state)
    assert path == str(tmp_path / "not" / "yet" / "ckpt-7")
    restored = Checkpoint(path).restore(abstract(state))
    assert_same(restored, state)
    assert jax.random.uniform(restored.key) == jax.random.uniform(state.key)
    assert restored.global_step.sharding == jnp.zeros(()).sharding


def test_a_relative_directory_stays_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Checkpoints("model").save(make_state(1))
    assert path == "model/ckpt-1" == Checkpoints("model").latest()
    assert_same(Checkpoint(path).restore(abstract(make_state())), make_state(1))


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize(
    ("spec", "num_devices"),
    [(PartitionSpec(), 4), (PartitionSpec("d"), 2)],
)
def test_any_number_of_devices_reads_what_eight_wrote(tmp_path, spec, num_devices):
    state = make_state(2)
    eight = NamedSharding(Mesh(jax.devices(), "d"), spec)
    variables = state.variables | {"w1": jax.device_put(state.variables["w1"], eight)}
    path = Checkpoints(tmp_path).save(state._replace(variables=variables))
    few = NamedSharding(Mesh(jax.devices()[-num_devices:], "d"), PartitionSpec())
    like = abstract(state, few)
    cut = NamedSharding(few.mesh, spec)
    like.variables["w1"] = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=cut)
    restored = Checkpoint(path).restore(like)
    assert_same(restored, state)
    assert restored.variables["w1"].sharding == cut
    assert restored.key.sharding == few


def test_a_process_with_fewer_devices_reads_what_eight_wrote(tmp_path):
    state = jax.device_put(make_state(2), NamedSharding(Mesh(jax.devices(), "d"), PartitionSpec()))
    path = Checkpoints(tmp_path).save(state)
    (ended,) = shared_cluster().run("testing.scenarios.lives.read_checkpoint", path, "w1", processes=1)
    assert ended.code == 0 and ended.lines[-1] == f"2 {[[2.0, 2.0]] * 8}", ended.lines


def test_names_are_readable(tmp_path):
    path = Checkpoints(tmp_path).save(make_state())
    assert [name for name in Checkpoint(path).names() if "nu" not in name] == [
        "adam/0/count",
        "adam/0/mu/count",
        "adam/0/mu/net/params/Dense_0/kernel",
        "adam/0/mu/scope/b",
        "adam/0/mu/w1",
        "count",
        "global_step",
        "net/params/Dense_0/kernel",
        "scope/b",
        "w1",
    ]
    for name in Checkpoint(path).names():
        assert isinstance(Checkpoint(path).read(name), np.ndarray)
    np.testing.assert_array_equal(Checkpoint(path).read("net/params/Dense_0/kernel"), np.full((2, 2), 3.0))


def test_a_slot_named_as_a_variable_is_kept_apart(tmp_path):
    state = State({"a/b": jnp.ones(1)}, {"a": {"b": jnp.zeros(1)}}, jnp.int32(0), jax.random.key(0))
    path = Checkpoints(tmp_path).save(state)
    assert Checkpoint(path).names() == ["a/b", "global_step", "slots/a/b"]
    assert (Checkpoint(path).read("a/b"), Checkpoint(path).read("slots/a/b")) == (1, 0)
    assert_same(Checkpoint(path).restore(abstract(state)), state)


def test_two_variables_of_one_name_are_an_error(tmp_path):
    variables = {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
    state = State(variables, {}, jnp.int32(0), jax.random.key(0))
    with pytest.raises(ValueError, match="Two variables have the name 'variables/a/b'.*Rename"):
        Checkpoints(tmp_path).save(state)
    assert Checkpoints(tmp_path).latest() is None


def test_an_unknown_name_is_an_error_with_the_near_ones(tmp_path):
    path = Checkpoints(tmp_path).save(make_state())
    with pytest.raises(ValueError, match=r"ckpt-0 has no variable 'scope/c'.*one of \['scope/b'"):
        Checkpoint(path).read("scope/c")


@pytest.mark.covers("1.3 structure mismatch on resume", "13 15 names and renames")
def test_every_difference_is_named_in_one_error(tmp_path):
    state = make_state()
    path = Checkpoints(tmp_path).save(state)
    variables = dict(state.variables)
    del variables["count"]
    variables |= {"w1": jnp.ones((8, 3)), "scope/b": jnp.ones(3), "new": jnp.ones(1)}
    with pytest.raises(ValueError) as error:
        Checkpoint(path).restore(abstract(state._replace(variables=variables, slots={})))
    lines = str(error.value).splitlines()
    assert re.match("The variables of checkpoint .*ckpt-0 are not those of the model", lines[0])
    for line in [
        "  missing: new, float32[1] in the model",
        "  unexpected: count, int32[] in the checkpoint",
        "  unexpected: adam/0/mu/w1, float32[8, 2] in the checkpoint",
        "  mismatched: w1, float32[8, 2] in the checkpoint, float32[8, 3] in the model",
        "  mismatched: scope/b, bfloat16[3] in the checkpoint, float32[3] in the model",
    ]:
        assert line in lines
    assert "use another model_dir" in lines[-1]
    assert len(lines) == 2 + 4 + 9


def test_another_kind_of_key_is_a_difference(tmp_path):
    state = make_state()
    path = Checkpoints(tmp_path).save(state)
    other = state._replace(key=jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"mismatched: key, uint32\[2\] .*, uint32\[4\]"):
        Checkpoint(path).restore(abstract(other))
    assert_same(Checkpoint(Checkpoints(tmp_path / "b").save(other)).restore(abstract(other)), other)


def test_partial_reads_only_what_is_asked_for(tmp_path):
    state = make_state(4)
    path = Checkpoints(tmp_path).save(state)
    part = state._replace(variables={"w1": state.variables["w1"]}, slots={})
    assert_same(Checkpoint(path).restore(abstract(part), partial=True), part)
    bad = part._replace(variables={"w1": jnp.ones(1), "w2": jnp.ones(1)})
    with pytest.raises(ValueError, match=r"(?s)mismatched: w1.*missing: w2") as error:
        Checkpoint(path).restore(abstract(bad), partial=True)
    assert "unexpected" not in str(error.value)


@pytest.mark.parametrize(
    "call",
    [lambda p: Checkpoint(p).names(), lambda p: Checkpoint(p).read("w"), lambda p: Checkpoint(p).restore(make_state())],
)
def test_what_is_not_a_checkpoint_is_an_error(tmp_path, call):
    for path in [tmp_path, tmp_path / "ckpt-3"]:
        with pytest.raises(ValueError, match=f"{path} is not a checkpoint. Give the path of one"):
            call(str(path))


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.covers("3 model_dir", "7 checkpoint GC")
@pytest.mark.parametrize(
    ("keep_max", "every", "kept"), [(2, None, [3, 11]), (None, 5, [1, 2, 3, 11]), (0, None, [1, 2, 3, 11])]
)
def test_the_newest_are_kept(tmp_path, keep_max, every, kept):
    checkpoints = Checkpoints(tmp_path, keep_max, every)
    for step in [1, 2, 3, 11]:
        checkpoints.save(make_state(step))
    assert steps_in(tmp_path) == kept
    assert sorted(os.listdir(tmp_path)) == sorted(f"ckpt-{step}" for step in kept)


def save_at(checkpoints, steps, hours=lambda step: step):
    """Saves steps as if each had been written the given hours after the first."""
    for step in steps:
        path = checkpoints.save(make_state(step))
        file = pathlib.Path(path, "_CHECKPOINT_METADATA")
        written = {"commit_timestamp_nsecs": int(hours(step) * 3600e9)}
        file.write_text(json.dumps(json.loads(file.read_text()) | written))
        SealedFolder(path).seal(without=["PINNED"])


def steps_in(directory):
    return [each.step for each in list_sound(str(directory))]


@pytest.mark.slow
@pytest.mark.covers("3 model_dir", "7 checkpoint GC")
@pytest.mark.parametrize(("every", "kept"), [(2, [0, 2, 4, 6, 7]), (2.5, [0, 3, 6, 7])])
def test_one_every_n_hours_is_kept_also_by_another_process(tmp_path, every, kept):
    for step in range(8):
        save_at(Checkpoints(tmp_path, 2, every), [step])
    assert steps_in(tmp_path) == kept


@pytest.mark.covers("7 checkpoint GC")
def test_a_pinned_checkpoint_stays_until_it_is_unpinned(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    save_at(checkpoints, range(3))
    pinned, also = str(tmp_path / "ckpt-1"), str(tmp_path / "ckpt-2")
    for path in (pinned, pinned, also):
        Checkpoint(path).pin()
    save_at(checkpoints, range(3, 7))
    assert steps_in(tmp_path) == [1, 2, 5, 6]
    restarted = Checkpoints(tmp_path, 2)
    assert [each.is_pinned() for each in list_sound(str(tmp_path))] == [True, True, False, False]
    assert_same(Checkpoint(pinned).restore(abstract(make_state())), make_state(1))
    assert Checkpoint(pinned).names() == Checkpoint(restarted.latest()).names()
    for path in (pinned, pinned):
        Checkpoint(path).unpin()
    save_at(restarted, [7])
    assert steps_in(tmp_path) == [2, 6, 7]
    assert [each.is_pinned() for each in list_sound(str(tmp_path))] == [True, False, False]


def test_a_pin_is_not_the_last_that_was_kept(tmp_path):
    """Otherwise what is kept for its age would depend on what was pinned, and change when it no longer is."""
    checkpoints = Checkpoints(tmp_path, 1, 2)
    save_at(checkpoints, [0, 1])
    Checkpoint(str(tmp_path / "ckpt-1")).pin()
    save_at(checkpoints, [2, 3, 4, 5])
    assert steps_in(tmp_path) == [0, 1, 2, 4, 5]


def test_a_pin_leaves_the_time_of_a_checkpoint_as_it_is(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(make_state(1))
    before = Checkpoint(path).written_ns
    Checkpoint(path).pin()
    assert Checkpoint(path).written_ns == before
    shutil.rmtree(path)
    assert Checkpoint(checkpoints.save(make_state(1))).written_ns > before
    assert not Checkpoint(path).is_pinned()


def test_only_a_checkpoint_can_be_pinned(tmp_path):
    for call in (Checkpoint.pin, Checkpoint.unpin):
        with pytest.raises(ValueError, match=f"{tmp_path}/ckpt-3 is not a checkpoint. Give the path of one"):
            call(Checkpoint(f"{tmp_path}/ckpt-3"))
    assert os.listdir(tmp_path) == []


def test_what_was_just_saved_is_never_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(make_state(9))
    path = checkpoints.save(make_state(1))
    assert steps_in(tmp_path) == [1]
    assert_same(Checkpoint(path).restore(abstract(make_state())), make_state(1))


def test_a_reader_sees_what_another_object_writes(tmp_path):
    writer, reader = Checkpoints(tmp_path / "m", 2), Checkpoints(tmp_path / "m", 2)
    assert reader.latest() is None
    for step in range(4):
        assert reader.latest() != writer.save(make_state(step)) == reader.latest()


LEFTOVERS = ["ckpt-8.unfinished", "ckpt-7.removed"]


def test_leftovers_are_neither_listed_nor_kept(tmp_path):
    for name in LEFTOVERS:
        SealedFolder(tmp_path / name).make()
        (tmp_path / name / "arrays" / "d").mkdir(parents=True)
    for name in ["ckpt-9", "eval", "ckpt-x"]:
        (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    checkpoints.save(make_state(1))
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "ckpt-9", "ckpt-x", "eval"]
    assert checkpoints.save(make_state(9)) == checkpoints.latest() == str(tmp_path / "ckpt-9")


@pytest.mark.parametrize("name", LEFTOVERS)
def test_a_folder_of_a_process_killed_before_it_was_marked_is_removed(tmp_path, name):
    (tmp_path / name).mkdir()
    Checkpoints(tmp_path).save(make_state(1))
    assert os.listdir(tmp_path) == ["ckpt-1"]


def test_nothing_is_removed_for_its_name(tmp_path):
    folders = ["removed", "ckpt-3.orbax-checkpoint-tmp", "ckpt-999", "ckpt-1.removed", *LEFTOVERS]
    theirs = [f"{folder}/notes" for folder in folders]
    for name in theirs:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("mine")
    checkpoints = Checkpoints(tmp_path, 1)
    for step in range(3):
        checkpoints.save(make_state(step))
    assert steps_in(tmp_path) == [2]
    assert [(tmp_path / name).read_text() for name in theirs] == ["mine"] * len(theirs)
    assert sorted(os.listdir(tmp_path)) == sorted(["ckpt-2", *folders])


@pytest.mark.parametrize("name", ["ckpt-5/mine.txt", "ckpt-5.unfinished/mine.txt"])
def test_what_is_in_the_place_of_a_checkpoint_stays(tmp_path, name):
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointWriteError, match=r"ckpt-5(\.unfinished)? was not "):
        Checkpoints(tmp_path).save(make_state(5))
    assert (tmp_path / name).read_text() == "mine"


def test_what_cannot_be_written_is_named_with_its_cause(tmp_path):
    state = make_state()
    message = r"(?s)ckpt-0: ValueError: Cannot save arrays with zero size: .*slots/sgd/empty.*no other checkpoint\.$"
    with pytest.raises(CheckpointWriteError, match=message):
        Checkpoints(tmp_path).save(state._replace(slots={"sgd": {"empty": jnp.zeros((0,))}}))


def newest_step(checkpoints):
    path = checkpoints.latest()
    return -1 if path is None else int(path.rsplit("-")[-1])


def test_after_a_kill_in_the_middle_of_saving_the_latest_is_whole(tmp_path):
    directory, cluster = tmp_path / "model", shared_cluster()
    like, reader, step = abstract(make_state()), Checkpoints(directory), 0
    for turn in range(3):
        cluster.start("testing.scenarios.lives.save_endlessly", directory, step, processes=1)
        cluster.wait_until(lambda last=step: newest_step(reader) >= last + 3, "it has not saved three times")
        time.sleep(0.007 * turn)  # Another moment of a save that takes some 30 ms.
        assert cluster.ended(kill=True)[0].code == -signal.SIGKILL
        step = newest_step(reader)
        assert_same(Checkpoint(reader.latest()).restore(like), make_state(step))
    Checkpoints(directory, 2).save(make_state(step + 1))
    assert len(os.listdir(directory)) == 2


def test_one_device_of_several_is_restored_to(tmp_path):
    state = make_state()
    sharding = SingleDeviceSharding(jax.devices()[5])
    restored = Checkpoint(Checkpoints(tmp_path).save(state)).restore(abstract(state, sharding))
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {sharding}
