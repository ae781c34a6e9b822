"""The time to the end of a first epoch, of which most is tracing and compilation, compared with a program by hand.

    python benchmarks/first_step.py [--rounds 5] [--only cnn|process|variables] [--save]

- a small CNN: `Estimator.train` of 100 steps, against a loop around one `jit`;
- the first loss of that CNN in a process of its own, imports included, with a filled compilation cache: CPU seconds;
- a model of 2,000 variables: tracing `est.transform(model_fn).train_step`, against tracing the same step by hand.

Both sides alternate, but for the second case in one process, with jax's caches cleared before each. The Estimator has
its default RunConfig, with summaries and checkpoints. The figures are medians over rounds; the programs that XLA
compiled are counted too.
"""

import argparse
import logging as standard_logging
import os
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from absl import logging

BY_HAND = "by_hand" in sys.argv  # a process that has no need of the Estimator, and does not import it
if not BY_HAND:
    import estimator as est
    from estimator.runtime._shared_programs import forget_programs

STEPS = 100
CONVOLUTIONS = ((3, 3, 1, 16), (3, 3, 16, 32))
CLASSES = 10
CACHES_ALL = dict.fromkeys(
    ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"), "0"
)


def initial_cnn():
    random = np.random.default_rng(0)
    shapes = {f"conv{i}": shape for i, shape in enumerate(CONVOLUTIONS)} | {"dense": (7 * 7 * 32, CLASSES)}
    return {name: np.float32(random.normal(size=shape) * 0.05) for name, shape in shapes.items()}


def cnn_loss(variables, images, labels):
    x = images
    for i in range(len(CONVOLUTIONS)):
        x = jax.lax.conv_general_dilated(
            x, variables[f"conv{i}"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    logits = x.reshape(len(x), -1) @ variables["dense"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def initial_many():
    return {f"w{i}": np.float32([[0.1, 0.2], [0.3, 0.4]]) for i in range(2000)}


def many_loss(variables, x, labels):
    for w in variables.values():
        x = jnp.tanh(x @ w)
    return jnp.mean((x[:, 0] - labels) ** 2)


def model_fn_of(initial, loss_of):
    def model_fn(features, labels, mode):
        variables = {name: est.get_variable(name, initializer=value) for name, value in initial().items()}
        loss = loss_of(variables, features, labels)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.adam(1e-3)).minimize(loss))

    return model_fn


def step_by_hand(loss_of):
    tx = optax.adam(1e-3)

    def step(state, batch):
        variables, slots = state
        loss, gradients = jax.value_and_grad(loss_of)(variables, *batch)
        updates, slots = tx.update(gradients, slots, variables)
        return (optax.apply_updates(variables, updates), slots), loss

    return step


def train_by_hand(batches):
    program = jax.jit(step_by_hand(cnn_loss), donate_argnums=0)
    variables = jax.tree.map(jnp.asarray, initial_cnn())
    state = variables, optax.adam(1e-3).init(variables)
    for i, batch in enumerate(batches):
        state, loss = program(state, batch)
        if i == 0:
            logging.info("loss = %s, step = 1", float(loss))
    jax.block_until_ready(state)


def train_by_estimator(batches):
    est.Estimator(model_fn_of(initial_cnn, cnn_loss), tempfile.mkdtemp()).train(lambda: batches)


def cpu_to_first_loss(train, batches):
    """The CPU seconds of this process up to the line of the log about the first loss."""
    seconds = []

    class Clock(standard_logging.Handler):
        def emit(self, record):
            if "step = 1" in record.getMessage():
                seconds.append(time.process_time())

    logging.set_verbosity(logging.INFO)
    logging.get_absl_logger().addHandler(Clock())
    train(batches[:3])
    return seconds[0]


def in_processes(rounds):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds + 1):  # the first one fills the cache
            rows.append([])
            for side in ("by_hand", "by_estimator"):
                environment = {**os.environ, **CACHES_ALL, "JAX_COMPILATION_CACHE_DIR": os.path.join(folder, side)}
                command = [sys.executable, __file__, "--side", side]
                rows[-1].append(float(subprocess.check_output(command, env=environment, text=True)))
    theirs, mine = (statistics.median(row[i] for row in rows[1:]) for i in (0, 1))
    ratio = statistics.median(row[1] / row[0] for row in rows[1:])
    print(f"process    by hand {theirs:6.2f} s, Estimator {mine:6.2f} s, ratio {ratio:.2f}; CPU seconds")
    return {"case": "cnn in a process, compiled before", "by hand, s": theirs, "Estimator, s": mine, "ratio": ratio}


def trace_by_hand(batch):
    variables = initial_many()
    state = jax.eval_shape(lambda: (variables, optax.adam(1e-3).init(variables)))
    start = time.perf_counter()
    jax.jit(step_by_hand(many_loss)).trace(state, batch)
    return time.perf_counter() - start


def trace_by_transform(batch):
    model = est.transform(model_fn_of(initial_many, many_loss))
    state = jax.eval_shape(model.init, jax.random.key(0), *batch)
    start = time.perf_counter()
    jax.jit(lambda state: model.train_step(state, *batch)).trace(state)
    return time.perf_counter() - start


def measure(run, argument, large):
    """Seconds, and how many programs were compiled that take XLA longer than `large` seconds."""
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.clear_caches()
    forget_programs()
    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    of_itself = run(argument)
    seconds = time.perf_counter() - start
    jax.monitoring.unregister_event_duration_listener(listen)
    return of_itself or seconds, sum(each > large for each in compiled)


def compare(name, by_hand, ours, argument, rounds):
    rows = [
        {run: measure(run, argument, large=0.1) for run in ((by_hand, ours) if i % 2 else (ours, by_hand))}
        for i in range(rounds)
    ]
    theirs, mine = (statistics.median(row[run][0] for row in rows) for run in (by_hand, ours))
    ratio = statistics.median(row[ours][0] / row[by_hand][0] for row in rows)
    large = max(row[ours][1] for row in rows), max(row[by_hand][1] for row in rows)
    print(f"{name:10} by hand {theirs:6.2f} s, Estimator {mine:6.2f} s, ratio {ratio:.2f}; large programs {large}")
    return {"case": name, "by hand, s": theirs, "Estimator, s": mine, "ratio": ratio}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("cnn", "process", "variables"))
    parser.add_argument("--side", choices=("by_hand", "by_estimator"), help="what a process of its own measures")
    results.add_option(parser)
    args, measured = parser.parse_args(), []
    random = np.random.default_rng(1)
    if args.only in (None, "cnn") or args.side:
        images = random.normal(size=(64, 28, 28, 1)).astype(np.float32)
        batches = [(images, random.integers(0, CLASSES, 64).astype(np.int32)) for _ in range(STEPS)]
        if args.side:
            print(cpu_to_first_loss({"by_hand": train_by_hand, "by_estimator": train_by_estimator}[args.side], batches))
            return
        measured.append(compare("cnn", train_by_hand, train_by_estimator, batches, args.rounds))
    if args.only in (None, "process"):
        measured.append(in_processes(args.rounds))
    if args.only in (None, "variables"):
        batch = np.ones((4, 2), np.float32), np.ones(4, np.float32)
        measured.append(compare("variables", trace_by_hand, trace_by_transform, batch, args.rounds))
    if args.save:
        rows = results.with_earlier(measured)
        plot = results.ratios("time / time by hand", {row["case"]: row["ratio"] for row in rows})
        results.save("The first epoch of a small CNN, and tracing 2,000 variables", {"": rows}, plot)


if __name__ == "__main__":
    main()
