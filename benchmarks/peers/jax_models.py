"""The models as functions of a dict of variables, for the scripts that write them in plain jax."""

import jax
import jax.numpy as jnp
import optax
from common import BLOCKS, HEADS, NORM_EPSILON


def loss_of(model, variables, x, y):
    predictions = {"mlp": mlp, "cnn": cnn, "transformer": transformer}[model](variables, x)
    if model == "mlp":
        return jnp.mean(jnp.square(predictions - y))
    return optax.losses.softmax_cross_entropy_with_integer_labels(predictions, y).mean()


def dense(variables, name, x):
    return x @ variables[f"{name}/kernel"] + variables[f"{name}/bias"]


def mlp(variables, x):
    return dense(variables, "out", jax.nn.relu(dense(variables, "hidden", x)))


def cnn(variables, x):
    for name in ("conv0", "conv1"):
        kernel = variables[f"{name}/kernel"]
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + variables[f"{name}/bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return dense(variables, "out", x.reshape(len(x), -1))


def transformer(variables, tokens):
    def norm(name, x):
        wide = x - x.mean(-1, keepdims=True)
        x = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + NORM_EPSILON)
        return x * variables[f"{name}/scale"] + variables[f"{name}/bias"]

    batch, length = tokens.shape
    x = variables["tokens/embedding"][tokens] + variables["positions/embedding"]
    for i in range(BLOCKS):
        qkv = dense(variables, f"qkv{i}", norm(f"before{i}", x)).reshape(batch, length, 3, HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + dense(variables, f"mix{i}", mixed.reshape(batch, length, -1))
        x = x + dense(variables, f"down{i}", jax.nn.gelu(dense(variables, f"up{i}", norm(f"between{i}", x))))
    return dense(variables, "out", norm("last", x))
