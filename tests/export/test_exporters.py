"""Exporters: what they export, when, and what they leave on disk."""

import functools
import itertools
import os
import shutil
import time

import numpy as np
import pytest
from testing.estimators import X, make, times
from testing.refused import TEXTS

import estimator as est
from estimator.export import _exporters, _retention

FEATURES = np.zeros((1, 2), np.float32)
WORSE = {"loss": 0.9, "global_step": 20}
GOOD = {"loss": 0.5, "global_step": 30}
BEST = {"loss": 0.25, "global_step": 40}
NAN = {"loss": np.nan, "global_step": 50}
OUTSIDE = b'{"export": "../outside", "eval_result": {"loss": 0.9, "global_step": 20}}'


class Model:
    """Exports by making a folder, and records its calls."""

    def __init__(self, now=1_000_000_000):
        self.now = now
        self.calls = []

    def export_model(self, export_dir_base, example_features, **options):
        self.now += 1
        self.calls.append((export_dir_base, example_features, options))
        path = os.path.join(export_dir_base, str(self.now))
        os.makedirs(path)
        with open(os.path.join(path, "metadata.json"), "w"):
            return path


@pytest.fixture
def export(tmp_path):
    """Calls an exporter on a result; returns the names of the exports, or None."""

    def call(exporter, result, final=False, model=None):
        folder = str(tmp_path / exporter.name)
        wants = exporter.wants(folder, result, final)
        before = os.path.isdir(folder) and set(os.listdir(folder))
        path = exporter.export(model or call.model, folder, "ckpt-1", result, final)
        assert wants == ((os.path.isdir(folder) and set(os.listdir(folder))) != before)
        return path and os.path.relpath(path, folder)

    call.model = Model()
    return call


def by_accuracy(best_eval_result, current_eval_result):
    return current_eval_result["accuracy"] > best_eval_result["accuracy"]


latest = functools.partial(est.LatestExporter, "latest", FEATURES)
final = functools.partial(est.FinalExporter, "final", FEATURES)
best = functools.partial(est.BestExporter, "best", FEATURES)


@pytest.mark.covers("7 LatestExporter")
def test_the_latest_is_exported_each_time(export):
    exporter = latest()
    assert [export(exporter, result) for result in (GOOD, WORSE, NAN)] == ["1000000001", "1000000002", "1000000003"]


@pytest.mark.parametrize("kind", [latest, best])
def test_a_result_is_exported_once(export, kind):
    assert export(kind(), GOOD) == "1000000001"
    assert export(kind(), dict(GOOD), final=True) == "1000000001"
    assert export(kind(), {**GOOD, "loss": 0.1}, final=True) == "1000000002"


@pytest.mark.covers("7 FinalExporter")
def test_the_final_one_is_exported_at_the_end_only_and_once(export):
    assert export(final(), GOOD) is None
    assert export(final(), BEST, final=True) == "1000000001"
    assert export(final(), BEST, final=True) == "1000000001"
    assert export(final(), BEST) is None
    assert export(final(), WORSE, final=True) == "1000000002"


def test_what_is_asked_of_the_estimator(export, tmp_path):
    exporter = est.LatestExporter("a", FEATURES, {"vocabulary": "/v"}, batch_size=3, platforms=("cpu",))
    export(exporter, GOOD)
    export(latest(), GOOD)
    options = {
        "checkpoint_path": "ckpt-1",
        "assets_extra": {"vocabulary": "/v"},
        "batch_size": 3,
        "platforms": ("cpu",),
    }
    assert export.model.calls == [
        (str(tmp_path / "a"), FEATURES, options),
        (str(tmp_path / "latest"), FEATURES, {"checkpoint_path": "ckpt-1"}),
    ]


@pytest.mark.covers("7 BestExporter")
def test_only_what_is_better_than_the_best_so_far_is_exported(export):
    exporter = best()
    equal = {**GOOD, "global_step": 31}
    results = [WORSE, GOOD, WORSE, equal, BEST, GOOD]
    assert [export(exporter, r) for r in results] == ["1000000001", "1000000002", None, None, "1000000003", None]


@pytest.mark.covers("7 BestExporter", "13 7 BestExporter after a restart")
def test_a_restart_does_not_export_a_worse_model(export):
    export(best(), GOOD)
    assert export(best(), WORSE) is None
    assert export(best(), BEST) == "1000000002"


def test_the_last_call_returns_the_best_export_though_the_last_model_is_no_better(export, tmp_path):
    assert export(best(), NAN, final=True) is None
    export(best(), GOOD)
    assert export(best(), WORSE) is None
    for result in (WORSE, NAN):
        assert export(best(), result, final=True) == "1000000001"
    shutil.rmtree(tmp_path / "best" / "1000000001")
    assert export(best(), WORSE, final=True) is None


def test_a_restart_compares_even_if_the_exports_were_moved_away(export, tmp_path):
    export(best(), GOOD)
    shutil.rmtree(tmp_path / "best" / "1000000001")
    assert export(best(), WORSE) is None


def test_a_crash_while_the_result_is_written_leaves_the_one_before(export, monkeypatch):
    def crash(*args):
        raise KeyboardInterrupt

    export(best(), WORSE)
    with monkeypatch.context() as patched:
        patched.setattr(_exporters.os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            export(best(), GOOD)
    assert export(best(), {**WORSE, "loss": 0.91}) is None
    assert export(best(), GOOD) == "1000000003"


@pytest.mark.covers("7 BestExporter")
@pytest.mark.parametrize("exporter", [best(), best(compare_fn=lambda best_eval_result, current_eval_result: True)])
def test_nan_never_wins(export, messages, exporter):
    assert export(exporter, NAN) is None
    assert export(exporter, GOOD) == "1000000001"
    assert export(exporter, NAN) is None
    assert export(exporter, {**BEST, "per_class": np.array([1.0, np.nan])}) is None
    assert export(exporter, BEST) == "1000000002"
    assert "BestExporter 'best' does not export a model with NaN in ['loss']." in messages()
    assert "BestExporter 'best' does not export a model with NaN in ['per_class']." in messages()


def test_another_comparison(export):
    exporter = best(compare_fn=by_accuracy)
    results = [{"loss": 1.0, "accuracy": accuracy} for accuracy in (0.5, 0.4, 0.6)]
    assert [export(exporter, result) for result in results] == ["1000000001", None, "1000000002"]


def test_a_comparison_gets_arrays_after_a_restart_too(export):
    def mean_is_more(best_eval_result, current_eval_result):
        return current_eval_result["recall"].mean() > best_eval_result["recall"].mean()

    export(best(compare_fn=mean_is_more), {"loss": 1.0, "recall": np.array([0.1, 0.5])})
    assert export(best(compare_fn=mean_is_more), {"loss": 1.0, "recall": np.array([0.2, 0.1])}) is None
    assert export(best(compare_fn=mean_is_more), {"loss": 1.0, "recall": np.array([0.5, 0.5])}) == "1000000002"


@pytest.mark.covers("7 BestExporter")
def test_a_metric_that_is_not_there_is_an_error_at_the_first_result(export):
    with pytest.raises(KeyError, match="accuracy"):
        export(best(compare_fn=by_accuracy), GOOD)
    with pytest.raises(ValueError, match="BestExporter compares losses, but got {'global_step': 3} without one"):
        export(best(), {"global_step": 3})


# What is left on disk.


@pytest.mark.covers("7 export GC")
def test_the_newest_exports_are_kept_and_what_is_no_export(export, tmp_path):
    others = ["temp-1000000000", "10000000000", "2024", "1000000000"]
    for name in others:
        os.makedirs(tmp_path / "latest" / name)
    for step in range(4):
        export(latest(exports_to_keep=2), {**GOOD, "global_step": step})
    assert sorted(os.listdir(tmp_path / "latest")) == sorted([*others, "exported.json", "1000000003", "1000000004"])


@pytest.mark.covers("7 export GC")
def test_five_are_kept_or_all(export, tmp_path):
    for step in range(7):
        for exporter in (best(), latest(exports_to_keep=None)):
            export(exporter, {"loss": -step, "global_step": step})
    assert len(os.listdir(tmp_path / "best")) == 5 + 1
    assert len(os.listdir(tmp_path / "latest")) == 7 + 1


@pytest.mark.covers("7 export GC")
def test_an_export_that_can_not_be_deleted_is_warned_of(export, monkeypatch, messages):
    def fail(path):
        raise PermissionError("not yours")

    monkeypatch.setattr(_retention, "remove_dir", fail)
    for result in (GOOD, BEST):
        assert export(latest(exports_to_keep=1), result)
    assert any(m.startswith("Can not delete the old export") and m.endswith("not yours") for m in messages())


DAMAGED = [OUTSIDE, b'{"export": 3, "eval_result": {}}', *TEXTS]


@pytest.mark.parametrize("kind, contents", [*zip(itertools.cycle([latest, final, best]), DAMAGED)])
def test_a_damaged_record_is_named_in_the_log_and_written_again(export, tmp_path, errors, kind, contents):
    assert export(kind(), GOOD, final=True) == "1000000001"
    (tmp_path / kind().name / "exported.json").write_bytes(contents)
    (tmp_path / "outside").mkdir()
    assert export(kind(), WORSE, final=True) == "1000000002"
    (error,) = set(errors())
    assert error.startswith(f"{tmp_path}/{kind().name}/exported.json is damaged (")
    assert export(kind(), WORSE, final=True) == "1000000002"


@pytest.mark.parametrize("kind", [est.LatestExporter, est.FinalExporter, est.BestExporter])
def test_a_function_that_is_no_receiver_and_features_twice_are_refused(kind):
    with pytest.raises(TypeError, match=f"`{kind.__name__}` needs a serving_input_receiver_fn that `est"):
        kind("a", lambda: FEATURES)
    both = {"example_features": FEATURES, "serving_input_receiver_fn": lambda: FEATURES}
    for given, got in (({}, "None"), (both, "both")):
        with pytest.raises(ValueError, match=f"{kind.__name__} needs `example_features`, .* got {got}"):
            kind("a", **given)


@pytest.mark.parametrize("number", [0, -1])
def test_to_keep_none_is_refused(number):
    for kind in (latest, best):
        with pytest.raises(ValueError, match=f"`exports_to_keep`, if provided, must be positive number; got {number}"):
            kind(exports_to_keep=number)


@pytest.mark.covers("7 BestExporter")
@pytest.mark.parametrize("compare_fn", [None, 3, lambda best, current: True, lambda best_eval_result: True])
def test_a_comparison_has_two_arguments_of_these_names(compare_fn):
    message = (
        "`compare_fn` of BestExporter must be a function of exactly best_eval_result and current_eval_result; got "
    )
    with pytest.raises(ValueError, match=message):
        best(compare_fn=compare_fn)


@pytest.mark.covers("7 Exporter")
def test_an_exporter_has_a_name_and_exports():
    with pytest.raises(TypeError, match="abstract"):
        est.Exporter()


@pytest.mark.slow
@pytest.mark.covers("5 export path")
def test_the_models_of_a_training_are_exported(tmp_path):
    estimator = make(tmp_path)
    exporters = [
        latest(),
        final(),
        best(),
        est.BestExporter("first", FEATURES, lambda best_eval_result, current_eval_result: False),
    ]
    spec = est.EvalSpec(times(1), exporters=exporters)
    train_spec = est.TrainSpec(times(6), max_steps=6)
    for _ in range(2):  # the second time it has ended already
        _, paths = est.train_and_evaluate(estimator, train_spec, spec, eval_every_steps=2)
    folders = {name: sorted(os.listdir(tmp_path / "export" / name)) for name in os.listdir(tmp_path / "export")}
    assert {name: len(paths) - 1 for name, paths in folders.items()} == {"latest": 3, "final": 1, "best": 3, "first": 1}
    assert [path and os.path.basename(path) for path in paths] == [
        folders["latest"][2],
        folders["final"][0],
        folders["best"][2],
        folders["first"][0],
    ]
    expected = [row["y"] for row in estimator.predict(lambda: X)]
    np.testing.assert_allclose(est.load_exported(paths[1])(X)["y"], expected, rtol=1e-6)
    first = os.path.join(tmp_path, "export", "latest", folders["latest"][0])
    state_2 = make(tmp_path / "two").train(times(2))
    np.testing.assert_allclose(
        est.load_exported(first)(X)["y"], [row["y"] for row in state_2.predict(lambda: X)], rtol=1e-6
    )


def test_the_newest_of_many_exports_in_a_second_is_kept(tmp_path, monkeypatch):
    estimator = make(tmp_path).train(times(1))
    monkeypatch.setattr(time, "time", lambda: 1e9)
    exporter = latest(exports_to_keep=2)
    folder = str(tmp_path / "export")
    paths = [exporter.export(estimator, folder, None, {"loss": i}, False) for i in range(4)]
    assert paths == sorted(paths)
    assert sorted(os.listdir(folder)) == [*map(os.path.basename, paths[-2:]), "exported.json"]


def test_a_checkpoint_is_saved_for_an_export_only(tmp_path):
    estimator = make(tmp_path)
    never = best(compare_fn=lambda best_eval_result, current_eval_result: False)  # but the first
    spec = est.EvalSpec(times(1), exporters=[never, final()])
    est.train_and_evaluate(estimator, est.TrainSpec(times(7)), spec, eval_every_steps=2)
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("ckpt-")) == ["ckpt-0", "ckpt-2", "ckpt-7"]
