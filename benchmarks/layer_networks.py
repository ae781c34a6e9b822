"""Milliseconds per training step with `est.layers`, compared with the same mathematics written by hand in jax.

    python benchmarks/layers.py [--rounds 7] [--cpu]

Two networks on one device: a convolutional one with batch normalization, and an LSTM over sequences of several lengths.
Both sides begin with the same values, take the same batch, donate their state and use the same optax optimizer; the
losses of ten steps are compared first. Runs alternate in one process; the figure is the median over rounds, the ratio
the median of the rounds' ratios. With `--cpu` it is the time of this process on all cores, which depends less on what
else a machine does.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import estimator as est

STEPS = 20
TX = optax.sgd(0.05, momentum=0.9)


def conv_layers(features, mode):
    del mode
    x = features["x"]
    for filters in (32, 64):
        x = est.layers.conv2d(x, filters, 3, padding="same", use_bias=False)
        x = jax.nn.relu(est.layers.batch_normalization(x, momentum=0.9))
        x = est.layers.max_pooling2d(x, 2, 2)
    x = est.layers.dense(est.layers.flatten(x), 128, jax.nn.relu)
    return est.layers.dense(x, 10)


def conv_by_hand(v, features):
    x, moved = features["x"], {}
    for end in ("", "_1"):
        norm = f"batch_normalization{end}"
        x = jax.lax.conv_general_dilated(
            x, v[f"conv2d{end}/kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean = x.mean((0, 1, 2))
        variance = jnp.square(x - mean).mean((0, 1, 2))
        rows = x.size // x.shape[-1]
        for name, value in (("mean", mean), ("variance", variance * rows / (rows - 1))):
            moved[f"{norm}/moving_{name}"] = 0.9 * v[f"{norm}/moving_{name}"] + 0.1 * value
        x = (x - mean) * (jax.lax.rsqrt(variance + 1e-3) * v[f"{norm}/gamma"]) + v[f"{norm}/beta"]
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ v["dense/kernel"] + v["dense/bias"])
    return x @ v["dense_1/kernel"] + v["dense_1/bias"], moved


def lstm_layers(features, mode):
    del mode
    _, state = est.layers.lstm(features["x"], 64, features["lengths"])
    return est.layers.dense(state.h, 10)


def lstm_by_hand(v, features):
    x, lengths = features["x"], features["lengths"]
    kernel, bias = v["rnn/basic_lstm_cell/kernel"], v["rnn/basic_lstm_cell/bias"]
    zeros = jnp.zeros((len(x), 64))

    def step(state, at):
        c, h = state
        number, gates = at
        i, j, f, o = jnp.split(gates + h @ kernel[x.shape[-1] :], 4, axis=-1)
        new = c * jax.nn.sigmoid(f + 1) + jax.nn.sigmoid(i) * jnp.tanh(j)
        runs = (number < lengths)[:, None]
        return (jnp.where(runs, new, c), jnp.where(runs, jnp.tanh(new) * jax.nn.sigmoid(o), h)), None

    gates = x.swapaxes(0, 1) @ kernel[: x.shape[-1]] + bias
    (_, h), _ = jax.lax.scan(step, (zeros, zeros), (jnp.arange(x.shape[1]), gates))
    return h @ v["dense/kernel"] + v["dense/bias"], {}


def with_layers(network):
    def model_fn(features, labels, mode):
        logits = network(features, mode)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(TX).minimize(loss))

    return est.transform(model_fn)


def by_hand(network):
    def loss_fn(trained, rest, features, labels):
        logits, moved = network(trained | rest, features)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), moved

    def step(state, features, labels):
        trained, rest, slots = state
        (loss, moved), gradients = jax.value_and_grad(loss_fn, has_aux=True)(trained, rest, features, labels)
        updates, slots = TX.update(gradients, slots, trained)
        return (optax.apply_updates(trained, updates), rest | moved, slots), loss

    return jax.jit(step, donate_argnums=0)


def runs_of(layers, hand, features, labels):
    """Two functions of a number of steps, each of which gives the losses."""
    model, step = with_layers(layers), by_hand(hand)
    start = jax.device_get(model.init(jax.random.key(0), features, labels))

    def ours(steps):
        state, losses = jax.device_put(start), []
        for _ in range(steps):
            state, spec = model.train_step(state, features, labels)
            losses.append(spec.loss)
        return jax.block_until_ready(losses)

    def theirs(steps):
        variables, losses = jax.device_put(start.variables), []
        rest = {name: value for name, value in variables.items() if "moving" in name}
        trained = {name: value for name, value in variables.items() if name not in rest}
        state = (trained, rest, TX.init(trained))
        for _ in range(steps):
            state, loss = step(state, features, labels)
            losses.append(loss)
        return jax.block_until_ready(losses)

    np.testing.assert_allclose(ours(10), theirs(10), rtol=1e-4)
    return ours, theirs


def milliseconds_per_step(run, clock):
    start = clock()
    run(STEPS)
    return (clock() - start) / STEPS * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="measure the time of this process on all cores")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    random = np.random.default_rng(0)
    labels = jnp.asarray(random.integers(0, 10, 64), jnp.int32)
    images = {"x": jnp.asarray(random.normal(size=(64, 16, 16, 3)), jnp.float32)}
    sequences = {
        "x": jnp.asarray(random.normal(size=(64, 40, 32)), jnp.float32),
        "lengths": jnp.asarray(random.integers(1, 41, 64), jnp.int32),
    }
    print(f"{'network':10}{'by hand':>12}{'est.layers':>13}{'ratio':>8}")
    for name, layers, hand, features in (
        ("conv", conv_layers, conv_by_hand, images),
        ("lstm", lstm_layers, lstm_by_hand, sequences),
    ):
        ours, theirs = runs_of(layers, hand, features, labels)
        rows = []
        for i in range(arguments.rounds):
            times = {run: milliseconds_per_step(run, clock) for run in ((theirs, ours) if i % 2 else (ours, theirs))}
            rows.append((times[theirs], times[ours]))
        hand_ms, layers_ms = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(b / a for a, b in rows)
        print(f"{name:10}{hand_ms:9.2f} ms{layers_ms:10.2f} ms{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
