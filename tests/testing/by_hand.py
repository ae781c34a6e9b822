"""Training loops written out as in the guides of jax and Flax, for models of other libraries."""

import jax
import jax.numpy as jnp
import optax

MOMENTUM = optax.sgd(0.1, momentum=0.9)


def train_by_hand(params, loss_fn, batches, rest=None):
    """The losses of a loop, and what it makes of the parameters and of the rest, which is not trained.

    Args:
      loss_fn: a function of the parameters, the rest, the step's number, x and y, that returns the loss and the rest.
      batches: of shape `[steps, rows, ...]`.
    """

    @jax.jit
    def step(params, rest, slots, i, x, y):
        (loss, rest), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, rest, i, x, y)
        updates, slots = MOMENTUM.update(gradients, slots, params)
        return optax.apply_updates(params, updates), rest, slots, loss

    losses, slots = [], MOMENTUM.init(params)
    for i, (x, y) in enumerate(zip(*batches, strict=True)):
        params, rest, slots, loss = step(params, rest, slots, i, x, y)
        losses.append(loss)
    return jnp.stack(losses), params, rest


def train_nnx_by_hand(model, batches):
    """The losses of a loop, and what it makes of the variables of a model of `flax.nnx`, by the names here."""
    from flax import nnx

    optimizer = nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss_fn(model):
            return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer, x, y) for x, y in zip(*batches, strict=True)]
    kinds = {"net": nnx.Param, "net/batch_stats": nnx.BatchStat}
    return jnp.stack(losses), {name: nnx.to_pure_dict(nnx.state(model, kind)) for name, kind in kinds.items()}
