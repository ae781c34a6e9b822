"""Model_fns around a few lines, what a run of them leaves, loops by hand beside it, and a network of all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import estimator as est
from replicate import TowerOptimizer, cross_tower_mean

X = jnp.ones((2, 3))
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def run(body, mode="train", steps=1):
    """The state after an init and `steps` steps of a model_fn that runs `body`."""
    model = est.transform(as_model_fn(body))
    state = model.init(jax.random.key(0), X, mode=mode)
    for _ in range(steps if mode == "train" else 0):
        state, _ = model.train_step(state, X)
    return state


def as_model_fn(body):
    def model_fn(features, mode):
        result = body()
        train_op = result if isinstance(result, est.TrainOp) else est.TrainOp()
        return est.EstimatorSpec(mode, predictions=features, loss=jnp.float32(0), train_op=train_op)

    return model_fn


def minimizing(loss_of, optimizer=optax.sgd(0.1), **options):  # noqa: B008
    """A model_fn that minimizes `loss_of(features, labels)`, with an `est.Optimizer` or a `TowerOptimizer` of it."""

    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        return est.EstimatorSpec(mode, loss=loss, train_op=minimize(loss, optimizer, **options))

    return model_fn


def minimize(loss, optimizer, **options):
    made = optimizer if isinstance(optimizer, est.Optimizer) else TowerOptimizer(optimizer, **options)
    return made.minimize(loss)


def regressing(predictions_of, optimizer=optax.sgd(0.1), **options):  # noqa: B008
    """A model_fn that predicts `predictions_of(features)`, and minimizes their mean squared error."""

    def model_fn(features, labels, mode):
        predictions = predictions_of(features)
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions)
        loss = est.losses.mean_squared_error(labels, predictions)
        return est.EstimatorSpec(mode, predictions, loss, minimize(loss, optimizer, **options))

    return model_fn


def predicting(predictions_of):
    """A model_fn that predicts `predictions_of(features)`."""
    return lambda features, mode: est.EstimatorSpec(mode, predictions=predictions_of(features))


def variables_of(body, features):
    """The shapes and dtypes of the variables of a model_fn that runs `body(features)`, by name; it is only traced."""
    model = est.transform(predicting(lambda x: (body(x), x)[1]))
    return model.abstract_init(features, mode="infer").variables


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


def ones(name, shape=(), dtype=jnp.float32):
    return est.get_variable(name, shape, dtype, jax.nn.initializers.ones)


def zeros(name, shape=(), dtype=jnp.float32, **options):
    return est.get_variable(name, shape, dtype, jax.nn.initializers.zeros, **options)


def constant(name, value):
    return est.get_variable(name, (), initializer=jax.nn.initializers.constant(value))


def assigning(write, aggregation="mean", initial=0.0, steps=1):
    """A model_fn with "w", which it trains, and "s", which `write(features)` assigns or adds to; it predicts "s"."""

    def model_fn(features, labels, mode):
        loss = jnp.mean(ones("w") * features)
        est.get_variable("s", initializer=initial, trainable=False, aggregation=aggregation)
        write(features)
        seen = jnp.broadcast_to(est.read_variable("s"), features.shape)
        train_op = TowerOptimizer(optax.sgd(0.1), accumulate_steps=steps).minimize(loss)
        return est.EstimatorSpec(mode, predictions=seen, loss=loss, train_op=train_op)

    return model_fn


def everything(accumulate_steps=1):
    """Two losses and three optimizers, a lookup, dropout, assigned values, weights, a metric, a record."""

    def model_fn(features, labels, mode):
        rows = est.embedding_lookup("table", (features[:, 0] > 0).astype(jnp.int32), (3, 4))
        w = est.get_variable("w", (3, 4))
        est.get_variable("mean", initializer=jnp.zeros(3), trainable=False)
        est.get_variable("seen", initializer=np.int32(0), trainable=False)
        est.assign("mean", 0.9 * est.read_variable("mean") + 0.1 * cross_tower_mean(features.mean(0)))
        est.assign_add("seen", features.shape[0])
        hidden = jnp.tanh((features - est.read_variable("mean")) @ w)
        kept = jax.random.bernoulli(est.make_rng("dropout"), 0.7, hidden.shape)
        output = (jnp.where(kept, hidden, jnp.zeros_like(hidden)) * rows).sum(1)
        output = output + zeros("b")
        est.record("largest", jnp.abs(output).max())
        # Of a square root at 0 the derivative is infinite: nothing of it may come into the gradients.
        roots = jnp.sqrt(jnp.maximum(output, 0.0) * 0.0)
        predictions = {"output": output, "roots": roots}
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions)
        loss = est.losses.mean_squared_error(labels, output, weights=jnp.abs(features[:, 1]))
        penalty = 0.1 * (w**2).sum()
        adam, sgd, again = (
            TowerOptimizer(make, accumulate_steps=accumulate_steps)
            for make in (optax.adam(0.05), optax.sgd(0.1), optax.sgd(0.05))
        )
        clipped = [(jnp.clip(g, -1.0, 1.0), v) for g, v in sgd.compute_gradients(loss, ["w", "b"])]
        train_op = est.group(
            adam.minimize(loss, ["table", "b"]), sgd.apply_gradients(clipped), again.minimize(penalty, ["w"])
        )
        metrics = {"error": est.metrics.mean_absolute_error(labels, output)}
        return est.EstimatorSpec(mode, predictions, loss + penalty, train_op, metrics)

    return model_fn


layers = est.layers
RECURRENT = {
    "lstm": lambda x, **options: layers.lstm(x, 2, **options)[0],
    "gru": lambda x, **options: layers.gru(x, 2, **options)[0],
    "bidirectional_lstm": lambda x, **options: jnp.concatenate(layers.bidirectional_lstm(x, 2, **options)[0], -1),
    "stack_bidirectional_rnn": lambda x, **options: layers.stack_bidirectional_rnn(x, [2, 2], **options)[0],
    "dynamic_rnn": lambda x, **options: layers.dynamic_rnn(layers.GRUCell(2), x, **options)[0],
    "bidirectional_gru": lambda x, **options: jnp.concatenate(layers.bidirectional_gru(x, 2, **options)[0], -1),
}
SEQUENCES = {
    "average_pooling1d": lambda x: layers.average_pooling1d(x, 2, 1),
    "conv1d": lambda x: layers.conv1d(x, 2, 2),
    "global_average_pooling1d": lambda x: layers.global_average_pooling1d(x),
    "layer_norm": lambda x: layers.layer_norm(x) * jnp.arange(4.0),
    "max_pooling1d": lambda x: layers.max_pooling1d(x, 2, 2),
}
IMAGES = {
    "average_pooling2d": lambda x: layers.average_pooling2d(x, 2, 1),
    "conv2d": lambda x: layers.conv2d(x, 2, 2),
    "conv2d_transpose": lambda x: layers.conv2d_transpose(x, 2, 2),
    "dropout": lambda x: layers.dropout(x, 0.0),  # of which nothing is random
    "flatten": lambda x: layers.flatten(x),
    "global_average_pooling2d": lambda x: layers.global_average_pooling2d(x),
    "max_pooling2d": lambda x: layers.max_pooling2d(x, 2, 2),
    "separable_conv2d": lambda x: layers.separable_conv2d(x, 2, 2),
}


def maxima(features):
    """Global maxima of features as they are. The gradient of jax's maximum looks for the entries that equal it: if XLA
    computes these twice, with another rounding, as with the flags of these tests, it finds none, and divides by 0."""
    return layers.global_max_pooling1d(features[..., None]) + layers.global_max_pooling2d(features[..., None, None])


def network(features, **moments):
    """One number for each row of floats, in which every layer has a part, with its default name.

    Args:
      features: `[rows, any]`.
      **moments: arguments of the batch normalization.
    """
    x = layers.dense(features, 16, jnp.tanh)
    x = layers.batch_normalization(x, momentum=0.8, **moments)
    images, sequences = x.reshape(-1, 4, 2, 2), x.reshape(-1, 4, 4)
    lengths = 1 + (features[:, 0] > 0).astype(jnp.int32)
    outputs = [layer(images) for layer in IMAGES.values()] + [layer(sequences) for layer in SEQUENCES.values()]
    outputs += [layer(sequences, sequence_length=lengths) for layer in RECURRENT.values()]
    outputs.append(layers.embed((features[:, 1] > 0).astype(jnp.int32), 3, 2))
    outputs.append(maxima(features))
    for _ in range(2):  # scopes of one default name
        with est.variable_scope(None, "head"):
            x = layers.dense(jnp.tanh(jnp.stack([y.reshape(len(y), -1).mean(-1) for y in [x, *outputs]], -1)), 2)
    return layers.dense(x, 1)[:, 0]
