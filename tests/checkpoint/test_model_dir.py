"""What a model_dir may be, who may train in it, and who may read there meanwhile."""

import concurrent.futures
import contextlib
import errno
import os
import re
import shutil
import signal
import tempfile
import threading

import pytest
from testing.cluster import shared_cluster
from testing.estimators import X, Y, endless, make, saved_steps, step_of, times
from testing.hooks import At

import estimator as est
from estimator.checkpoint import _model_dir
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._model_dir import LOCK_FILE, training_in
from estimator.storage import _files

pytestmark = pytest.mark.covers("1.1 model_dir")
LIVES = "testing.scenarios.lives."


def start(function, model_dir, *args):
    shared_cluster().start(LIVES + function, model_dir, *args, processes=1, moment=(0, "blocked"))


def end():
    """Kills it; returns its exit code."""
    return shared_cluster().ended(kill=True)[0].code


def run(function, model_dir):
    """What a process that ends well has written."""
    (ended,) = shared_cluster().run(LIVES + function, model_dir, processes=1)
    assert ended.code == 0, ended.lines
    return ended.lines


def test_a_second_training_is_refused_until_the_first_is_dead(tmp_path):
    start("endless_training", tmp_path)
    with pytest.raises(RuntimeError) as raised:
        make(tmp_path).train(times(1))
    text, owner = str(raised.value), f"process {shared_cluster().pids[0]} on host {os.uname().nodename}, since "
    assert f"model_dir '{tmp_path}' is in use: {owner}" in text
    assert "trains in it" in text and "or choose another model_dir" in text
    with pytest.raises(RuntimeError, match="is in use"):
        est.train_and_evaluate(make(tmp_path), est.TrainSpec(times(1)), est.EvalSpec(times(1)))
    assert end() == -signal.SIGKILL
    assert LOCK_FILE in os.listdir(tmp_path)
    estimator = make(tmp_path)
    before = step_of(estimator)
    assert step_of(estimator.train(times(2))) == before + 2
    assert LOCK_FILE not in os.listdir(tmp_path)


def test_a_training_ends_where_a_host_that_does_not_see_its_lock_begins_another(tmp_path, messages):
    """As on a file system whose locks are of each host: the second says so, and the first saves nothing more."""
    other = "process 7 on host elsewhere, since 2000-01-01 00:00:00,"
    lock = tmp_path / LOCK_FILE
    lock.write_text(other)
    estimator = make(tmp_path, save_checkpoints_steps=2, save_checkpoints_async=False, steps_per_loop=1)
    text = f"model_dir {str(tmp_path)!r} is in use: {other} trains in it, too, as its file system does not share locks"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        estimator.train(times(9), hooks=[At(3, lambda: lock.write_text(other))])
    warning = f"model_dir {tmp_path}: {other} has not released its lock. It has died, or"
    assert any(warning in each for each in messages())
    assert saved_steps(estimator) == [0, 2] and lock.read_text() == other


def test_a_file_system_that_keeps_open_files_under_another_name_ends_no_training(tmp_path, monkeypatch):
    """As NFS does in ".nfs...", and FUSE in ".fuse_hidden...", which stay until the file is closed."""
    unlink, listed = os.unlink, "/proc/self/fd"
    if not os.path.isdir(listed):
        pytest.skip("needs a list of open files")

    def keep_if_open(path, *, dir_fd=None):
        whole = os.path.join("" if dir_fd is None else os.readlink(f"{listed}/{dir_fd}"), path)
        folder, name = os.path.split(whole)
        if name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), whole)
        with contextlib.suppress(OSError):  # of a file that is closed meanwhile
            for number in os.listdir(listed):
                if os.path.lexists(f"{listed}/{number}") and os.readlink(f"{listed}/{number}") == whole:
                    return os.rename(whole, os.path.join(folder, f".nfs{number}"))
        return unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", keep_if_open)
        patched.setattr(os, "remove", keep_if_open)
        estimator = make(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=1).train(times(3))
    kept = [*tmp_path.glob("ckpt-*.removed/.nfs*")]
    assert saved_steps(estimator) == [3] and kept
    for file in kept:
        file.unlink()  # it is closed
    estimator.train(times(1))
    assert [path.name for path in tmp_path.glob("ckpt-*")] == ["ckpt-4"]


def test_a_child_that_outlives_a_training_does_not_keep_its_lock(tmp_path):
    start("orphan_in_training", tmp_path)
    assert end() == -signal.SIGKILL
    make(tmp_path).train(times(1))


def test_two_threads_do_not_train_in_one_directory(tmp_path):
    errors = []

    def second():
        try:
            make(tmp_path).train(times(1))
        except RuntimeError as error:
            errors.append(str(error))

    def in_a_thread():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    make(tmp_path).train(times(3), hooks=[At(1, in_a_thread)])
    (error,) = errors
    assert "is in use: another thread of this process trains in it" in error
    second()
    assert len(errors) == 1


def test_the_lock_ends_with_a_training_that_fails(tmp_path):
    def input_fn():
        yield X, Y
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        make(tmp_path).train(input_fn)
    assert LOCK_FILE not in os.listdir(tmp_path)
    make(tmp_path).train(times(1))


@pytest.mark.quick
@pytest.mark.slow
def test_where_there_are_no_locks_one_line_says_so(tmp_path, monkeypatch, messages):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(_files.fcntl, "flock", flock)
    estimator = make(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=1).train(times(3))
    assert [text for text in messages() if "locked" in text] == [
        f"model_dir {tmp_path} cannot be locked ({os.strerror(errno.ENOLCK)}): nothing keeps a second training run "
        "out of it."
    ]
    assert saved_steps(estimator) == [3] and LOCK_FILE not in os.listdir(tmp_path)


def test_a_checkpoint_that_is_read_is_removed_later(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=1).train(times(1))
    with Checkpoint(estimator.latest_checkpoint()).hold():
        estimator.train(times(2))
        assert saved_steps(estimator) == [1, 3]
    estimator.train(times(1))
    assert saved_steps(estimator) == [4]


def removing(estimator, step):
    """Batches, before which a checkpoint goes away."""

    def input_fn():
        shutil.rmtree(os.path.join(estimator.model_dir, f"ckpt-{step}"))
        return [(X, Y)]

    return input_fn


def test_evaluation_and_prediction_take_the_next_newest_checkpoint(tmp_path):
    make(tmp_path, save_checkpoints_steps=1).train(times(4))
    assert make(tmp_path).evaluate(removing(make(tmp_path), 4))["global_step"] == 3
    predictions = make(tmp_path).predict(lambda: X)
    shutil.rmtree(tmp_path / "ckpt-3")
    expected = [row["y"] for row in make(tmp_path).predict(lambda: X)]
    assert [row["y"] for row in predictions] == expected


def test_a_checkpoint_that_was_asked_for_and_goes_away_is_an_error(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=1).train(times(2))
    path = estimator.latest_checkpoint()
    with pytest.raises(ValueError, match=r"ckpt-2 is not a checkpoint.*Training removes all but the newest"):
        make(tmp_path).evaluate(removing(estimator, 2), checkpoint_path=path)
    path = estimator.latest_checkpoint()
    predictions = make(tmp_path).predict(lambda: X, checkpoint_path=path)
    shutil.rmtree(path)
    with pytest.raises(ValueError, match="ckpt-1 is not a checkpoint"):
        next(predictions)


@pytest.mark.slow
def test_a_training_that_removes_checkpoints_does_not_disturb_readers(tmp_path):
    start("endless_training", tmp_path, 1)
    estimator = make(tmp_path)
    steps, rounds = set(), 0
    while len(steps) < 4 or rounds < 4:
        rounds += 1
        assert shared_cluster().is_alive()
        steps.add(estimator.evaluate(times(1))["global_step"])
        assert len(list(estimator.predict(lambda: X))) == len(X)
        assert "w" in estimator.get_variable_names()
        assert ("w", [2, 1]) in est.list_variables(tmp_path)
        steps |= {step_of(estimator), int(est.load_variable(tmp_path, "global_step"))}
    assert end() == -signal.SIGKILL


@pytest.mark.quick
@pytest.mark.slow
def test_evaluations_at_once_do_not_disturb_each_other(tmp_path):
    make(tmp_path).train(times(3))

    def evaluate(_):
        estimator = make(tmp_path)
        return [estimator.evaluate(times(1))["global_step"] for _ in range(2)]

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        assert [*threads.map(evaluate, range(3))] == [[3] * 2] * 3
    assert list(est.read_eval_metrics(tmp_path / "eval")) == [3]
    assert not [name for name in os.listdir(tmp_path / "eval") if name.endswith(".new")]


# What else may be there.


@pytest.mark.parametrize("verb", ["train", "evaluate", "predict", "get_variable_names"])
def test_checkpoints_of_tensorflow_are_not_passed_over(tmp_path, verb):
    for name in ("checkpoint", "model.ckpt-9.index", "model.ckpt-20000.index", "model.ckpt-20000.data-00000-of-00001"):
        (tmp_path / name).touch()
    args = [] if verb.startswith("get") else [times(1)]
    message = r"holds checkpoints of TensorFlow, such as 'model.ckpt-20000.index'.* `est.init_from_checkpoint\("
    with pytest.raises(ValueError, match=message):
        getattr(make(tmp_path), verb)(*args)
    assert LOCK_FILE not in os.listdir(tmp_path)


def test_a_file_is_no_model_dir(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="`model_dir` must be a directory; got the file"):
        make(tmp_path / "file")


@pytest.mark.parametrize("base", ["/proc", "file"])
def test_a_model_dir_that_cannot_be_made_is_an_error_of_training(tmp_path, base):
    (tmp_path / "file").touch()
    estimator = make(os.path.join(tmp_path, base, "models", "x"))
    with pytest.raises(OSError, match="Training cannot write its checkpoints into model_dir .* Choose a directory"):
        estimator.train(times(1))


def test_a_model_dir_that_can_only_be_read_is_evaluated_and_predicted_with():
    model_dir = tempfile.mkdtemp()
    try:
        lines = run("evaluate_without_rights", model_dir)
        assert [line for line in lines if line.startswith(("step", "rows"))] == ["step 3", "rows 4"]
        assert "\nPermissionError [Errno 13] Training cannot write its checkpoints into model_dir" in "\n".join(lines)
        assert "eval" not in os.listdir(model_dir)
    finally:
        for directory, _, _ in os.walk(model_dir):
            os.chmod(directory, 0o755)
        shutil.rmtree(model_dir)


@pytest.mark.quick
def test_a_model_dir_with_dots_in_its_path_is_trained_evaluated_and_exported_in(tmp_path):
    name = os.path.join(tmp_path, "a", "..", "b")
    estimator = make(name, save_checkpoints_steps=1, keep_checkpoint_max=2)
    exporter = est.LatestExporter("latest", X, exports_to_keep=1)
    spec = est.TrainSpec(endless, max_steps=3)
    metrics, _ = est.train_and_evaluate(estimator, spec, est.EvalSpec(times(1), exporters=exporter))
    assert metrics["global_step"] == 3 and saved_steps(estimator) == [2, 3]
    again = make(name).train(times(1))
    assert step_of(again) == 4 and again.evaluate(times(1))["global_step"] == 4
    assert list(est.read_eval_metrics(again.eval_dir()))[-1] == 4
    assert os.listdir(tmp_path) == ["b"] and again.model_dir == str(tmp_path / "b")


@pytest.mark.slow
def test_a_model_dir_may_have_any_characters(tmp_path):
    name = "lr=[0.1],x*,a?,back\\slash"
    for _ in range(2):
        estimator = make(tmp_path / name, keep_checkpoint_max=2).train(times(2))
    assert saved_steps(estimator) == [2, 4] and est.load_variable(estimator.model_dir, "global_step") == 4
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(ValueError, match=r"must not contain '\*', '\?' or '\[' in the URL of a store.*Choose another"):
        make("memory://runs/[1]")


def test_a_model_dir_is_where_it_was_when_the_estimator_was_made(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    relative, of_user = make("run"), make(os.path.join("~", "run"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    for estimator in (relative, of_user):
        assert step_of(estimator.train(times(2)).train(times(1))) == 3
    assert (relative.model_dir, of_user.model_dir) == (str(tmp_path / "run"), str(tmp_path / "home" / "run"))
    assert os.listdir(tmp_path / "elsewhere") == []


def test_the_home_of_a_user_may_be_in_any_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = os.path.join("~", "run")
    estimator = make(run).train(times(2))
    assert [each.step for each in est.checkpoints(run)] == [0, 2]
    assert est.load_variable(run, "global_step") == 2 and ("w", [2, 1]) in est.list_variables(run)
    assert est.read_history(run)[-1]["step"] == 1 and est.read_eval_metrics(os.path.join(run, "eval")) == {}
    assert estimator.evaluate(times(1), checkpoint_path=os.path.join(run, "ckpt-0"))["global_step"] == 0
    exported = estimator.export_model(os.path.join("~", "exported"), X)
    assert exported.startswith(str(tmp_path)) and est.load_exported(os.path.join("~", "exported")).path == exported
    assert os.listdir(tmp_path) == ["home"]


def test_a_disk_that_takes_no_name_of_the_owner_is_locked_all_the_same(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    estimator = make(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    with training_in(estimator.model_dir, True):
        with pytest.raises(RuntimeError, match="is in use: another process trains in it"):
            _model_dir._lock_file(estimator.model_dir, "another")
    assert step_of(estimator.train(times(1))) == 1


def test_a_thing_in_the_place_of_a_checkpoint_is_an_error_before_the_first_step(tmp_path):
    (tmp_path / "ckpt-30").mkdir()
    (tmp_path / "ckpt-30" / "mine.txt").write_text("mine")
    estimator = make(tmp_path)
    with pytest.raises(FileExistsError, match="ckpt-30 was not written by an Estimator, .*: move it away, or choose"):
        estimator.train(endless, max_steps=30)
    assert est.checkpoints(tmp_path) == []
    assert step_of(estimator.train(endless, max_steps=3)) == 3
    assert (tmp_path / "ckpt-30" / "mine.txt").read_text() == "mine"


# Processes around a training run.


def test_a_forked_child_that_evaluates_says_that_it_cannot(tmp_path):
    (line,) = (line for line in run("evaluate_in_fork", tmp_path) if "`evaluate` was called in process " in line)
    assert "multiprocessing.get_context('spawn')" in line


def test_a_forked_child_does_not_wait_for_a_save(tmp_path):
    assert "in the child: None" in run("fork_while_saving", tmp_path)
    assert saved_steps(make(tmp_path)) == [0, 2]


def test_a_process_without_streams_trains_and_evaluates(tmp_path):
    run("without_streams", tmp_path)
    assert (tmp_path / "streams").read_text() == "/dev/null /dev/null /dev/null"
    assert saved_steps(make(tmp_path)) == [0, 3]


def test_a_file_in_the_place_of_the_evaluation_is_an_error_at_the_door(tmp_path):
    (tmp_path / "eval").write_text("mine")
    estimator = make(tmp_path)
    message = "An evaluation with name=None writes into the directory '.*/eval', but a file is there. Move it away, or"
    with pytest.raises(NotADirectoryError, match=message):
        est.train_and_evaluate(estimator, est.TrainSpec(endless, max_steps=3), est.EvalSpec(endless))
    with pytest.raises(NotADirectoryError, match=message):
        estimator.evaluate(endless)
    assert os.listdir(tmp_path) == ["eval"]
    assert estimator.train(times(1)).evaluate(times(1), name="other")["global_step"] == 1
