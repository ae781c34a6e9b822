"""The choice among ways of summing over towers, by a table of what was measured."""

import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.cross_tower import assert_sums, collectives, in_towers, random_arrays
from testing.towers import cpus, mlp_model_fn, regression

import estimator as est
from replicate import replicate_model_fn
from replicate.cross_tower_ops import AllReduce, _auto, _measurements, choose_the_best
from replicate.cross_tower_ops._algorithms import ALGORITHMS
from replicate.cross_tower_ops.measure import confirm, main

PSUM, SCATTER = {"all_reduce": 1}, {"reduce_scatter": 1, "all_gather": 1}


def row(size, towers=4, kind="cpu", alone=1.0, **ratios):
    """A row in which the algorithms take so long, and all others twice as long as psum."""
    return _measurements.Row(kind, towers, size, 10.0, dict.fromkeys(ALGORITHMS, 2.0) | {"psum": 1.0} | ratios, alone)


@pytest.fixture
def choose(tmp_path):
    """`choose_the_best` from given rows."""

    def choose(rows, towers=4):
        _measurements.write_table(tmp_path / "table.json", rows, "a machine")
        return choose_the_best(cpus(towers), table=tmp_path / "table.json")

    return choose


def lowered(ops, towers, *arrays):
    """The text of the program that sums arrays of such shapes and dtypes."""
    shapes = [jax.ShapeDtypeStruct((towers, *array.shape), array.dtype) for array in arrays]
    return in_towers(lambda *mine: ops.sum_in_towers(mine), towers).lower(*shapes).as_text()


def floats(size):
    return jax.ShapeDtypeStruct((size // 4,), jnp.float32)


@pytest.mark.parametrize(
    "size, expected",
    [(4, PSUM), (900, PSUM), (1200, {"collective_permute": 6}), (90_000, {"collective_permute": 6})]
    + [(110_000, SCATTER), (10**7, SCATTER)],
)
def test_the_size_that_was_measured_nearest_decides(choose, size, expected):
    rows = [row(100), row(10_000, ring=0.5, tree=0.7), row(10**6, reduce_scatter_gather=0.5)]
    assert collectives(lowered(choose(rows), 4, floats(size))) == expected


@pytest.mark.parametrize("towers, expected", [(3, PSUM), (4, SCATTER)])
def test_the_number_of_towers_that_was_measured_nearest_decides(choose, towers, expected):
    """4 is as near to 2 as to 8."""
    ops = choose([row(100, towers=2), row(100, towers=8, reduce_scatter_gather=0.5)], towers)
    assert collectives(lowered(ops, towers, floats(480))) == expected


def test_what_does_not_divide_by_the_towers_and_would_be_padded_is_left_to_psum(choose):
    ops = choose([row(100, reduce_scatter_gather=0.5)])
    for size, expected in ((96, SCATTER), (100, PSUM), (104, PSUM), (112, SCATTER)):
        assert collectives(lowered(ops, 4, floats(size))) == expected


def test_psum_and_packing_have_the_benefit_of_the_doubt(choose):
    def chosen(**measured):
        return collectives(lowered(choose([row(640, **measured)]), 4, floats(80), floats(80)))

    assert chosen(reduce_scatter_gather=0.96, alone=0.96) == PSUM
    assert chosen(reduce_scatter_gather=0.95) == SCATTER
    assert chosen(alone=0.95) == {"all_reduce": 2}


def test_arrays_that_are_faster_alone_are_not_packed(choose):
    """What is summed in 8 arrays of 8,000 bytes was faster alone, in 8 of 80 not."""
    ops = choose([row(640), row(64_000, alone=0.5)])
    arrays = [floats(80), floats(8_000), jax.ShapeDtypeStruct((3,), jnp.int32), floats(40), floats(80_000), floats(700)]
    vectors = re.findall(r"\) : \(tensor<(\w+)>\) -> tensor", lowered(ops, 4, *arrays))
    assert sorted(vectors) == sorted(["205xf32", "2000xf32", "20000xf32", "3xi32"])


def test_no_more_than_128_arrays_share_a_vector(choose):
    ops = choose([row(100), row(10**9, ring=0.5)])
    for count, vectors in ((128, 1), (129, 2), (300, 3)):
        assert collectives(lowered(ops, 2, *[floats(4)] * count)) == {"all_reduce": vectors}


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "dtype"), [(3, jnp.int32), (8, jnp.float32)])
def test_what_was_chosen_sums(choose, towers, dtype):
    rows = [row(100, ring=0.5), row(1000, tree=0.5), row(64_000, reduce_scatter_gather=0.5, alone=0.5)]
    shapes = [(), (0,), (3, 5), (400,), (7,), (70, 30)]
    arrays = random_arrays(np.random.default_rng(0), towers, shapes, dtype)
    for ops in (choose(rows, towers), choose_the_best(cpus(towers))):
        assert_sums(in_towers(lambda *mine, ops=ops: ops.sum_in_towers(mine), towers)(*arrays), arrays)


def train_step(ops):
    (x,), (y,) = regression(8, steps=1)
    model = est.transform(replicate_model_fn(mlp_model_fn(optax.adam(0.1)), devices=cpus(4), cross_tower_ops=ops))
    return jax.jit(model.train_step).lower(model.init(jax.random.key(0), x, y), x, y).as_text()


def test_the_default_is_psum_of_one_vector_where_that_was_the_fastest(choose):
    arrays = [floats(4), floats(100), jax.ShapeDtypeStruct((3,), jnp.int32)]
    packed = lowered(AllReduce(), 4, *arrays)
    assert lowered(choose([row(100)]), 4, *arrays) == packed
    assert lowered(choose([row(100), row(10**7, ring=0.5)]), 4, *arrays) == packed
    assert lowered(choose_the_best(cpus(4)), 4, *arrays) == packed
    assert train_step(None) == train_step(AllReduce())


def test_the_choice_of_the_table_is_the_default_of_replicated_model_functions(monkeypatch):
    monkeypatch.setattr(_auto, "recorded_rows", lambda: [row(100, alone=0.5)])
    assert collectives(train_step(None)) == collectives(train_step(AllReduce(num_packs=0))) != PSUM


def test_a_kind_of_device_that_was_not_measured_gets_psum(choose, messages):
    _auto._log.cache_clear()
    ops = choose([row(100, kind="some other", ring=0.5, alone=0.5)])
    assert collectives(lowered(ops, 4, floats(100), floats(100))) == PSUM
    assert messages() == ["Values of 4 towers on cpu are summed by psum; a kind of device that was not measured."]


def test_devices_of_several_processes_get_psum_with_large_arrays_by_themselves(monkeypatch, messages):
    """Packing copies them, whatever the network is."""
    _auto._log.cache_clear()
    devices = [types.SimpleNamespace(device_kind="cpu", process_index=index) for index in range(4)]
    monkeypatch.setattr(_auto, "find_devices", lambda devices: devices)
    arrays = [floats(80), floats(10**6), jax.ShapeDtypeStruct((3,), jnp.int32), floats(10**5), floats(500_000)]
    vectors = re.findall(r"\) : \(tensor<(\w+)>\) -> tensor", lowered(choose_the_best(devices), 4, *arrays))
    assert sorted(vectors) == ["150020xf32", "250000xf32", "3xi32"]
    why = "arrays of 1,048,576 bytes and more by themselves; which are of several processes"
    assert messages() == [f"Values of 4 towers on cpu are summed by psum, {why}."]


def test_the_choice_is_logged_once_for_each_number_of_towers(choose, messages):
    _auto._log.cache_clear()
    rows = [row(800), row(8000, ring=0.5, alone=0.5), row(80_000, ring=0.6, alone=0.4), row(10**6, tree=0.5, alone=0.1)]
    for towers in (1, 4, 4, 3, 4):
        choose(rows, towers)
    algorithms = "psum, ring from 8,000 bytes on, tree from 1,000,000 bytes on"
    choice = f"{algorithms}, arrays of 1,000 bytes and more by themselves; as measured"
    assert messages() == [f"Values of {towers} towers on cpu are summed by {choice}." for towers in (4, 3)]


def test_the_table_of_the_package_holds_the_minima_of_its_numbers():
    table = json.loads(_measurements.RECORDED.read_text(encoding="utf-8"))
    assert table["recorded_on"]
    points = [(entry["kind"], entry["towers"], entry["bytes"]) for entry in table["rows"]]
    assert points == sorted(set(points))
    assert {towers for kind, towers, _ in points if kind == "cpu"} == {2, 4, 8}
    for towers in (2, 4, 8):
        sizes = [size for _, count, size in points if count == towers]
        assert sizes[0] == 10**2 and sizes[-1] == 10**8 and len(sizes) >= 7
    for entry in table["rows"]:
        ratios = entry["ratios"]
        assert ratios.keys() == ALGORITHMS.keys() and ratios["psum"] == 1.0
        assert entry["psum_us"] > 0 and entry["alone"] > 0
        fastest = min(ratios.values())
        assert ratios[entry["best"]] == (fastest if fastest * 1.05 < 1 else 1.0)


def test_a_table_is_made_that_the_choice_reads(tmp_path):
    path = tmp_path / "table.json"
    command = [sys.executable, "-m", "replicate.cross_tower_ops.measure", "--cpu-devices", "2", "--rounds", "1"]
    root = pathlib.Path(__file__).resolve().parents[3]
    said = subprocess.run(
        [*command, "--bytes", "40", "400", "--out", path], check=True, capture_output=True, text=True, cwd=root
    )
    assert len(said.stdout.splitlines()) == 2
    assert re.match(r"cpu, 2 towers, 40 bytes: psum \d+ us; ring \d", said.stdout)
    rows = _measurements.read_table(path)
    assert [(row.kind, row.towers, row.bytes) for row in rows] == [("cpu", 2, 40), ("cpu", 2, 400)]
    assert all(min(row.ratios.values()) > 0 and row.alone > 0 for row in rows)
    (array,) = arrays = random_arrays(np.random.default_rng(0), 2, [(30,)], np.float32)
    ops = choose_the_best(cpus(2), table=path)
    assert_sums(in_towers(lambda mine: ops.sum_in_towers([mine]), 2)(array), arrays)


def test_of_two_runs_the_larger_ratios_count():
    first, second = row(100, ring=0.5, tree=0.9, alone=0.7), row(100, ring=0.99, tree=0.8, alone=0.6)
    both = confirm(second, [row(1000, ring=9.0), row(100, towers=2, ring=9.0), row(100, kind="other", ring=9.0), first])
    assert (both.ratios["ring"], both.ratios["tree"], both.alone) == (0.99, 0.9, 0.7)
    assert (first.best, second.best, both.best) == ("ring", "tree", "tree")
    assert confirm(second, []) == second


@pytest.mark.parametrize("counts", [["9"], ["1", "2"]])
def test_towers_without_devices_are_refused(counts, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "never"), "--towers", *counts])
    assert "needs 2 towers or more, and a device for each; got --towers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, reason",
    [
        ("no json", "JSONDecodeError"),
        ("{}", "KeyError"),
        ('{"rows": [{"kind": "cpu"}]}', "TypeError"),
        (json.dumps({"rows": [row(100)._asdict() | {"best": "ring"}]}), "'ring' is not the best"),
        (json.dumps({"rows": [row(100, star=0.1)._asdict() | {"best": "star"}]}), "no algorithm 'star'"),
    ],
)
def test_other_files_are_refused(tmp_path, text, reason):
    path = tmp_path / "table.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"table.json is not a table of .*{reason}.*Make it again"):
        choose_the_best(cpus(2), table=path)
