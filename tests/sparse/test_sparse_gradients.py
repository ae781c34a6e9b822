"""Training with sparse gradients equals training with dense ones, or touches the looked-up rows only."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing, ones, zeros
from testing.programs import operations
from testing.towers import assert_close, assert_same_training, cpus, one_step, replicate, started

import estimator as est
from estimator.sparse._indexed_slices import sum_by_row
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn

ROWS, WIDTH, BATCH, STEPS = 40, 3, 8, 3


def dense(name, shape=(ROWS, WIDTH)):
    table = est.get_variable(name, shape)
    return lambda ids: jnp.where(ids[..., None] >= 0, table[ids], 0.0)


def sparse(name, shape=(ROWS, WIDTH)):
    return lambda ids: est.embedding_lookup(name, ids, shape)


def batches(seed=0, ids=4):
    """Ids with padding, most of them several times, in the rows of all towers."""
    random = np.random.default_rng(seed)
    low = random.integers(-2, 5, (STEPS, BATCH, ids - 1))
    return np.concatenate([low, random.integers(0, ROWS, (STEPS, BATCH, 1))], -1), random.normal(
        size=(STEPS, BATCH)
    ).astype(np.float32)


def words_model_fn(make_table, optimizer):
    """One table."""

    def loss_of(features, labels):
        return jnp.mean((jnp.tanh(make_table("words")(features)).sum((1, 2)) - labels) ** 2)

    return minimizing(loss_of, TowerOptimizer(optimizer))


def two_tables_model_fn(make_table, optimizer):
    """Two tables, one looked up twice, and two losses of which each optimizer takes one."""

    def model_fn(features, labels, mode):
        with est.variable_scope("tables"):
            words, users = make_table("words"), make_table("users", (ROWS, 2))
            rows, others = words(features), users(features[:, 0])
            again = words(features[:, ::2] // 2)
        output = jnp.einsum("bid,de,be->b", rows, est.get_variable("w", (WIDTH, 2)), others)
        loss = jnp.mean((output - labels) ** 2)
        other_loss = jnp.mean(jnp.tanh(again).sum((1, 2)) * labels)
        train_op = est.group(
            TowerOptimizer(optimizer).minimize(loss), TowerOptimizer(optimizer).minimize(other_loss, ["tables/words"])
        )
        return est.EstimatorSpec(mode, predictions=output, loss=loss, train_op=train_op)

    return model_fn


# Optimizers for which it makes no difference.

EXACT = optax.adagrad(optax.exponential_decay(0.1, 2, 0.5))


@functools.cache
def dense_training():
    ids, labels = batches()
    model, state = started(two_tables_model_fn(dense, EXACT), ids[0], labels[0])
    return state, *model.train_loop(state, (ids, labels))


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 4])
def test_sparse_gradients_train_as_dense_ones_do(towers):
    start, want_state, want = dense_training()
    model = est.transform(replicate(two_tables_model_fn(sparse, EXACT), towers))
    state, got = model.train_loop(start, batches())
    assert np.ptp(got.loss) > 0.1
    assert_close((got.loss, got.predictions), (want.loss, want.predictions))
    assert_close((state.variables, state.slots), (want_state.variables, want_state.slots))


def about_sparse_gradients(messages):
    return [message for message in messages if "sparse gradients" in message]


def test_a_plain_optimizer_that_moves_every_row_gets_the_dense_gradient_and_says_so_once(messages):
    want, got = (words_model_fn(make, optax.adam(0.1)) for make in (dense, sparse))
    state = assert_same_training(want, replicate(got, 2), batches())
    assert state.variables["words"].shape == (ROWS, WIDTH)
    (message,) = about_sparse_gradients(messages())
    assert "'optimizer' gets the sparse gradients of ['words'] as dense arrays" in message
    assert "`est.lazy(...)`" in message


@pytest.mark.slow
def test_the_global_norm_is_clipped_as_with_the_dense_gradient(messages):
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))
    want, got = (two_tables_model_fn(make, clipped) for make in (dense, sparse))
    assert_same_training(want, replicate(got, 2), batches())
    assert not about_sparse_gradients(messages())  # the other rows add nothing to the norm


@pytest.mark.slow
def test_a_norm_over_the_values_of_a_table_needs_the_dense_gradient(messages):
    scaled = optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.5))
    want, got = (words_model_fn(make, scaled) for make in (dense, sparse))
    assert_same_training(want, replicate(got, 2), batches())
    (message,) = about_sparse_gradients(messages())
    assert "est.lazy" not in message


# Optimizers that move the looked-up rows only.


def touched_only(update, slots, ids, labels, table):
    """numpy: the table after steps in which `update(gradient, step, *slot rows)` changes the looked-up rows."""
    slots = [np.zeros_like(table) for _ in range(slots)]
    for step in range(STEPS):
        rows = np.where(ids[step][..., None] >= 0, table[ids[step]], 0)
        error = 2 * (np.tanh(rows).sum((1, 2)) - labels[step]) / BATCH
        gradient = np.zeros_like(table)
        np.add.at(gradient, ids[step], error[:, None, None] * (1 - np.tanh(rows) ** 2) * (ids[step][..., None] >= 0))
        touched = np.unique(ids[step][ids[step] >= 0])
        change, *new = update(gradient[touched], step, *(slot[touched] for slot in slots))
        table[touched] += change
        for slot, value in zip(slots, new, strict=True):
            slot[touched] = value
    return table, slots


def momentum(gradient, step, trace):
    trace = 0.9 * trace + gradient
    return -0.1 * trace, trace


def adam(gradient, step, mu, nu):
    mu, nu = 0.9 * mu + 0.1 * gradient, 0.999 * nu + 0.001 * gradient**2
    mean, variance = mu / (1 - 0.9 ** (step + 1)), nu / (1 - 0.999 ** (step + 1))
    return -0.1 * mean / (np.sqrt(variance) + 1e-8), mu, nu


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, update, slots, towers",
    [(optax.sgd(0.1, momentum=0.9), momentum, 1, 0), (est.lazy(optax.adam(0.1)), adam, 2, 2)],
    ids=["momentum", "lazy adam on towers"],
)
def test_only_looked_up_rows_and_their_slots_move(optimizer, update, slots, towers, messages):
    ids, labels = batches()
    model, state = started(replicate(words_model_fn(sparse, optimizer), towers), ids[0], labels[0])
    want, want_slots = touched_only(update, slots, ids, labels, np.float64(state.variables["words"]))
    for batch in zip(ids, labels, strict=True):
        state, _ = model.train_step(state, *batch)
    assert_close(state.variables["words"], np.float32(want), rtol=1e-4)
    tables = [x for x in jax.tree.leaves(state.slots) if x.shape == (ROWS, WIDTH)]
    assert_close(tables, [np.float32(slot) for slot in want_slots], rtol=1e-4)
    assert not about_sparse_gradients(messages())


def test_lazy_does_nothing_else_to_dense_variables():
    optimizers = optax.adam(0.1), est.Optimizer(est.lazy(optax.adam(0.1)))
    plain, is_lazy = (words_model_fn(dense, optimizer) for optimizer in optimizers)
    assert_same_training(plain, replicate(is_lazy, 2), batches())


def test_lazy_refuses_what_is_not_row_wise():
    with pytest.raises(TypeError, match=r"`est.lazy` takes an optax.GradientTransformation .*; got 0.1"):
        est.lazy(0.1)
    ids, labels = batches()
    model, state = started(words_model_fn(sparse, est.lazy(optax.lamb(0.1))), ids[0], labels[0])
    with pytest.raises(
        ValueError, match=r"(?s)'optimizer' it could not be shown.*scale_by_trust_ratio.*Leave `est.lazy` out"
    ):
        model.train_step(state, ids[0], labels[0])


def whole_tables(model_fn, rows):
    """The operations of the donated, compiled training step that make arrays of the table's size."""
    ids, labels = batches()
    model, state = started(model_fn, ids[0], labels[0])
    step = jax.jit(model.train_step, donate_argnums=0).lower(state, ids[0], labels[0]).compile()
    made = re.findall(rf"= f32\[{rows},{WIDTH}\]\S* ([\w-]+)\(", step.as_text())
    sums = re.findall(r"= f32\[([\d,]*)\]\S* all-reduce", step.as_text())
    return set(made) - {"parameter", "get-tuple-element"}, sums


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_nothing_of_the_size_of_the_table_is_computed():
    rows, adagrad = 7919, optax.adagrad(0.1)

    def made_by(make_table, optimizer, towers):
        return whole_tables(
            replicate(words_model_fn(lambda name: make_table(name, (rows, WIDTH)), optimizer), towers), rows
        )

    alone = {"scatter", "fusion"}  # the fusion is around a scatter
    assert made_by(sparse, adagrad, 1) == (alone, [])
    assert made_by(sparse, est.lazy(optax.adam(0.1)), 2) == (alone, ["2"])  # the loss, in the spec and in the train_op
    made, _ = made_by(dense, adagrad, 1)
    assert "multiply" in made and "broadcast" in made


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_steps_that_may_be_skipped_compute_nothing_of_that_size_either():
    """Neither where gradients are inf or NaN, nor where a loss scale made them so: rows are put back as they were."""
    rows = 7919
    optimizer = est.Optimizer(est.lazy(optax.adam(0.1)), loss_scale=est.DynamicLossScale())
    model_fn = words_model_fn(lambda name: sparse(name, (rows, WIDTH)), optimizer)
    made, sums = whole_tables(replicate_model_fn(model_fn, devices=cpus(2), on_nan="skip"), rows)
    assert made == {"scatter", "fusion"}
    assert sums == ["4"]  # the loss, twice, and a mark for each tower


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_a_step_gathers_and_scatters_as_often_as_one_by_hand():
    ids, labels = batches()

    def by_hand(table, squares, ids, labels):
        def loss_fn(rows):
            return jnp.mean((jnp.tanh(rows).sum((1, 2)) - labels) ** 2)

        gradient = jax.grad(loss_fn)(table[ids]).reshape(-1, WIDTH)
        values, rows = sum_by_row(est.IndexedSlices(gradient, ids.reshape(-1), table.shape))
        sums = squares[rows] + values**2
        steps = -0.1 * values * jax.lax.rsqrt(sums + 1e-7)
        return table.at[rows].add(steps, mode="drop"), squares.at[rows].set(sums, mode="drop")

    model, state = started(words_model_fn(sparse, optax.adagrad(0.1)), ids[0], labels[0])
    table = state.variables["words"]
    want, got = (
        operations(jax.jit(step, donate_argnums=donated).lower(*args, ids[0], labels[0]).compile().as_text())
        for step, donated, args in ((by_hand, (0, 1), (table, table)), (model.train_step, 0, (state,)))
    )
    for operation in ("gather", "scatter", "sort", "while"):
        assert got[operation] == want[operation] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_a_table_of_a_small_dtype_is_updated_in_place():
    rows = 7919
    ids, labels = batches()

    def loss_of(features, labels):
        found = est.embedding_lookup("words", features, (rows, WIDTH), jnp.bfloat16)
        return jnp.mean((jnp.tanh(found.astype(jnp.float32)).sum((1, 2)) - labels) ** 2)

    model, state = started(minimizing(loss_of, est.Optimizer(optax.adagrad(0.1))), ids[0], labels[0])
    program = jax.jit(model.train_step, donate_argnums=0).lower(state, ids[0], labels[0]).compile().as_text()
    _, outside_of_fusions = program.split("ENTRY")
    made = re.findall(rf"= (\w+)\[{rows},{WIDTH}\]\S* ([\w-]+)\(", outside_of_fusions)
    assert {kind for kind, _ in made} <= {"bf16", "u16"}  # no float32
    assert not {"convert", "copy"} & {operation for _, operation in made}


# Where the gradient is dense.


def look_up(ids):
    return est.embedding_lookup("words", ids)


SEEN_WHOLE = {
    "read": lambda ids: (est.read_variable("words"), look_up(ids))[1],
    "tied": lambda ids: look_up(ids) * est.read_variable("words").sum(0),
    "jit": lambda ids: jax.jit(lambda ids: look_up(ids))(ids),
    "vmap": lambda ids: jax.vmap(look_up)(ids),
    "scan": lambda ids: jax.lax.scan(lambda i, row: (i, look_up(row)), 0, ids)[1],
    "checkpoint": lambda ids: jax.checkpoint(lambda ids: look_up(ids))(ids),
}


@pytest.mark.slow
def test_a_table_that_is_seen_whole_or_looked_up_in_another_trace_has_a_dense_gradient():
    kinds = {}

    def loss_of(rows, labels):
        return jnp.mean((jnp.tanh(rows).sum((1, 2)) - labels) ** 2)

    def model_fn(features, labels, mode):
        loss = 0.0
        for how, rows_of in SEEN_WHOLE.items():
            with est.variable_scope(how):
                est.embedding_lookup("words", features, (ROWS, WIDTH))
                loss += loss_of(rows_of(features), labels)
        optimizer = TowerOptimizer(optax.sgd(1.0))
        pairs = optimizer.compute_gradients(loss)
        kinds.update({name: type(gradient) for gradient, name in pairs})
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(pairs))

    @jax.jit
    def by_hand(tables, ids, labels):
        def loss_fn(name, table):
            rows = jnp.where(ids[..., None] >= 0, table[ids], 0.0)
            return loss_of(rows * table.sum(0) if name == "tied/words" else rows, labels)

        return {name: table - jax.grad(loss_fn, 1)(name, table) for name, table in tables.items()}

    (ids, *_), (labels, *_) = batches()
    model, state = started(replicate(model_fn, 2), ids, labels)
    after, _ = model.train_step(state, ids, labels)
    assert_close(after.variables, by_hand(state.variables, ids, labels), rtol=1e-4, atol=1e-6)
    assert kinds.keys() == {f"{how}/words" for how in SEEN_WHOLE}
    assert not any(issubclass(kind, est.IndexedSlices) for kind in kinds.values())


# In the hands of a model_fn.


@pytest.mark.slow
def test_a_model_fn_may_change_the_values_of_a_sparse_gradient():
    def model_fn(make_table, change):
        def model_fn(features, labels, mode):
            optimizer = TowerOptimizer(optax.sgd(0.1))
            loss = jnp.mean((make_table("words")(features).sum((1, 2)) - labels) ** 2)
            pairs = [(change(gradient), name) for gradient, name in optimizer.compute_gradients(loss)]
            again = jnp.mean(make_table("users")(features[:, 0]).sum(1) * labels)  # a lookup after the gradients
            train_op = est.group(optimizer.apply_gradients(pairs), TowerOptimizer(optax.sgd(0.1)).minimize(again))
            return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

        return model_fn

    def halve(gradient):
        assert gradient.dense_shape == (ROWS, WIDTH) and gradient.values.shape == (*gradient.indices.shape, WIDTH)
        return dataclasses.replace(gradient, values=0.5 * gradient.values)

    want, got = model_fn(dense, lambda gradient: 0.5 * gradient), model_fn(sparse, halve)
    assert_same_training(want, replicate(got, 2), batches())


def applying(indices, values, shape=(4, 2)):
    """A model_fn that applies a sparse gradient made by hand."""

    def model_fn(features, labels, mode):
        zeros("words", (4, 2))
        train_op = est.Optimizer(optax.sgd(1.0)).apply_gradients([(est.IndexedSlices(values, indices, shape), "words")])
        return est.EstimatorSpec(mode, loss=jnp.zeros(()), train_op=train_op)

    return model_fn


def test_a_sparse_gradient_made_by_hand_is_applied():
    state, _ = one_step(applying(jnp.array([2, 0, 2, -1, 4]), jnp.ones((5, 2))), np.ones(1))
    np.testing.assert_array_equal(state.variables["words"], [[-1, -1], [0, 0], [-2, -2], [0, 0]])
    dense = est.IndexedSlices(jnp.ones((5, 2)), jnp.array([2, 0, 2, -1, 4]), (4, 2)).to_dense()
    np.testing.assert_array_equal(dense, -state.variables["words"])


@pytest.mark.quick
@pytest.mark.parametrize("towers, layer", [(1, False), (2, True)])
def test_a_lookup_sees_what_a_custom_getter_returns(towers, layer):
    def getter(get, name, **arguments):
        return 10 * get(name, **arguments)

    def model_fn(features, labels, mode):
        with est.variable_scope("s", custom_getter=getter):
            if layer:
                rows = est.layers.embed(features, 4, 1, jax.nn.initializers.ones, scope="t")
                again = est.layers.embed(features, 4, 1, scope="t", reuse=True)
            else:
                rows = est.embedding_lookup("t", features, (4, 1), initializer=jax.nn.initializers.ones)
                again = est.embedding_lookup("t", features)
        loss = jnp.mean(rows + again)
        return est.EstimatorSpec(mode, rows, loss, TowerOptimizer(optax.sgd(1.0)).minimize(loss))

    ids = np.array([0, 2])
    state, spec = one_step(replicate(model_fn, towers), ids)
    assert spec.loss == 20 and spec.predictions.ravel().tolist() == [10, 10]
    assert state.variables["s/t/embeddings" if layer else "s/t"].ravel().tolist() == [-9, 1, -9, 1]


@pytest.mark.parametrize(
    "indices, values, shape",
    [
        (jnp.array([0.5, 1.0]), jnp.ones((2, 2)), (4, 2)),
        (jnp.array([[0, 1]]), jnp.ones((2, 2)), (4, 2)),
        (jnp.array([0, 1]), jnp.ones((2, 3)), (4, 2)),
        (jnp.array([0, 1]), jnp.ones((2, 3)), (4, 3)),
    ],
)
def test_a_sparse_gradient_that_does_not_fit_is_refused(indices, values, shape):
    with pytest.raises(ValueError, match=r"`Optimizer.apply_gradients`(: the gradient of 'words'| got IndexedSlices)"):
        one_step(applying(indices, values, shape), np.ones(1))


def test_an_id_beyond_the_table_stops_the_training(tmp_path):
    ids, labels = batches()
    ids[1, 0, 0] = ROWS
    estimator = est.Estimator(words_model_fn(sparse, optax.sgd(0.1)), tmp_path)
    with pytest.raises(est.NanLossDuringTrainingError):
        estimator.train(lambda: zip(ids, labels, strict=True))


OPTIONS = [{"accumulate_steps": 2}, {}, {"loss_scale": est.DynamicLossScale()}, {}]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "options"), [*zip(VariableDistribution, OPTIONS, strict=True)], ids=str)
def test_tables_live_wherever_variables_do_with_micro_batches_and_a_loss_scale(where, options):
    def loss_of(features, labels):
        rows = est.embedding_lookup("table", features, (12, 2), initializer=jax.nn.initializers.ones)
        return jnp.mean((rows @ ones("w", (2,)) - labels[:, None]) ** 2)

    ids = np.array([[0, 3], [3, -1], [5, 5], [11, 0], [2, 3], [0, 0], [7, 8], [3, 1]])
    labels = np.arange(8, dtype=np.float32)
    plain = est.transform(minimizing(loss_of, optax.adagrad(0.1)))
    in_towers = replicate(minimizing(loss_of, optax.adagrad(0.1), **options), 2, variable_distribution=where)
    towers = est.transform(in_towers)
    want, got = (model.init(jax.random.key(0), ids, labels) for model in (plain, towers))
    for _ in range(2):
        want, _ = plain.train_step(want, ids, labels)
        got, _ = towers.train_step(got, ids, labels)
    slots = got.slots["optimizer"].inner if "loss_scale" in options else got.slots["optimizer"]
    assert_close(jax.device_get((got.variables, slots)), jax.device_get((want.variables, want.slots["optimizer"])))
