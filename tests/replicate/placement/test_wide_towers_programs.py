"""What towers of several devices hold on each of them, in memory, in programs, and in files."""

import jax
import numpy as np
import optax
import pytest
from testing.towers import assert_close
from testing.wide import batches, program, whole_arrays, wide, wide_mlp

import estimator as est
from replicate import explain


def bytes_on_first_device(tree):
    return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("clipped_adam", {}), ("momentum", {"accumulate_steps": 3}), (optax.adafactor(0.1, min_dim_size_to_factor=8), {})],
    ids=["clipped_adam", "micro_batches", "factored"],
)
def test_no_device_has_a_variable_its_gradient_or_its_slots_whole_at_any_time(optimizer, options):
    steps = x, y = batches(24)
    lines_by_parts = {}
    for parts in (4, 1):
        model = est.transform(wide(2, parts, wide_mlp(optimizer, **options)))
        state = model.init(jax.random.key(0), x[0], y[0])
        lines_by_parts[parts] = [
            whole_arrays(program(model.train_step, state, x[0], y[0])),
            whole_arrays(program(model.train_loop, state, steps)),
        ]
    assert lines_by_parts[4] == [[], []]
    assert all(len(lines) > 10 for lines in lines_by_parts[1])  # the same search finds them where towers are narrow


@pytest.mark.slow
def test_no_device_has_a_variable_whole_while_it_is_initialized_evaluated_or_predicts():
    x, y = (array[0] for array in batches(7, steps=1))
    counts = {}
    for parts in (4, 1):
        model = est.transform(wide(1, parts, wide_mlp("adam")))
        initialize = jax.jit(lambda key, model=model: model.init.__self__._pure.init(key, x, y, {}, "train")[0])
        state = model.init(jax.random.key(0), x, y)
        programs = [
            initialize.lower(jax.random.key(0)).compile(),
            jax.jit(model.eval_step).lower(state, x, y).compile(),
            jax.jit(model.predict_step).lower(state, x).compile(),
        ]
        counts[parts] = [len(whole_arrays(each)) for each in programs]
    assert counts[4] == [0, 0, 0]
    assert all(counts[1])


@pytest.mark.slow
def test_bytes_on_a_device_fall_by_the_devices_of_a_tower():
    x, y = (array[0] for array in batches(8))
    model_fns = {str(parts): wide(2, parts, wide_mlp("adam")) for parts in (1, 2, 4)}
    states = [est.transform(each).init(jax.random.key(0), x, y) for each in model_fns.values()]
    state_bytes = [bytes_on_first_device((state.variables, state.slots)) for state in states]
    report = est.memory_report(model_fns, x, y)
    for parts, mine in zip((1, 2, 4), state_bytes, strict=True):
        assert state_bytes[0] / mine == pytest.approx(parts, rel=0.02)
        use = report[str(parts)]
        assert use.state == mine + 4 == use.donated  # and global_step
        assert report["1"].temporary / use.temporary > 0.95 * parts
        assert report["1"].peak / use.peak > 0.95 * parts


def test_a_second_step_traces_and_compiles_nothing(compilations):
    traces = []
    inner = wide_mlp("adam")

    def model_fn(features, labels, mode):
        traces.append(mode)
        return inner(features, labels, mode)

    x, y = batches(24)
    model = est.transform(wide(2, 4, model_fn))
    state = model.init(jax.random.key(0), x[0], y[0])
    state, _ = model.train_step(state, x[0], y[0])
    model.eval_step(state, x[0], y[0])
    before = len(traces), len(compilations)
    assert all(before)
    state, _ = model.train_step(state, x[1], y[1])
    model.eval_step(state, x[1], y[1])
    assert (len(traces), len(compilations)) == before


@pytest.mark.slow
def test_a_step_with_a_nan_changes_nothing_and_names_the_tower():
    x, y = (array[0] for array in batches(24))
    model_fn = wide_mlp("adam")
    state = est.transform(model_fn).init(jax.random.key(0), x, y)
    x[20, 0] = np.nan
    skips, raises = (est.transform(wide(2, 4, model_fn, on_nan=policy)) for policy in ("skip", "raise"))
    before = skips.init(jax.random.key(0), x, y)
    after, _ = skips.train_step(before, x, y)
    assert est.skipped_steps(after) == 1
    assert_close(after.variables, state.variables, rtol=0, atol=0)
    with pytest.raises(est.NonFiniteGradientError, match="'b' in tower 1, at step 1"):
        raises.train_step(before, x, y)


@pytest.mark.slow
def test_checkpoints_are_read_by_towers_of_any_width_to_the_bit_and_an_export_has_no_towers(tmp_path):
    x, y = batches(24, steps=4)

    def estimator(towers, parts):
        config = est.RunConfig(check_replicas_every=2)
        return est.Estimator(wide(towers, parts, wide_mlp("adam")), tmp_path, config=config)

    wrote = estimator(2, 4)
    wrote.train(lambda: list(zip(x, y, strict=True)), steps=4)
    values = {name: wrote.get_variable_value(name) for name in wrote.get_variable_names()}
    rows = x[0][:7], y[0][:7]
    want = wrote.evaluate(lambda: [rows])
    for towers, parts in ((1, 1), (4, 2)):
        read = estimator(towers, parts)
        assert read.evaluate(lambda: [rows]) == pytest.approx(want, rel=2e-5)
        for name, value in values.items():
            np.testing.assert_array_equal(read.get_variable_value(name), value)
    predicted = [row["output"] for row in wrote.predict(lambda: [x[0][:3]])]
    exported = est.load_exported(wrote.export_model(tmp_path / "export", x[0]))
    np.testing.assert_allclose(exported(x[0][:3])["output"], predicted, rtol=1e-5)
    other = estimator(4, 2)
    other.train(lambda: [(x[0], y[0])], steps=1)
    read = estimator(2, 4)
    read.train(lambda: [(x[0], y[0])], steps=1)
    assert read.get_variable_value("global_step") == 6
    assert jax.tree.leaves(read.evaluate(lambda: [rows])) != jax.tree.leaves(want)


def test_an_explanation_tells_towers_from_devices():
    x, y = (array[0] for array in batches(24))
    explanation = explain(wide(2, 4, wide_mlp("adam")), x, y)
    assert explanation.towers == ("cpu:0, cpu:1, cpu:2, cpu:3", "cpu:4, cpu:5, cpu:6, cpu:7")
    assert [each.tower_shape for each in explanation.batch] == [(12, 24), (12,)]
    where = {home.name: home.where for home in explanation.variables}
    assert where["w"] == "cut along dimension 1 over 4 devices, in each of 2 towers"
    assert where["o"] == "whole on each of 8 devices"
    assert "12 rows; its 4 devices share the work." in str(explanation)
    assert "20,764 B" in explanation.html().split("</svg>")[0]  # the share of a device, in the picture
