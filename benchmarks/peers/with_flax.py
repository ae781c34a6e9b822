"""Flax: a Linen module, a `TrainState` and a jitted `train_step`, whose losses are read after the epoch.

python benchmarks/peers/with_flax.py mlp
"""

import common
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="out")(nn.relu(nn.Dense(64, name="hidden")(x)))


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name, filters in (("conv0", 16), ("conv1", 32)):
            x = nn.max_pool(nn.relu(nn.Conv(filters, (3, 3), name=name)(x)), (2, 2), (2, 2))
        return nn.Dense(10, name="out")(x.reshape(len(x), -1))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        def norm(name):
            return nn.LayerNorm(common.NORM_EPSILON, use_fast_variance=False, name=name)

        batch, length = tokens.shape
        x = nn.Embed(common.VOCABULARY, common.WIDTH, name="tokens")(tokens)
        x += nn.Embed(common.LENGTH, common.WIDTH, name="positions")(jnp.arange(length))
        for i in range(common.BLOCKS):
            qkv = nn.Dense(3 * common.WIDTH, name=f"qkv{i}")(norm(f"before{i}")(x))
            q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, common.HEADS, -1), 2, 0)
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, -1)
            x += nn.Dense(common.WIDTH, name=f"mix{i}")(mixed)
            up = nn.gelu(nn.Dense(4 * common.WIDTH, name=f"up{i}")(norm(f"between{i}")(x)))
            x += nn.Dense(common.WIDTH, name=f"down{i}")(up)
        return nn.Dense(common.VOCABULARY, name="out")(norm("last")(x))


def mean_loss(state, params, x, y):
    predictions = state.apply_fn({"params": params}, x)
    if predictions.ndim == y.ndim:
        return jnp.mean(jnp.square(predictions - y))
    return optax.softmax_cross_entropy_with_integer_labels(predictions, y).mean()


@jax.jit
def train_step(state, x, y):
    loss, gradients = jax.value_and_grad(lambda params: mean_loss(state, params, x, y))(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(work, watch):
    module = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}[work.model]()
    params = flax.traverse_util.unflatten_dict(jax.tree.map(jnp.asarray, work.initial()), sep="/")
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(common.LEARNING_RATE))
    losses = []
    for i in range(work.steps):
        rows = slice(i * work.batch_size, (i + 1) * work.batch_size)
        state, loss = train_step(state, work.x[rows], work.y[rows])
        losses.append(loss)
        if i + 1 in work.marks:
            jax.block_until_ready(loss)
            watch.done(i + 1)
    print("mean loss of the epoch:", np.mean(jax.device_get(losses)))
    return float(mean_loss(state, state.params, work.x[: work.batch_size], work.y[: work.batch_size]))


if __name__ == "__main__":
    common.main(train, {"Flax": flax.__version__, "jax": jax.__version__, "optax": optax.__version__})
