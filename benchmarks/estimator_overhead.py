"""The cost of the Estimator with its defaults, compared with loops written by hand.

    python benchmarks/estimator_overhead.py [--rounds 9] [--only small predict] [--save]

- `train` of a small model, against loops around a `lax.scan` of 20 steps (as in step_time.py), and of 100;
- `train` of a model whose step takes some 20 ms, against a loop around one `jit`;
- ten `evaluate` calls in a row, against ten loops around one `jit`, and one call with many batches of 4 rows;
- `predict`, row by row, from a list and from a generator, against a loop around one `jit` that fetches each batch;
- `train` with a hook that reads the loss of every step, against a loop that does;
- `pandas_input_fn` alone, with its call and without, against a loop that cuts a data frame.

The Estimator has its default RunConfig: it checks for NaN, logs, writes summaries, and saves a checkpoint every ten
minutes, at the first and at the last step. One-time costs of a run are excluded, as in step_time.py: the time of n
steps is the time of a run of 2 n steps minus the time of a run of n. Both sides get the same numpy batches. Runs
alternate in one process; the figure is the median over rounds, the ratio the median of the rounds' ratios.
"""

import argparse
import itertools
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import results
from absl import logging
from step_time import hand_written_run, hand_written_step, initial, mean_loss, optimizer
from turns import in_turns, medians, per_step

import estimator as est

LOOPS = 20, 100  # steps per program by hand; the Estimator chooses itself
EVALUATIONS, EVAL_BATCHES = 10, 50
SMALL = 16, 32, 4  # widths of the small model
UNITS = {"us": 1e6, "ms": 1e3}


def model_fn_of(widths):
    def model_fn(features, labels, mode):
        variables = {name: est.get_variable(name, initializer=value) for name, value in initial(widths).items()}
        loss = mean_loss(variables, features, labels)
        est.summary.scalar("loss_again", loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optimizer()).minimize(loss))

    return model_fn


def batches_of(widths, batch_size, count):
    random = np.random.default_rng(1)
    distinct = [
        (
            random.normal(size=(batch_size, widths[0])).astype(np.float32),
            random.normal(size=(batch_size, widths[-1])).astype(np.float32),
        )
        for _ in range(10)
    ]
    return list(itertools.islice(itertools.cycle(distinct), count))


def clocks():
    """Seconds on the wall, and of all threads on the CPU."""
    return np.array([time.perf_counter(), time.process_time()])


def compare(name, theirs, ours, count, arguments, unit="us"):
    """Prints and returns the medians of both, and the medians of their ratios.

    Args:
      name: of the case.
      theirs, ours: functions of how much to do; or, if `count` is None, of nothing.
      count: so much, and twice as much, of which the difference is the measure.
      arguments: of the command line.
      unit: of a time.
    """

    def measure(run):
        if count is not None:
            return per_step(run, count, clocks)
        start = clocks()
        run()
        return clocks() - start

    measured = in_turns((theirs, ours), measure, arguments.rounds)
    row = {"case": name}
    for i, clock in enumerate(("", ", CPU")):
        by_hand, estimator, ratio = medians([[side[i] * UNITS[unit] for side in pair] for pair in measured])
        row |= {f"by hand{clock}": f"{by_hand:.4g} {unit}", f"Estimator{clock}": f"{estimator:.4g} {unit}"}
        row |= {f"ratio{clock}": ratio}
    times = [x if isinstance(x, str) else f"{x:.2f}" for x in row.values()]
    print(f"{times[0]:46}" + "".join(f"{x:>12}" for x in times[1:]), flush=True)
    return row


def training(name, widths, batch_size, steps, steps_per_loop, arguments):
    batches = batches_of(widths, batch_size, 2 * steps)
    estimator = est.Estimator(model_fn_of(widths), tempfile.mkdtemp())
    by_hand = hand_written_run(widths, jax.local_devices()[:1], steps_per_loop)
    return compare(
        name, lambda n: by_hand(batches[:n]), lambda n: estimator.train(lambda: batches[:n]), steps, arguments
    )


class ReadsEveryLoss(est.Hook):
    def after_run(self, context, values):
        assert values.loss is not None


def reading_every_loss(arguments):
    batches = batches_of(SMALL, 32, 4000)
    estimator = est.Estimator(model_fn_of(SMALL), tempfile.mkdtemp())
    step = jax.jit(hand_written_step(jax.local_devices()[:1]), donate_argnums=0)

    def by_hand(n):
        variables = jax.tree.map(jnp.asarray, initial(SMALL))
        state = variables, optimizer().init(variables)
        for batch in batches[:n]:
            state, loss = step(state, batch)
            assert float(loss) is not None

    return compare(
        "train, reading every loss",
        by_hand,
        lambda n: estimator.train(lambda: batches[:n], hooks=[ReadsEveryLoss()]),
        2000,
        arguments,
    )


def evaluations(arguments):
    def ours(batches):
        return estimator.evaluate(lambda: batches)

    def by_hand(batches):
        np.mean(jax.device_get([step(variables, *batch) for batch in batches]))

    def repeated(run):
        return lambda: [run(batches) for _ in range(EVALUATIONS)]

    batches, tiny = batches_of(SMALL, 32, EVAL_BATCHES), batches_of(SMALL, 4, 4000)
    estimator = est.Estimator(model_fn_of(SMALL), tempfile.mkdtemp()).train(lambda: batches, steps=1)
    variables = jax.device_put({name: estimator.get_variable_value(name) for name in initial(SMALL)})
    step = jax.jit(mean_loss)
    name = f"{EVALUATIONS} evaluations of {EVAL_BATCHES} batches"
    yield compare(name, repeated(by_hand), repeated(ours), None, arguments, "ms")
    yield compare(
        "evaluate, batches of 4", lambda n: by_hand(tiny[:n]), lambda n: ours(tiny[:n]), len(tiny) // 2, arguments
    )


def predictions(arguments):
    def model_fn(features, mode):
        variables = {name: est.get_variable(name, initializer=value) for name, value in initial(SMALL).items()}
        return est.EstimatorSpec(mode, predictions=outputs(variables, features))

    def outputs(variables, features):
        logits = jax.nn.relu(features @ variables["w0"] + variables["b0"]) @ variables["w1"] + variables["b1"]
        return {"logits": logits, "class": logits.argmax(-1)}

    def by_hand(batches):
        for features in batches:
            fetched = jax.device_get(step(variables, features))
            for i in range(len(features)):
                yield {name: values[i] for name, values in fetched.items()}

    def count(rows):
        return sum(1 for _ in rows)

    estimator = est.Estimator(model_fn, tempfile.mkdtemp())
    variables = jax.device_put(initial(SMALL))
    step = jax.jit(outputs)
    for rows, batches in ((100, 1000), (1, 2000)):
        features = [x for x, _ in batches_of(SMALL, rows, 2 * batches)]
        for kind, as_input in (("a list", list), ("a generator", iter)):
            yield compare(
                f"predict, batches of {rows}, {kind}",
                lambda n, features=features: count(by_hand(features[:n])),
                lambda n, features=features, kind=as_input: count(estimator.predict(lambda: kind(features[:n]))),
                batches,
                arguments,
            )


def pandas_input(arguments):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(200_000, 8)), columns=list("abcdefgh"))
    labels = pd.Series(np.arange(len(frame)))

    def by_hand(batches):
        columns = {name: frame[name].to_numpy() for name in frame}
        of_labels = labels.to_numpy()
        for i in range(0, 100 * batches, 100):
            yield {name: values[i : i + 100] for name, values in columns.items()}, of_labels[i : i + 100]

    def input_fn(batches):
        size = 100 * batches
        return est.inputs.pandas_input_fn(frame[:size], labels[:size], 100, shuffle=False)

    def count(batches):
        return sum(1 for _ in batches)

    made = {n: input_fn(n) for n in (1000, 2000)}
    for case, ours in (("", input_fn), (", made before", made.get)):
        name = f"pandas_input_fn, unshuffled{case}"
        yield compare(name, lambda n: count(by_hand(n)), lambda n, ours=ours: count(ours(n)()), 1000, arguments)


CASES = {
    "small": lambda arguments: [
        training(f"train, small model, scan of {loop}", SMALL, 32, 4000, loop, arguments) for loop in LOOPS
    ],
    "20ms": lambda arguments: [training("train, 20 ms step", (512, 1024, 1024, 10), 512, 20, 1, arguments)],
    "losses": lambda arguments: [reading_every_loss(arguments)],
    "evaluate": evaluations,
    "predict": predictions,
    "pandas": pandas_input,
}


def main():
    logging.set_verbosity(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    results.add_option(parser)
    arguments = parser.parse_args()
    rows = [row for case in arguments.only for row in CASES[case](arguments)]
    if arguments.save:
        rows = results.with_earlier(rows)
        plot = results.ratios("time / time by hand", {row["case"]: row["ratio"] for row in rows})
        results.save("The Estimator against loops by hand", {"": rows}, plot)


if __name__ == "__main__":
    main()
