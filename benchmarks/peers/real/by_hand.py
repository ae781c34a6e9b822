"""The models of real shapes, each a loop around one `jit` with optax, its state donated.

python benchmarks/peers/real/by_hand.py resnet --data FOLDER
"""

import itertools

import data
import jax
import jax.numpy as jnp
import jax_models
import numpy as np
import optax

import common  # isort: skip

MOVING = ("/mean", "/variance")


class Dense:
    """A model whose variables are all differentiated."""

    def __init__(self, work):
        self.model, self.network = work.model, getattr(jax_models, work.model)
        self.tx = jax_models.optimizer_of(work.model, work.steps)
        variables = jax.tree.map(jnp.asarray, work.initial())
        moving = {name: variables.pop(name) for name in [*variables] if name.endswith(MOVING)}
        self.state = variables, moving, self.tx.init(variables)

    def step(self, state, x, y):
        variables, moving, slots = state

        def mean_loss(variables):
            outputs, moved = self.network(variables | moving, x, True)
            return jax_models.loss_of(self.model, outputs, y), moved

        (loss, moving), gradients = jax.value_and_grad(mean_loss, has_aux=True)(variables)
        updates, slots = self.tx.update(gradients, slots, variables)
        return (optax.apply_updates(variables, updates), moving, slots), loss

    def outputs(self, state, x):
        return self.network(state[0] | state[1], x, False)[0]


class WideDeep:
    """Wide & deep with two tables, of all columns: only the looked-up rows have a gradient and are updated."""

    model = "wide_deep"

    def __init__(self, work):
        self.tx = jax_models.optimizer_of(work.model, work.steps)
        variables = work.initial()
        tables = [
            jnp.asarray(np.concatenate([variables.pop(f"{kind}{i:02}/embedding") for i in range(data.COLUMNS)]))
            for kind in "cw"
        ]
        variables = jax.tree.map(jnp.asarray, variables)
        self.state = variables, self.tx.init(variables), tables, [jnp.full_like(table, 0.1) for table in tables]

    def places(self, ids):
        return ids + data.BUCKETS * jnp.arange(data.COLUMNS)

    def step(self, state, x, y):
        variables, slots, tables, sums = state
        ids, numbers = x
        places = self.places(ids)

        def mean_loss(rows, variables):
            return jax_models.loss_of(self.model, jax_models.wide_deep(rows, variables, numbers), y)

        rows = [table[places] for table in tables]
        loss, (of_rows, gradients) = jax.value_and_grad(mean_loss, (0, 1))(rows, variables)
        updates, slots = self.tx.update(gradients, slots, variables)
        # The gradients of a row that occurs several times are added before adagrad squares them.
        flat = places.ravel()
        once, which = jnp.unique(flat, return_inverse=True, size=flat.size, fill_value=len(tables[0]))
        for i, gradient in enumerate(of_rows):
            total = jax.ops.segment_sum(gradient.reshape(flat.size, -1), which, flat.size)
            sums[i] = sums[i].at[once].add(total**2, mode="drop")
            scale = data.RATES[self.model] * jax.lax.rsqrt(sums[i].at[once].get(mode="clip") + 1e-7)
            tables[i] = tables[i].at[once].add(-scale * total, mode="drop")
        return (optax.apply_updates(variables, updates), slots, tables, sums), loss

    def outputs(self, state, x):
        rows = [table[self.places(x[0])] for table in state[2]]
        return jax_models.wide_deep(rows, state[0], x[1])


def train(work, watch):
    model = (WideDeep if work.model == "wide_deep" else Dense)(work)
    step = jax.jit(model.step, donate_argnums=0)
    state, model.state = model.state, None
    for i, (x, y) in enumerate(data.batches(work, "train"), 1):
        state, loss = step(state, x, y)
        if i in work.marks:
            jax.block_until_ready((state, loss))
            watch.done(i)

    @jax.jit
    def loss_of(state, x, y):
        return jax_models.loss_of(work.model, model.outputs(state, x), y)

    @jax.jit
    def predict(state, x):
        return jax_models.predictions_of(work.model, model.outputs(state, x))

    def evaluate(count=None):
        losses = [loss_of(state, x, y) for x, y in itertools.islice(data.batches(work, "test"), count)]
        return float(np.mean(jax.device_get(losses)))

    def predictions(count=None):
        return [np.asarray(predict(state, x)) for x, _ in itertools.islice(data.batches(work, "test"), count)]

    evaluate(1), predictions(1)  # compile
    watch.rate("prediction", work.rows, predictions)
    return watch.rate("evaluation", work.rows, evaluate)


if __name__ == "__main__":
    common.main(train, {"jax": jax.__version__, "optax": optax.__version__}, data.work_of)
