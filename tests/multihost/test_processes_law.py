"""Several processes that train together compute what one does with as many devices."""

import importlib
import re

import numpy as np
import pytest
from testing.cluster import shared_cluster
from testing.outcomes import assert_law, merged, read, said, said_by
from testing.scenarios import team as team


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("law"))


def run_both(function, folder):
    """Runs it in two processes, and meanwhile alone; returns what the two have said."""
    shared_cluster().start(function, folder)
    module, _, name = function.rpartition(".")
    getattr(importlib.import_module(module), name)(folder)
    return said_by(shared_cluster().ended())


@pytest.mark.slow
def test_steps_of_two_processes_equal_the_steps_of_one(folder):
    run_both("testing.scenarios.team.transformed", folder)
    for name in ("mirrored", "sharded", "skipped"):
        assert_law(folder, name)
    assert read(folder, 1, 0, "skipped")["['skipped']"] == 1


@pytest.fixture(scope="module")
def estimated(folder):
    run_both("testing.scenarios.team.estimated", folder)


@pytest.mark.usefixtures("estimated")
def test_estimators_of_two_processes_do_what_one_does(folder):
    for name in ("mirrored-1", "sharded-auto"):
        for kind in ("", "-eval", "-recorded"):
            assert_law(folder, f"{name}{kind}")
    assert_law(folder, "mirrored-1-uneven")
    assert_law(folder, "mirrored-1-history")


@pytest.mark.usefixtures("estimated")
def test_each_process_predicts_its_own_examples_each_once(folder):
    rows_by_process = [list(zip(*columns(read(folder, 2, i, "mirrored-1-predictions")), strict=True)) for i in range(2)]
    assert [len(rows) for rows in rows_by_process] == np.sum(team.SPLITS, axis=0).tolist()
    want = {tuple(x): output for x, output in zip(*columns(read(folder, 1, 0, "mirrored-1-predictions")), strict=True)}
    assert {tuple(x) for rows in rows_by_process for x, _ in rows} == want.keys()
    for x, output in rows_by_process[0] + rows_by_process[1]:
        np.testing.assert_allclose(output, want[tuple(x)], rtol=2e-5, atol=2e-6)


def columns(arrays):
    """Features and outputs of predicted examples."""
    return [[arrays[f"[{i}]['{key}']"] for i in range(len(arrays) // 2)] for key in ("x", "output")]


@pytest.mark.covers("3 train_distribute")
def test_strategies_of_two_processes_do_what_one_does_or_say_that_they_are_for_one(folder):
    for rows in run_both("testing.scenarios.team.by_strategies", folder):
        refused = {row["case"]: row["text"] for row in rows if row["error"] == "ValueError"}
        assert refused.keys() == {"MirroredStrategy", "OneDeviceStrategy", "ParameterServerStrategy"}
        assert refused["ParameterServerStrategy"] == (
            "jax runs on 2 processes, but ParameterServerStrategy() has its variables on devices of one process. Write "
            "`replicate.CollectiveAllReduceStrategy()`, whose towers are on the devices of all processes, or "
            "`(num_gpus_per_worker=n)` for n of each."
        )
        assert "OneDeviceStrategy(devices=['cpu:0']) has its towers on devices of one" in refused["OneDeviceStrategy"]
    for name in ("CollectiveAllReduceStrategy", "MirroredStrategy"):
        assert_law(folder, name)


@pytest.mark.covers("5 distributed")
def test_training_with_evaluations_matches_one(folder, capsys):
    each = [merged(rows) for rows in run_both("testing.scenarios.team_hooks.trained_and_evaluated", folder)]
    alone = merged(said(capsys.readouterr().out.splitlines()))
    assert_law(folder, "t")
    wrong = [one.pop("wrong") for one in each]
    assert re.match(r"`evaluate\(.*\)` is a call of all processes, but was made where process 0 works alone", wrong[0])
    assert wrong[1].startswith("Process 0 failed in `export`: RuntimeError: `evaluate(")
    assert each[0] == each[1]
    assert each[0]["evaluated"] == alone["evaluated"] == [2, 4, 6, 8, 10]
    metrics, exports = each[0]["result"]
    # It stopped at the step 10, as nothing was better than at the step 6, of which it ended with the variables.
    assert (metrics["null"]["global_step"], metrics["null"]["m"]) == (10, 3.0)
    assert metrics["null"] == metrics["late"]
    np.testing.assert_allclose(metrics["null"]["loss"], alone["result"][0]["null"]["loss"], rtol=2e-5)
    assert each[0]["again"] == [metrics["null"], exports["null"]]


def test_towers_of_two_processes_with_block_sync_match_one_process(folder):
    run_both("testing.scenarios.team_blocks.trained", folder)
    for name in ("blocks", "blocks-resumed", "blocks-evaluated"):
        assert_law(folder, name)
    arrays = read(folder, 2, 1, "blocks-resumed")
    assert arrays["['block_sync/steps']"] == 5
    assert arrays["['block_sync/copies/w']"].shape == (4, 3, 8)
