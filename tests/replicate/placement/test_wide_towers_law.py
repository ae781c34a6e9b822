"""Towers of several devices equal one device whatever a model_fn does with its rows: scatters, sorts, gathers, loops.

XLA's scatters count rows twice, lose some, or end the process, where rows are cut unevenly over some of the devices.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import assert_close, results
from testing.wide import wide

import estimator as est
from replicate import TowerOptimizer

CLASSES, WIDTH = 5, 8


@functools.partial(jax.tree_util.register_dataclass, data_fields=["sums", "largest"], meta_fields=[])
@dataclasses.dataclass
class Tally:
    """A metric of one's own, whose states are merged by sums and by maxima."""

    sums: dict
    largest: dict

    def merge(self, other):
        return Tally(
            jax.tree.map(jnp.add, self.sums, other.sums), jax.tree.map(jnp.maximum, self.largest, other.largest)
        )

    def compute(self):
        return self.sums, self.largest

    result = compute


def by_row(x, kind, table):
    """What is computed from each row alone, with its feature axis sorted, gathered, scattered and looped over."""

    def step(carry, column):
        carry = jnp.tanh(carry + column)
        return carry, carry

    def half(state):
        count, rest = state
        return count + jnp.where(rest.max(1) > 0.5, 1.0, 0.0), rest / 2

    return {
        "sort": jnp.sort(x, 1),
        "argsort": jnp.argsort(x, 1),
        "take_along": jnp.take_along_axis(x, jnp.argsort(-x, 1), 1),
        "top_k": jax.lax.top_k(x, 3),
        "cumsum": jnp.cumsum(x, 1),
        "scan": jax.lax.scan(step, x[:, 0], x.T)[1].T,
        "while": jax.lax.while_loop(lambda state: state[1].max() > 0.5, half, (jnp.zeros(len(x)), jnp.abs(x)))[0],
        "gather": table[kind],
        "gather_element": x[jnp.arange(len(x)), kind],
        "scatter_in_row": jax.vmap(lambda row, k: row.at[k].add(1.0).at[k - 1].set(0.0))(x, kind),
        "reversed": x[:, ::-1],
        "slice": x[:, 1:4],
    }


def over_rows(x, kind):
    """What is computed from all rows, and adds up or has a maximum over parts of a batch."""
    ones, zeros = jnp.ones(len(x)), jnp.zeros(CLASSES)
    sums = {
        "segment_sum": jax.ops.segment_sum(ones, kind, CLASSES),
        "segment_sum of rows": jax.ops.segment_sum(x, kind, CLASSES),
        "add": zeros.at[kind].add(1.0),
        "add at two": jnp.zeros((CLASSES, CLASSES)).at[kind, (kind + 1) % CLASSES].add(x[:, 0]),
        "bincount": jnp.bincount(kind, length=CLASSES),
        "one_hot": jax.nn.one_hot(kind, CLASSES).sum(0),
        "histogram": jnp.histogram(x, bins=jnp.linspace(-2.0, 2.0, 6))[0],
        "scan": jax.lax.scan(lambda total, k: (total.at[k].add(1.0), None), zeros, kind)[0],
        "while": jax.lax.while_loop(
            lambda s: s[0] < len(kind), lambda s: (s[0] + 1, s[1].at[kind[s[0]]].add(1.0)), (0, zeros)
        )[1],
        "cumsum": jnp.cumsum(ones)[-1],
        "sorted": jnp.sort(x[:, 0]).sum(),
    }
    largest = {
        "max": (zeros - 9).at[kind].max(x[:, 0]),
        "segment_max": jax.ops.segment_max(x, kind, CLASSES),
        "set": zeros.at[kind].set(1.0),
        "min": -(zeros + 9).at[kind].min(x[:, 1]),
        "top_k": jax.lax.top_k(x[:, 2], 1)[0],
        "sorted": jnp.sort(x[:, 3])[-1],
        "argmax": x[jnp.argmax(x[:, 4]), 4],
    }
    return Tally(sums, largest)


def law_model_fn(layout):
    def model_fn(features, labels, mode):
        cut = layout != "whole"
        w = est.get_variable("w", (WIDTH, WIDTH), partition=(None, "part") if cut else None)
        table = est.get_variable("table", (16, WIDTH), partition=("part",) if cut else None)
        start = {"initializer": jax.nn.initializers.zeros, "trainable": False}
        seen = est.get_variable("seen", (CLASSES,), **start)
        x = features @ w
        if cut:
            x = est.spread(x, 0 if layout == "spread rows" else 1)
        score = x.sum(1)
        # As in a classifier, the classes come from the model's output.
        kind = jnp.clip(jnp.round(jnp.abs(score)).astype(jnp.int32), 0, CLASSES - 1)
        rows = by_row(x, kind, table)
        smooth = sum(jnp.tanh(rows[name]).sum(1) for name in ("sort", "take_along", "cumsum", "gather", "scan"))
        pooled = jnp.zeros((CLASSES, WIDTH)).at[kind].add(x)[kind] + jax.ops.segment_sum(table[kind], kind, CLASSES)[0]
        # A sum over rows that mixes them would differ by how they are split; its derivative is all that is wanted.
        mixed = (pooled - jax.lax.stop_gradient(pooled)).sum(1)
        loss = est.losses.mean_squared_error(labels, smooth + 0 * mixed)
        if mode == est.ModeKeys.TRAIN:
            est.assign_add("seen", jax.ops.segment_sum(jnp.ones(len(x)), kind, CLASSES) + 0 * seen)
        metrics = {
            "tally": over_rows(x, kind),
            "iou": est.metrics.mean_iou(labels > 0, kind > 1, 2),
            "per_class": est.metrics.mean_per_class_accuracy(jnp.clip(kind - 1, 0), kind, CLASSES),
            "recall_at_k": est.metrics.recall_at_k(kind, x[:, :CLASSES], 2),
            "auc": est.metrics.auc(labels > 0, jax.nn.sigmoid(score)),
        }
        est.summary.histogram("score", score)
        train_op = TowerOptimizer(optax.sgd(0.01)).minimize(loss)
        return est.EstimatorSpec(mode, predictions=rows, loss=loss, train_op=train_op, eval_metric_ops=metrics)

    return model_fn


def rows_of(rows):
    x = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
    return x, np.sin(x.sum(-1)).astype(np.float32)


@functools.cache
def started():
    return est.transform(law_model_fn("whole")).init(jax.random.key(0), *rows_of(8))


def outcome(model_fn, mode, x, y):
    """All numbers of a step, predictions among them; a plain pytree."""
    model = est.transform(model_fn)
    if mode == est.ModeKeys.TRAIN:
        after, spec = model.train_step(started(), x, y)
    else:
        after, spec = None, model.eval_step(started(), x, y)
    reported = spec.reported["score"]
    return {
        "state": after and (after.variables, after.slots),
        "loss": spec.loss,
        "predictions": spec.predictions,
        "metrics": results(jax.device_get(spec.eval_metric_ops)),
        "histogram": (reported.counts, reported.sum),
    }


# A few: each compiles programs of a minute or so.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "parts", "layout", "mode", "rows"),
    [
        (4, 2, "whole", est.ModeKeys.TRAIN, 12),
        (2, 4, "spread rows", est.ModeKeys.TRAIN, 8),
        (2, 2, "cut", est.ModeKeys.EVAL, 7),
        (4, 2, "whole", est.ModeKeys.EVAL, 3),
    ],
)
def test_a_step_of_scatters_sorts_gathers_and_loops(towers, parts, layout, mode, rows):
    x, y = rows_of(rows)
    want = outcome(law_model_fn("whole"), mode, x, y)
    got = outcome(wide(towers, parts, law_model_fn(layout)), mode, x, y)
    assert_close(jax.device_get(got), jax.device_get(want), rtol=1e-4, atol=1e-5)


def counts(x):
    return jnp.zeros(2).at[(x > 0).astype(jnp.int32)].add(1.0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "counted"], meta_fields=[])
@dataclasses.dataclass
class CountsWhereMerged:
    """A metric whose merge, which runs outside of the towers, is a scatter of what they have cut."""

    values: jax.Array
    counted: jax.Array

    def merge(self, other):
        return CountsWhereMerged(self.values, self.counted + counts(other.values[:-1]))

    def compute(self):
        return self.counted


@pytest.mark.quick
def test_scatters_of_a_slice_of_a_cut_array_outside_of_the_towers():
    def model_fn(features, labels, mode):
        cut = est.spread(features, 0)
        est.get_variable("counted", lambda key: counts(cut[:-1].sum(1)), trainable=False)
        w = est.get_variable("w", (WIDTH, WIDTH), partition=(None, "part"))
        values = est.spread(w.sum(0), 0)
        metric = CountsWhereMerged(values, counts(values[:-1]))
        return est.EstimatorSpec(mode, loss=(cut @ w).mean(), eval_metric_ops={"counted": metric})

    x = rows_of(8)[0]
    model = est.transform(wide(2, 4, model_fn))
    state = model.init(jax.random.key(0), x, mode="eval")
    np.testing.assert_array_equal(state.variables["counted"], counts(x[:-1].sum(1)))
    got = model.eval_step(state, x).eval_metric_ops["counted"].compute()
    np.testing.assert_array_equal(got, 2 * counts(np.asarray(state.variables["w"]).sum(0)[:-1]))


def test_an_array_that_does_not_divide_by_the_devices_of_a_tower_stays_whole():
    stayed = []

    def model_fn(features, labels, mode):
        stayed.append([est.spread(features, axis) is features for axis in (0, 1)])
        return est.EstimatorSpec(mode, predictions=features)

    model = est.transform(wide(2, 4, model_fn))
    x = rows_of(6)[0]  # 3 rows of 8 in each tower
    model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x)
    assert stayed[-1] == [True, False]
