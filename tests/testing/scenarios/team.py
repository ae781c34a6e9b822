"""What processes do that train together, as `testing.cluster` starts them; most of it one process can do alone, too.

Each gives its own rows of what is the same data. What it finds it writes into a file of its own, or prints.
"""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.experimental.sparse import BCOO

import estimator as est
import replicate
from replicate import TowerOptimizer, replicate_model_fn
from testing.hooks import When
from testing.metrics import Largest

ROWS, BATCHES = 8, 4
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(BATCHES * ROWS, 3)).astype(np.float32)
IDS = _RNG.integers(-1, 6, size=(BATCHES * ROWS, 2)).astype(np.int32)
Y = np.sin(X.sum(1, keepdims=True))


def start(**kwargs):
    """Joins the other processes, if there are any."""
    if "TF_CONFIG" in os.environ:
        replicate.initialize_distributed(timeout_secs=30, **kwargs)
        jax.config.update("jax_numpy_dtype_promotion", "strict")
        jax.config.update("jax_disable_most_optimizations", True)  # compiled in three quarters of the time


def devices():
    """All of the other processes too, or the first four."""
    return None if jax.process_count() > 1 else jax.devices()[:4]


def own(features, labels=None):
    """The rows of this process of a batch of all."""
    context = est.input_context()
    rows = context.per_process_batch_size(len(jax.tree.leaves(features)[0]))
    return jax.tree.map(lambda x: x[context.index * rows :][:rows], (features, labels))


def batch(i):
    rows = slice(i * ROWS, (i + 1) * ROWS)
    return own({"x": X[rows], "ids": IDS[rows]}, Y[rows])


def batches(n=BATCHES):
    return [batch(i % BATCHES) for i in range(n)]


def net(features):
    w = est.get_variable("w", (3, 8))
    b = est.get_variable("b", (8,), initializer=jax.nn.initializers.zeros)
    return jnp.tanh(features["x"] @ w + b) @ est.get_variable("v", (8, 1))


def rich():
    """A model_fn with something of everything that towers do together."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.02))

    def model_fn(features, labels, mode):
        output = net(features) + est.embedding_lookup("table", features["ids"], (6, 4)).sum((1, 2))[:, None]
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions={"output": output, "x": features["x"]})
        est.get_variable("mean", (1,), initializer=jax.nn.initializers.zeros, trainable=False)
        est.get_variable("seen", (), jnp.int32, jax.nn.initializers.zeros, trainable=False)
        if mode == est.ModeKeys.TRAIN:
            est.assign("mean", 0.9 * est.read_variable("mean") + 0.1 * output.mean(0))
            est.assign_add("seen", jnp.int32(len(output)))
            output += 0.1 * jax.random.normal(est.make_rng(), output.shape)
        weights = jnp.abs(features["x"][:, :1])
        loss = est.losses.mean_squared_error(labels, output, weights)
        est.summary.scalar("mean output", output.mean())
        est.summary.histogram("outputs", output)
        est.record("rows", output[:, 0])
        return est.EstimatorSpec(
            mode,
            predictions={"output": output},
            loss=loss,
            train_op=TowerOptimizer(optimizer).minimize(loss),
            eval_metric_ops={
                "error": est.metrics.mean_absolute_error(labels, output, weights),
                "largest": Largest(jnp.max(output)),
            },
        )

    return model_fn


def replicated(model_fn, reduction=est.Reduction.SUM_BY_NONZERO_WEIGHTS, **options):
    return replicate_model_fn(model_fn, reduction, devices(), **options)


def whole(array):
    """An array on the devices of several processes as all of it, in each."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def write(folder, name, tree):
    """Saves the results of this process, for the test to read."""
    named = {jax.tree_util.keystr(path): whole(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    np.savez(os.path.join(folder, f"{name}-{jax.process_count()}-{jax.process_index()}.npz"), **named)


def poor(**tower_options):
    """One that compiles fast."""

    def model_fn(features, labels, mode):
        output = net(features)
        loss = jnp.sum((labels - output) ** 2)
        train_op = TowerOptimizer(optax.sgd(0.02, momentum=0.9), **tower_options).minimize(loss)
        return est.EstimatorSpec(mode, predictions={"output": output}, loss=loss, train_op=train_op)

    return model_fn


def transformed(folder):
    """Functions of `est.transform`: the law, for whatever towers do together."""
    start()

    def spec_of(spec):
        metrics = {name: metric_result(metric) for name, metric in spec.eval_metric_ops.items()}
        return {"loss": spec.loss, "reported": spec.reported, "predictions": spec.predictions, "metrics": metrics}

    model = est.transform(replicated(rich()))
    state = model.init(jax.random.key(3), *batch(0))
    for i in range(3):
        state, spec = model.train_step(state, *batch(i))
    write(folder, "mirrored", {"state": state, "spec": spec_of(spec)})

    model = est.transform(replicated(rich(), variable_distribution="sharded"))
    state = model.init(jax.random.key(3), *batch(0))
    state, specs = model.train_loop(state, batches(4))
    write(folder, "sharded", {"state": state, "losses": specs.loss, "eval": spec_of(model.eval_step(state, *batch(3)))})

    options = {"accumulate_steps": 2, "loss_scale": est.DynamicLossScale(growth_interval=1)}
    model = est.transform(replicated(poor(**options), est.Reduction.SUM, on_nan="skip"))
    state = model.init(jax.random.key(3), *batch(0))
    for features, labels in batches(3):
        last = est.input_context().index == est.input_context().count - 1
        if last and len(labels) and not int(state.global_step):
            labels = np.concatenate([labels[:-1], np.float32([[np.nan]])])
        state, spec = model.train_step(state, features, labels)
    write(folder, "skipped", {"state": state, "spec": spec_of(spec), "skipped": est.skipped_steps(state)})


def metric_result(metric):
    metric = jax.device_get(metric)
    return metric.result() if hasattr(metric, "result") else metric.compute()


def say(**values):
    print(json.dumps(values, default=str), flush=True)


def make(model_dir, model_fn=None, **config):
    saving = {} if "save_checkpoints_secs" in config else {"save_checkpoints_steps": 1000}
    config = est.RunConfig(**{**saving, "log_step_count_steps": 5, **config})
    return est.Estimator(replicated(model_fn or shown), model_dir, config)


def shown(features, labels, mode):
    """The model_fn of most Estimators here."""
    output = net(features)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"output": output, "x": features["x"]})
    weights = jnp.abs(features["x"][:, :1])
    loss = est.losses.mean_squared_error(labels, output, weights)
    est.summary.scalar("mean output", output.mean())
    est.record("rows", output[:, 0])
    return est.EstimatorSpec(
        mode,
        loss=loss,
        train_op=TowerOptimizer(optax.adam(0.02)).minimize(loss),
        eval_metric_ops={
            "error": est.metrics.mean_absolute_error(labels, output, weights),
            "largest": Largest(jnp.max(output)),
        },
    )


# How many rows each of two processes has of some batches; one of them has no more at the end.
SPLITS = [(4, 4), (5, 3), (1, 2), (3, 0)]


def uneven():
    begin, context = 0, est.input_context()
    for split in SPLITS:
        ends = np.cumsum([begin, *split])
        here = slice(begin, ends[-1]) if context.count == 1 else slice(*ends[context.index :][:2])
        if here.start < here.stop:
            yield {"x": X[here], "ids": IDS[here]}, Y[here]
        begin = ends[-1]


def of_the_chief():
    """Batches that process 0 alone has; none of them divides by the towers."""
    if est.input_context().index == 0:
        for rows in (slice(0, 5), slice(5, 8)):
            yield {"x": X[rows], "ids": IDS[rows]}, Y[rows]


class Rows(est.Hook):
    """Keeps what some steps recorded."""

    def __init__(self):
        self.seen = {}

    def next_step(self, step):
        return step + 3

    def before_run(self, context):
        return {"rows": "rows", "loss": "loss"}

    def after_run(self, context, values):
        self.seen[str(context.step)] = values.results


def history(estimator):
    rows = est.read_history(estimator.model_dir)
    assert [row["step"] for row in rows] == [1, 3, 5, 7]
    return rows


def estimated(folder):
    """The three verbs of an Estimator."""
    start()
    for distribution, steps_per_loop in (("mirrored", 1), ("sharded", "auto")):
        name = f"{distribution}-{steps_per_loop}"
        model_fn = replicated(shown, variable_distribution=distribution)
        config = est.RunConfig(
            save_checkpoints_steps=5, log_step_count_steps=3, save_summary_steps=2, steps_per_loop=steps_per_loop
        )
        estimator = est.Estimator(model_fn, os.path.join(folder, f"{name}-{jax.process_count()}"), config)
        hook = Rows()
        estimator.train(lambda: batches(8), hooks=[hook], max_steps=7)
        write(folder, name, estimator.get_variable_value("*"))
        write(folder, f"{name}-recorded", hook.seen)
        write(folder, f"{name}-eval", estimator.evaluate(lambda: batches(4)))
        if steps_per_loop == 1:
            write(folder, f"{name}-uneven", [estimator.evaluate(uneven), estimator.evaluate(of_the_chief, name="one")])
            write(folder, f"{name}-history", [(row["loss"], row["mean output"]) for row in history(estimator)])
            write(folder, f"{name}-predictions", list(estimator.predict(uneven)))


def by_strategies(folder):
    """Estimators whose towers come from a strategy, and the strategies that are for one process."""
    start()
    count = jax.process_count()

    def plain(features, labels, mode):
        loss = est.losses.mean_squared_error(labels, net(features))
        train_op = est.Optimizer(optax.adam(0.02)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def estimator(name, strategy):
        config = est.RunConfig(train_distribute=strategy, eval_distribute=strategy, save_summary_steps=None)
        return est.Estimator(plain, os.path.join(folder, f"{name}-{count}"), config)

    for strategy in (
        replicate.CollectiveAllReduceStrategy(num_gpus_per_worker=4 // count),
        replicate.MirroredStrategy(devices=devices()),
    ):
        name = type(strategy).__name__
        trained = estimator(name, strategy).train(lambda: batches(4))
        write(folder, name, [trained.get_variable_value("*"), trained.evaluate(uneven)])
    for strategy in (
        replicate.MirroredStrategy(num_gpus=0),
        replicate.OneDeviceStrategy("cpu:0"),
        replicate.ParameterServerStrategy(),
    ):
        attempt(type(strategy).__name__, functools.partial(estimator, "alone", strategy))


def attempt(name, call):
    """Says what error a call ends with."""
    try:
        call()
    except (Exception, SystemExit) as error:
        say(case=name, error=type(error).__name__, text=str(error))
    else:
        say(case=name, error=None)


def then_raises(pairs):
    yield from pairs
    raise OSError("the disk is gone")


def fail_in_one(context):
    if jax.process_index() == 1:
        raise ValueError("not today")


def fail(folder):
    """What must be an error in all processes, one after the other: none may leave them out of step."""
    start()
    me = jax.process_index()
    features, labels = batch(0)

    def estimator_of(name, model_fn):
        return est.Estimator(model_fn, os.path.join(folder, name), est.RunConfig(save_summary_steps=None))

    usual = estimator_of("usual", replicated(shown))

    def trained(name, input_fn, hooks=None, estimator=usual, verb="train", **kwargs):
        attempt(name, lambda: getattr(estimator, verb)(input_fn, hooks=hooks, **kwargs))

    def cut(batch, rows):
        return jax.tree.map(lambda x: x[:rows], batch)

    wide = np.concatenate([features["x"], features["x"]], 1)
    cases = {
        "shapes": {**features, "x": wide if me else features["x"]},
        "dtypes": {**features, "x": features["x"].astype(np.int32) if me else features["x"]},
        "names": {"ids": features["ids"], "x" if me else "z": features["x"]},
    }
    for name, other in cases.items():
        trained(name, lambda other=other: [(other, labels)])
    trained("labels", lambda: [features if me else (features, labels)])
    trained("rows", lambda: [cut(batch(0), 4 - 2 * me)])
    trained("odd rows", lambda: [cut(batch(0), 3)])
    sparse = BCOO.fromdense(features["x"])
    trained("sparse", lambda: [({**features, "x": sparse}, labels)])
    # From here on there is a program of these steps.
    trained("later shapes", lambda: [batch(0), batch(1), (cases["shapes"], labels)])
    trained("evaluated shapes", lambda: [(cases["shapes"], labels)], verb="evaluate")
    trained("later rows", lambda: [batch(0), cut(batch(0), 4 - 2 * me)])
    trained("later odd rows", lambda: [batch(0), cut(batch(0), 3)])
    trained("input_fn", (lambda: 1 / 0) if me else (lambda: batches(3)))
    trained("input", lambda: then_raises(batches(3)) if me else batches(5))
    trained("evaluated input", lambda: then_raises(batches(3)) if me else batches(5), verb="evaluate")
    trained("hooks", lambda: batches(3), hooks=[est.StopAtStepHook(2)] if me else None)
    trained("hook", lambda: batches(4), hooks=[When(2, after_run=fail_in_one)])
    trained("verbs", lambda: batches(3), verb="evaluate" if me else "train")
    trained("steps", lambda: batches(3), steps=2 + me)
    trained("not replicated", lambda: batches(3), estimator=estimator_of("alone", shown))
    local = estimator_of("local", replicate_model_fn(shown, devices=jax.local_devices()))
    for name, verb in (("local", "train"), ("local evaluation", "evaluate")):
        trained(name, lambda: batches(3), estimator=local, verb=verb)
    for distribution in ("shared_round_robin", "shared_local_parameter_server"):
        attempt(distribution, lambda way=distribution: replicated(shown, variable_distribution=way))
    trained("model_dirs", lambda: batches(3), estimator=estimator_of(f"of-{me}", replicated(shown)))
    nan = np.full_like(labels, np.nan)
    trained("nan", lambda: [*batches(3), (features, nan)])
    raises = estimator_of("raises", replicated(shown, on_nan="raise"))
    trained("non-finite", lambda: [*batches(3), (features, nan if me else labels)], estimator=raises)
    trained("empty", list, verb="evaluate")
    trained("one is empty", lambda: batches(3 * me))
    trained("it works", lambda: batches(4))


def fail_in_chunks(folder):
    """Runs of five batches, three at once: the input of process 0 ends after some, that of process 1 fails after
    some."""
    start()
    me = jax.process_index()
    config = est.RunConfig(save_summary_steps=None, steps_per_loop=3)
    estimator = est.Estimator(replicated(shown), os.path.join(folder, "model"), config)
    estimator.train(lambda: batches(1))
    for verb in ("train", "evaluate"):
        for ends in (2, 4, 9):
            for fails in (2, 4, 5):
                given = then_raises(batches(fails)) if me else batches(ends)
                call = functools.partial(getattr(estimator, verb), lambda given=given: given, steps=5)
                attempt(f"{verb} {ends} {fails}", call)
