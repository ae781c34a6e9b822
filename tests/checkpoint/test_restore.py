"""What is read of a checkpoint."""

import jax
import numpy as np
import pytest
from testing.estimators import Linear, X, endless, make, times

import estimator as est
from estimator.checkpoint import _checkpoint, _restore


@pytest.fixture
def read(monkeypatch):
    """The names of the arrays that are read onto devices."""
    names = []
    read_on_devices = _checkpoint.read_on_devices

    def noted(path, like, shardings):
        names.extend(like)
        return read_on_devices(path, like, shardings)

    monkeypatch.setattr(_checkpoint, "read_on_devices", noted)
    return names


def test_evaluation_and_prediction_read_variables_and_training_reads_slots_too(tmp_path, read):
    make(tmp_path).train(endless, steps=2)
    make(tmp_path).evaluate(times(1))
    assert sorted(read) == ["global_step", "key", "variables/w"]
    read.clear()
    list(make(tmp_path).predict(lambda: X))
    assert sorted(read) == ["global_step", "key", "variables/w"]
    read.clear()
    make(tmp_path).train(endless, steps=1)
    assert sorted(read) == ["global_step", "key", "slots/optimizer/0/trace/w", "variables/w"]


def test_training_copies_the_state_that_is_in_memory_and_not_one_that_it_reads(tmp_path, monkeypatch):
    copied, copy = [], _restore._copy
    monkeypatch.setattr(_restore, "_copy", lambda x: copied.append(x.shape) or copy(x))
    estimator = make(tmp_path).train(endless, steps=1)
    copied.clear()
    make(tmp_path).train(endless, steps=1)
    assert copied == []
    estimator.train(endless, steps=1)  # the one in its memory is older
    assert copied == []
    estimator.train(endless, steps=1)
    assert sorted(copied) == [(), (), (2, 1), (2, 1)]


def test_an_evaluation_has_the_state_of_its_checkpoint_whatever_another_thread_evaluates(tmp_path, monkeypatch):
    estimator = make(tmp_path, Linear(), save_checkpoints_steps=1).train(endless, steps=3)
    first, second = (str(tmp_path / f"ckpt-{step}") for step in (1, 2))
    identity, times_called = _restore._identity, []

    def interrupted(path):
        if path == first and not times_called:
            times_called.append(path)
            estimator.evaluate(times(1), checkpoint_path=second)  # as another thread could do here
        return identity(path)

    estimator.evaluate(times(1), checkpoint_path=first)
    monkeypatch.setattr(_restore, "_identity", interrupted)
    assert estimator.evaluate(times(1), checkpoint_path=first)["global_step"] == 1
    assert times_called == [first]


@pytest.mark.slow
def test_a_checkpoint_of_another_kind_of_random_keys_is_evaluated_and_training_names_the_setting(tmp_path):
    with jax.default_prng_impl("rbg"):
        trained = make(tmp_path).train(endless, steps=2)
        want, rows = trained.evaluate(times(1)), [row["y"] for row in trained.predict(lambda: X)]
    other = make(tmp_path)
    for _ in range(2):  # a state with another key is not kept for training
        assert other.evaluate(times(1)) == want
        assert [row["y"] for row in other.predict(lambda: X)] == rows
        message = (
            r"mismatched: key, uint32\[4\] in .*uint32\[2\] in the model, a random key: set jax_default_prng_impl to"
        )
        with pytest.raises(ValueError, match=rf"{message} what it was, such as 'rbg' .*; it is 'threefry2x32'"):
            other.train(endless, steps=1)
    exported = est.load_exported(other.export_model(tmp_path / "export", X))
    np.testing.assert_allclose(exported(X)["y"], rows)
    with jax.default_prng_impl("rbg"):
        assert trained.train(endless, steps=1).get_variable_value("global_step") == 3
