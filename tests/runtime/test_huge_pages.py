"""A training with large variables on CPU devices says how its memory comes in huge pages, once."""

import numpy as np
import optax
import pytest

import estimator as est
import replicate
from estimator.runtime import _huge_pages

LINE = (
    "The variables on CPU devices take more than 100 MB. Set GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment "
    "before Python starts: Linux then clears their memory in huge pages, and a step takes up to a third less time."
)


@pytest.fixture(autouse=True)
def ask_to_get(monkeypatch, tmp_path):
    """Huge pages are for those who ask, nobody does, and what is called large is 4 kB."""
    enabled = tmp_path / "enabled"
    enabled.write_text("always [madvise] never\n")
    monkeypatch.setattr(_huge_pages, "_ENABLED", enabled)
    monkeypatch.setattr(_huge_pages, "_LARGE", 4000)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    _huge_pages._log_once.cache_clear()
    yield enabled
    _huge_pages._log_once.cache_clear()


def train(size, towers):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (size,))
        loss = est.losses.mean_squared_error(labels, features * w.sum())
        return est.EstimatorSpec(mode, loss=loss, train_op=replicate.TowerOptimizer(optax.sgd(0.1)).minimize(loss))

    devices = [f"/cpu:{i}" for i in range(towers)]
    estimator = est.Estimator(replicate.replicate_model_fn(model_fn, devices=devices))
    estimator.train(lambda: [(np.ones(4, np.float32), np.zeros(4, np.float32))])


def test_the_bytes_of_all_copies_count(messages):
    train(499, towers=2)
    assert LINE not in messages()
    train(500, towers=2)
    train(1000, towers=1)
    assert messages().count(LINE) == 1


def test_environments_where_it_would_not_help(messages, monkeypatch, ask_to_get):
    with monkeypatch.context() as patch:
        patch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=2")
        train(2000, towers=1)
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", "libjemalloc.so")
        train(2000, towers=1)
    with monkeypatch.context() as patch:
        patch.setattr("platform.libc_ver", lambda: ("glibc", "2.34"))
        train(2000, towers=1)
    with monkeypatch.context() as patch:
        patch.setattr("platform.libc_ver", lambda: ("", ""))
        train(2000, towers=1)
    ask_to_get.write_text("[always] madvise never\n")
    train(2000, towers=1)
    ask_to_get.unlink()
    train(2000, towers=1)
    assert LINE not in messages()
