"""A loop around one `jit` with optax, its state donated.

python benchmarks/peers/by_hand.py mlp
"""

import functools

import common
import jax
import jax.numpy as jnp
import optax
from jax_models import loss_of


def train(work, watch):
    tx = optax.adam(common.LEARNING_RATE)
    mean_loss = functools.partial(loss_of, work.model)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, y):
        variables, slots = state
        loss, gradients = jax.value_and_grad(mean_loss)(variables, x, y)
        updates, slots = tx.update(gradients, slots, variables)
        return (optax.apply_updates(variables, updates), slots), loss

    variables = jax.tree.map(jnp.asarray, work.initial())
    state = variables, tx.init(variables)
    for i in range(work.steps):
        rows = slice(i * work.batch_size, (i + 1) * work.batch_size)
        state, loss = step(state, work.x[rows], work.y[rows])
        if i + 1 in work.marks:
            jax.block_until_ready(loss)
            watch.done(i + 1)
    return float(mean_loss(state[0], work.x[: work.batch_size], work.y[: work.batch_size]))


if __name__ == "__main__":
    common.main(train, {"jax": jax.__version__, "optax": optax.__version__})
