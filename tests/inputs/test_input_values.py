"""The values of a batch are those it had when it was yielded, and they arrive, or an error says that they cannot."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from testing.estimators import make
from testing.model_fns import minimizing, ones, zeros
from testing.towers import replicate

import estimator as est
from estimator.inputs._batch_values import copy_batch
from estimator.inputs._input_fn import batches
from estimator.loop._programs import stacked_batches
from replicate import TowerOptimizer, num_towers

N = 60
ROWS = 4


def summing(features, labels, mode):
    """Sums what it sees, in training by a variable, so that every batch is known to have arrived, once."""
    seen = sum(leaf.astype(jnp.float32).mean() for leaf in jax.tree.leaves((features, labels)))
    w = zeros("w")
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=jax.tree.leaves(features)[0])
    est.get_variable("sum", (), initializer=jax.nn.initializers.zeros, trainable=False)
    est.assign_add("sum", seen / num_towers())
    loss = seen + 0 * w
    return est.EstimatorSpec(
        mode,
        loss=loss,
        train_op=TowerOptimizer(optax.sgd(0.0)).minimize(loss),
        eval_metric_ops={"mean": est.metrics.mean(jax.tree.leaves(features)[0].astype(jnp.float32))},
    )


def aligned(shape, dtype=np.float32):
    """Memory of which jax makes no copy on CPU devices: it begins at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


class ArrayLike:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class OnlyDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def refilled(memory, element=None):
    """The same element again and again, whose memory is filled with the number of the batch."""
    for i in range(N):
        memory[:] = i
        yield memory if element is None else element


def one_buffer(tmp_path, shape=(ROWS, 2), dtype=np.float32):
    return refilled(aligned(shape, dtype))


def a_ring(tmp_path):
    ring = [aligned((ROWS, 2)) for _ in range(3)]
    for i in range(N):
        ring[i % 3][:] = i
        yield ring[i % 3]


def read_only_views(tmp_path):
    buffer = aligned((ROWS, 2))
    view = buffer.view()
    view.flags.writeable = False
    return refilled(buffer, view)


def strided_views(tmp_path):
    buffer = aligned((2, ROWS))
    return refilled(buffer, buffer.T)


def nested(tmp_path):
    """The same dict and arrays again and again."""
    buffer = aligned((ROWS, 2))
    return refilled(buffer, {"a": (buffer,)})


def sparse(tmp_path):
    data, indices = aligned((ROWS,)), np.array([[i, 0] for i in range(ROWS)], np.int32)
    for i in range(N):
        data[:] = i * ROWS
        yield BCOO((data, indices), shape=(ROWS, 2))


ALIKE = [  # in shape and dtype, so that one program takes them
    one_buffer,
    a_ring,
    lambda path: one_buffer(path, dtype=">f4"),
    lambda path: map(ArrayLike, one_buffer(path)),
    lambda path: map(OnlyDLPack, one_buffer(path)),
    lambda path: (jnp.array(x) if i % 3 else x for i, x in enumerate(one_buffer(path))),
    lambda path: refilled(np.memmap(path / "map", np.float32, "w+", shape=(ROWS, 2))),
    read_only_views,
    strided_views,
]
SOURCES = {
    "all kinds": lambda path: itertools.chain.from_iterable(source(path) for source in ALIKE),
    "a large buffer": lambda path: one_buffer(path, (ROWS, 20_000)),
    "a wide buffer": lambda path: one_buffer(path, dtype=np.int64),
    "tensors of torch": lambda path: refilled(pytest.importorskip("torch").zeros((ROWS, 2))),
    "nested": nested,
}
REPEATS = {"all kinds": len(ALIKE)}
TOTAL = sum(range(N))


def summed(estimator):
    return float(estimator.get_variable_value("sum"))


@pytest.mark.quick
@pytest.mark.covers("1.6 a batch keeps its values")
@pytest.mark.parametrize(
    "source, loop", [("all kinds", 1), ("a wide buffer", "auto"), *((source, 7) for source in SOURCES)]
)
def test_training_sees_each_batch_as_it_was_yielded(tmp_path, source, loop):
    estimator = make(tmp_path / "m", summing, steps_per_loop=loop)
    assert summed(estimator.train(functools.partial(SOURCES[source], tmp_path))) == TOTAL * REPEATS.get(source, 1)


@pytest.mark.quick
@pytest.mark.covers("1.6 a batch keeps its values")
@pytest.mark.parametrize("source", SOURCES)
def test_evaluation_and_prediction_see_each_batch_as_it_was_yielded(tmp_path, source):
    estimator, input_fn = make(tmp_path / "m", summing), functools.partial(SOURCES[source], tmp_path)
    estimator.train(lambda: itertools.islice(input_fn(), 1))
    results = estimator.evaluate(input_fn)
    assert results["mean"] * N == results["loss"] * N == TOTAL
    predicted, numbers = list(estimator.predict(input_fn, yield_single_examples=False)), [*range(N)]
    numbers *= REPEATS.get(source, 1)
    assert [float(batch.mean()) for batch in predicted] == numbers
    assert [float(batch.max()) for batch in predicted] == numbers  # those given out stay as they were


@pytest.mark.quick
@pytest.mark.covers("1.6 a batch keeps its values")
@pytest.mark.parametrize("source, loop, towers", [("a large buffer", 7, 4), ("nested", 1, 2)])
def test_towers_see_each_batch_as_it_was_yielded(tmp_path, source, towers, loop):
    estimator = make(tmp_path / "m", replicate(summing, towers), steps_per_loop=loop)
    input_fn = functools.partial(SOURCES[source], tmp_path)
    assert summed(estimator.train(input_fn)) == TOTAL
    assert estimator.evaluate(input_fn)["mean"] * N == pytest.approx(TOTAL)
    predicted = estimator.predict(input_fn, yield_single_examples=False)
    assert [float(np.asarray(jax.tree.leaves(batch)[0]).mean()) for batch in predicted] == list(range(N))


def test_sparse_features_are_taken_as_they_were_yielded(tmp_path):
    def loss_of(features, labels):
        est.get_variable("sum", (), initializer=jax.nn.initializers.zeros, trainable=False)
        seen = features.todense().sum() / ROWS**2
        est.assign_add("sum", seen)
        return seen + 0 * zeros("w")

    assert summed(make(tmp_path / "m", minimizing(loss_of, optax.sgd(0.0))).train(lambda: sparse(tmp_path))) == TOTAL


# The pure steps, which are not waited for when the call returns.


def late(features, labels, mode):
    """A step that reads its features after it has computed for a while."""
    after = jax.lax.fori_loop(0, 100, lambda _, x: jnp.sin(x @ x), zeros("w", (100, 100)))
    seen = after.sum() * 0 + features.mean()
    est.get_variable("sum", (), initializer=jax.nn.initializers.zeros, trainable=False)
    est.assign_add("sum", seen)
    spec = {} if mode == est.ModeKeys.PREDICT else {"loss": seen}
    if mode == est.ModeKeys.TRAIN:
        spec["train_op"] = est.Optimizer(optax.sgd(0.0)).minimize(seen)
    return est.EstimatorSpec(mode, predictions={"seen": seen}, **spec)


@pytest.mark.quick
@pytest.mark.parametrize("step", ["train_step", "eval_step", "predict_step", "train_loop", "train_loop of a stack"])
def test_a_buffer_may_be_written_again_when_a_step_has_been_called(step):
    model = est.transform(late)
    buffer = aligned((ROWS, 2))
    buffer[:] = 0
    state = model.init(jax.random.key(0), buffer)

    def call(state):
        if step == "train_loop":
            return model.train_loop(state, [buffer])
        if step == "train_loop of a stack":
            return model.train_loop(state, (buffer[None], None))
        output = getattr(model, step)(state, buffer)
        return output if step == "train_step" else (state, output)

    seen = 0.0
    for i in range(20):
        buffer[:] = i
        state, spec = call(state)
        buffer[:] = 1000.0
        seen += float(np.sum(spec.predictions["seen"]))
    assert seen == sum(range(20))


# Batches that are wanted together are copied to one stack.


def test_batches_wanted_together_are_one_stack_already():
    buffer, y = aligned((ROWS, 2)), np.arange(ROWS)

    def elements():
        for i in range(7):
            buffer[:] = i
            yield {"x": buffer, "scalar": np.array(i)}, y

    source = batches(elements())
    source.peek()
    for n, first in ((3, 0), (3, 3)):
        source.expect(n)
        pairs = [next(source) for _ in range(n)]
        features, labels = stacked_batches(pairs, n)
        assert features["x"][:, 0, 0].tolist() == features["scalar"].tolist() == [first, first + 1, first + 2]
        assert np.shares_memory(features["x"], pairs[0][0]["x"])
        np.testing.assert_array_equal(labels, [y] * n)
        more, _ = stacked_batches(pairs, n + 2)
        assert more["x"][:, 0, 0].tolist() == [first, first + 1, first + 2, first + 2, first + 2]


def test_batches_unlike_the_first_are_not_of_the_stack():
    x = np.arange(6.0, dtype=np.float32)
    source = batches([(x, x), (x[:3], x), (x, jnp.asarray(x)), (x.astype(np.int8), x), (x + 1, x)])
    source.expect(3)
    pairs = list(source)
    assert stacked_batches(pairs[:3], 3) is None
    np.testing.assert_array_equal(pairs[1][0], x[:3])
    np.testing.assert_array_equal(pairs[4][0], x + 1)
    for order in ([0, 2], [2, 0]):
        np.testing.assert_array_equal(stacked_batches([pairs[i] for i in order], 2), [[x, x], [x, x]])


# Numbers that do not fit.

TOO_LARGE = [
    (np.int64, 2**32 + 5, "int32"),
    (np.int64, -(2**31) - 1, "int32"),
    (np.uint64, 2**63, "uint32"),
    (np.float64, 1e39, "float32"),
    (np.float64, -1e39, "float32"),
    (np.complex128, 1e39j, "complex64"),
]


@pytest.mark.parametrize(("dtype", "value", "narrow"), TOO_LARGE)
def test_a_number_that_does_not_fit_is_an_error_that_names_it(dtype, value, narrow):
    ids = np.array([1, 2, value, 3], dtype)
    message = (
        rf"^features\['a'\]\['ids'\] holds {ids[2]}, which does not fit {narrow}, what jax makes of {ids.dtype} "
        r"without x64. Call `jax.config.update\('jax_enable_x64', True\)`"
    ).replace("+", r"\+")
    with pytest.raises(ValueError, match=message):
        copy_batch({"a": {"ids": ids, "other": ids[:1]}}, ids[:2])
    with pytest.raises(ValueError, match="^labels holds"):
        copy_batch({"a": ids[:2]}, ids)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_numbers_at_the_ends_of_the_range_arrive(dtype):
    info = np.iinfo({np.int64: np.int32, np.uint64: np.uint32}[dtype])
    x = np.array([info.min, 0, info.max], dtype)
    features, labels = copy_batch(x, x[:0])
    assert features.dtype == labels.dtype == info.dtype and features.tolist() == x.tolist()


def test_infinities_and_nans_arrive():
    x = np.array([np.inf, -np.inf, np.nan, 1e-300, np.finfo(np.float32).max])
    features, _ = copy_batch(x)
    np.testing.assert_array_equal(features, [np.inf, -np.inf, np.nan, 0, np.finfo(np.float32).max])


def test_with_x64_numbers_stay_as_they_are():
    with jax.enable_x64(True):
        for dtype, value, _ in TOO_LARGE:
            x = np.array([value], dtype)
            features, _ = copy_batch(x)
            assert features.dtype == dtype and features == x and features is not x


TOO_LARGE_ID = r"features\['ids'\] holds 4294967296, which does not fit int32"


def identity(features, labels, mode):
    loss = features["ids"].astype(jnp.float32).mean() * ones("w")
    train_op = est.Optimizer(optax.sgd(0.0)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, predictions=features["ids"])


@pytest.mark.quick
@pytest.mark.covers("1.6 int64 and float64")
@pytest.mark.parametrize(
    "verb, first, towers",
    [("train", 0, 0), ("train", 3, 2), ("evaluate", 3, 0), ("predict", 3, 0)],
)
def test_numbers_that_do_not_fit_end_every_verb(tmp_path, verb, first, towers):
    good, bad = {"ids": np.arange(4)}, {"ids": np.arange(4) + 2**32}
    estimator = make(tmp_path, replicate(summing, towers) if towers else identity)
    with pytest.raises(ValueError, match=TOO_LARGE_ID):
        list(getattr(estimator, verb)(lambda: [good] * first + [bad] * 2))


def test_numbers_of_est_inputs_that_do_not_fit_are_errors(tmp_path):
    pd = pytest.importorskip("pandas")
    ids = np.arange(8) + 2**31 - 4
    for input_fn in (
        est.inputs.numpy_input_fn({"ids": ids}, batch_size=4, shuffle=False),
        est.inputs.pandas_input_fn(pd.DataFrame({"ids": ids}), batch_size=4, shuffle=False),
    ):
        with pytest.raises(ValueError, match=r"features\['ids'\] holds 2147483648, which does not fit int32"):
            make(tmp_path, identity).train(input_fn)


@pytest.mark.quick
def test_numbers_that_do_not_fit_are_errors_in_the_pure_steps():
    good, bad = {"ids": np.arange(4)}, {"ids": np.arange(4) + 2**32}
    model = est.transform(identity)
    state = model.init(jax.random.key(0), good)
    calls = {
        "init": lambda x: model.init(jax.random.key(0), x),
        "train_loop": lambda x: model.train_loop(state, [x]),
        "a stack": lambda x: model.train_loop(state, ({"ids": x["ids"][None]}, None)),
    } | {name: functools.partial(getattr(model, name), state) for name in ("train_step", "eval_step", "predict_step")}
    for call in calls.values():
        call(good)
        with pytest.raises(ValueError, match=TOO_LARGE_ID):
            call(bad)


def test_a_masked_array_is_an_error():
    with pytest.raises(ValueError, match=r"features\['x'\] is a masked array, which jax has not. Give `x.filled"):
        copy_batch({"x": np.ma.masked_array([1.0, 2.0], [True, False])})
