"""The models of real shapes in Flax: Linen modules, a `TrainState` and a jitted `train_step`.

python benchmarks/peers/real/with_flax.py resnet --data FOLDER
"""

import itertools

import data
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import jax_models
import numpy as np
import optax
from flax.training.train_state import TrainState

import common  # isort: skip


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        def conv(x, name, filters, size=3, strides=1):
            x = nn.Conv(filters, (size, size), strides, use_bias=False, name=name)(x)
            norm = nn.BatchNorm(not training, -1, data.MOMENTUM, data.EPSILON, name=f"{name}_norm")
            return norm(x)

        x = nn.relu(conv(x, "stem", data.FILTERS[0], 7, 2))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for name, _, filters, strides in data.blocks():
            y = conv(nn.relu(conv(x, f"{name}_a", filters, strides=strides)), f"{name}_b", filters)
            x = nn.relu(y + (conv(x, f"{name}_short", filters, 1, strides) if strides > 1 else x))
        return nn.Dense(data.CLASSES, name="out")(x.mean((1, 2)))


class Bert(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        words, lengths = x

        def norm(name, x):
            return nn.LayerNorm(data.TINY, use_fast_variance=False, name=name)(x)

        x = nn.Embed(data.WORDS, data.WIDTH, name="words")(words)
        x = norm("norm", x + nn.Embed(data.LENGTH, data.WIDTH, name="positions")(jnp.arange(data.LENGTH)))
        for i in range(data.BLOCKS):
            qkv = nn.Dense(3 * data.WIDTH, name=f"qkv{i}")(x).reshape(*words.shape, 3, data.HEADS, -1)
            mixed = jax_models.attend(*jnp.moveaxis(qkv, 2, 0), lengths).reshape(x.shape)
            x = norm(f"norma{i}", x + nn.Dense(data.WIDTH, name=f"mix{i}")(mixed))
            up = nn.gelu(nn.Dense(4 * data.WIDTH, name=f"up{i}")(x))
            x = norm(f"normb{i}", x + nn.Dense(data.WIDTH, name=f"down{i}")(up))
        return nn.Dense(2, name="out")(nn.tanh(nn.Dense(data.WIDTH, name="pool")(x[:, 0])))


class WideDeep(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        ids, numbers = x

        def rows(kind, width):
            columns = range(data.COLUMNS)
            return [nn.Embed(data.BUCKETS, width, name=f"{kind}{i:02}")(ids[:, i]) for i in columns]

        x = jnp.concatenate([*rows("c", data.ROW), numbers], -1)
        for i, units in enumerate(data.HIDDEN):
            x = nn.relu(nn.Dense(units, name=f"deep{i}")(x))
        return nn.Dense(1, name=f"deep{len(data.HIDDEN)}")(x) + sum(rows("w", 1))


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        words, lengths = x
        x = nn.Embed(data.TAGGER_WORDS, data.TAGGER_WIDTH, name="words")(words)
        both = [
            nn.RNN(nn.OptimizedLSTMCell(data.UNITS, name=name), reverse=i == 1, keep_order=True)(x, seq_lengths=lengths)
            for i, name in enumerate(("forwards", "backwards"))
        ]
        transitions = self.param("crf", lambda key: jnp.zeros((data.TAGS, data.TAGS)))
        return nn.Dense(data.TAGS, name="out")(jnp.concatenate(both, -1)), transitions, lengths


def variables_of(work):
    """The initial values as Flax has them: moving averages in another collection, LSTMs with a kernel for each gate."""
    initial, params, moving = work.initial(), {}, {}
    if work.model == "tagger":
        params["crf"] = initial.pop("crf/transitions")
        for name in ("forwards", "backwards"):
            kernels = np.split(initial.pop(f"{name}/kernel"), 4, 1)
            biases = np.split(initial.pop(f"{name}/bias"), 4)
            for gate, kernel, bias in zip("igfo", kernels, biases, strict=True):
                params[f"{name}/i{gate}/kernel"] = kernel[: data.TAGGER_WIDTH]
                params |= {f"{name}/h{gate}/kernel": kernel[data.TAGGER_WIDTH :], f"{name}/h{gate}/bias": bias}
    for name, value in initial.items():
        layer, kind = name.split("/")
        if kind in ("mean", "variance"):
            moving[f"{layer}/{dict(mean='mean', variance='var')[kind]}"] = value
        else:
            params[name] = value
    return (flax.traverse_util.unflatten_dict(jax.tree.map(jnp.asarray, each), sep="/") for each in (params, moving))


class State(TrainState):
    batch_stats: dict


def train(work, watch):
    module = {"resnet": ResNet, "bert": Bert, "wide_deep": WideDeep, "tagger": Tagger}[work.model]()
    params, batch_stats = variables_of(work)
    tx = jax_models.optimizer_of(work.model, work.steps)
    state = State.create(apply_fn=module.apply, params=params, tx=tx, batch_stats=batch_stats)
    del params, batch_stats

    @jax.jit
    def train_step(state, x, y):
        def mean_loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            outputs, moved = state.apply_fn(variables, x, True, mutable=["batch_stats"])
            return jax_models.loss_of(work.model, outputs, y), moved.get("batch_stats", {})

        (loss, moved), gradients = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=moved), loss

    for i, (x, y) in enumerate(data.batches(work, "train"), 1):
        state, loss = train_step(state, x, y)
        if i in work.marks:
            jax.block_until_ready((state, loss))
            watch.done(i)

    def outputs(state, x):
        return state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, x, False)

    loss_of = jax.jit(lambda state, x, y: jax_models.loss_of(work.model, outputs(state, x), y))
    predict = jax.jit(lambda state, x: jax_models.predictions_of(work.model, outputs(state, x)))

    def evaluate(count=None):
        losses = [loss_of(state, x, y) for x, y in itertools.islice(data.batches(work, "test"), count)]
        return float(np.mean(jax.device_get(losses)))

    def predictions(count=None):
        return [np.asarray(predict(state, x)) for x, _ in itertools.islice(data.batches(work, "test"), count)]

    evaluate(1), predictions(1)  # compile
    watch.rate("prediction", work.rows, predictions)
    return watch.rate("evaluation", work.rows, evaluate)


if __name__ == "__main__":
    versions = {"Flax": flax.__version__, "jax": jax.__version__, "optax": optax.__version__}
    common.main(train, versions, data.work_of)
