"""The models in plain jax, as functions of a dict of variables; and the losses that Flax and Keras share with them.

A model is a function `(variables, x, training) -> (outputs, moved)`, where `moved` are the new moving averages.
"""

import data
import jax
import jax.numpy as jnp
import optax


def dense(v, name, x):
    return x @ v[f"{name}/kernel"] + v[f"{name}/bias"]


def resnet(v, x, training):
    moved = {}

    def conv(x, name, strides=1):
        kernel, numbers = v[f"{name}/kernel"], ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (strides, strides), "SAME", dimension_numbers=numbers)
        mean, variance = v[f"{name}_norm/mean"], v[f"{name}_norm/variance"]
        if training:
            now = {"mean": x.mean((0, 1, 2)), "variance": x.var((0, 1, 2))}
            for kind, old in (("mean", mean), ("variance", variance)):
                moved[f"{name}_norm/{kind}"] = data.MOMENTUM * old + (1 - data.MOMENTUM) * now[kind]
            mean, variance = now["mean"], now["variance"]
        scale = jax.lax.rsqrt(variance + data.EPSILON) * v[f"{name}_norm/scale"]
        return (x - mean) * scale + v[f"{name}_norm/bias"]

    x = jax.nn.relu(conv(x, "stem", 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for name, _, _, strides in data.blocks():
        y = conv(jax.nn.relu(conv(x, f"{name}_a", strides)), f"{name}_b")
        x = jax.nn.relu(y + (conv(x, f"{name}_short", strides) if strides > 1 else x))
    return dense(v, "out", x.mean((1, 2))), moved


def bert(v, x, training):
    words, lengths = x

    def norm(name, x):
        wide = x - x.mean(-1, keepdims=True)
        x = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + data.TINY)
        return x * v[f"{name}/scale"] + v[f"{name}/bias"]

    x = norm("norm", v["words/embedding"][words] + v["positions/embedding"])
    for i in range(data.BLOCKS):
        qkv = dense(v, f"qkv{i}", x).reshape(*words.shape, 3, data.HEADS, -1)
        mixed = attend(*jnp.moveaxis(qkv, 2, 0), lengths)
        x = norm(f"norma{i}", x + dense(v, f"mix{i}", mixed.reshape(x.shape)))
        x = norm(f"normb{i}", x + dense(v, f"down{i}", jax.nn.gelu(dense(v, f"up{i}", x))))
    return dense(v, "out", jnp.tanh(dense(v, "pool", x[:, 0]))), {}


def attend(q, k, v, lengths):
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def tagger(v, x, training):
    words, lengths = x
    x = v["words/embedding"][words]
    outputs = [lstm(v, "forwards", x, lengths), turned(lstm(v, "backwards", turned(x, lengths), lengths), lengths)]
    return (dense(v, "out", jnp.concatenate(outputs, -1)), v["crf/transitions"], lengths), {}


def turned(x, lengths):
    """Each sequence backwards, its padding behind it."""
    places = jnp.arange(x.shape[1])
    places = jnp.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)
    return jnp.take_along_axis(x, places[..., None], 1)


def lstm(v, name, x, lengths):
    kernel = v[f"{name}/kernel"]
    gates = x.swapaxes(0, 1) @ kernel[: x.shape[-1]] + v[f"{name}/bias"]

    def step(state, gates):
        c, h = state
        i, g, f, o = jnp.split(gates + h @ kernel[x.shape[-1] :], 4, -1)
        c = c * jax.nn.sigmoid(f) + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jnp.tanh(c) * jax.nn.sigmoid(o)
        return (c, h), h

    # Padding is behind the sequence, so that it may run on; what it gives is masked.
    zeros = jnp.zeros((len(x), data.UNITS))
    outputs = jax.lax.scan(step, (zeros, zeros), gates)[1].swapaxes(0, 1)
    return jnp.where((jnp.arange(x.shape[1]) < lengths[:, None])[..., None], outputs, 0)


def wide_deep(rows, v, numbers):
    """Logits from the looked-up rows, `[batch, columns, 16]` and `[batch, columns, 1]`."""
    deep, wide = rows
    x = jnp.concatenate([deep.reshape(len(deep), -1), numbers], -1)
    for i in range(len(data.HIDDEN)):
        x = jax.nn.relu(dense(v, f"deep{i}", x))
    return dense(v, f"deep{len(data.HIDDEN)}", x) + wide.sum(1)


def loss_of(model, outputs, y):
    if model == "tagger":
        return -crf_likelihood(*outputs, y).mean()
    if model == "wide_deep":
        return optax.losses.sigmoid_binary_cross_entropy(outputs, y).mean()
    return optax.losses.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def predictions_of(model, outputs):
    if model == "tagger":
        return crf_decode(*outputs)
    return jax.nn.sigmoid(outputs) if model == "wide_deep" else outputs.argmax(-1)


def crf_likelihood(scores, transitions, lengths, tags):
    runs = jnp.arange(scores.shape[1]) < lengths[:, None]
    unary = jnp.take_along_axis(scores, tags[..., None], 2)[..., 0]
    right = jnp.sum(unary * runs, 1) + jnp.sum(transitions[tags[:, :-1], tags[:, 1:]] * runs[:, 1:], 1)

    def step(sums, at):
        x, run = at
        return jnp.where(run[:, None], x + jax.nn.logsumexp(sums[..., None] + transitions, 1), sums), None

    sums, _ = jax.lax.scan(step, scores[:, 0], (scores[:, 1:].swapaxes(0, 1), runs[:, 1:].T))
    return right - jax.nn.logsumexp(sums, -1)


def crf_decode(scores, transitions, lengths):
    """The most likely tags: Viterbi's algorithm."""
    runs = (jnp.arange(scores.shape[1]) < lengths[:, None])[:, 1:].T

    def step(best, at):
        x, run = at
        each = best[..., None] + transitions
        same = jnp.broadcast_to(jnp.arange(each.shape[-1]), best.shape)
        return jnp.where(run[:, None], x + each.max(1), best), jnp.where(run[:, None], each.argmax(1), same)

    best, before = jax.lax.scan(step, scores[:, 0], (scores[:, 1:].swapaxes(0, 1), runs))

    def back(tag, before):
        return jnp.take_along_axis(before, tag[:, None], 1)[:, 0], tag

    first, tags = jax.lax.scan(back, best.argmax(-1), before, reverse=True)
    tags = jnp.concatenate([first[None], tags]).T
    return jnp.where(jnp.arange(tags.shape[1]) < lengths[:, None], tags, 0)


def optimizer_of(model, steps):
    if model == "bert":
        warm = optax.schedules.linear_schedule(data.PEAK / data.WARM_UP, data.PEAK, data.WARM_UP - 1)
        return optax.adamw(warm, weight_decay=data.DECAY)
    if model == "resnet":
        return optax.sgd(data.RATES[model], momentum=0.9)
    return (optax.adagrad if model == "wide_deep" else optax.adam)(data.RATES[model])
