"""The law of towers, as an assertion: a model_fn computes on several devices what it computes on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from estimator.core._batch import rows_of
from estimator.core._bcoo import is_sparse
from estimator.core._model_fn import ModelFn
from estimator.core._typing import Features, Labels, PyTree
from estimator.steps._one_tower_check import differences, results
from estimator.steps._transform import Model, transform

_MOST_SHOWN = 8  # differences, in one error
_STATISTICS = "A tower sees its own rows only: a statistic of the batch, as in a batch norm, needs `cross_tower_mean`."
_LOSS_HINT = (
    f"Is the loss a mean over examples, as the loss_reduction says by default, or a sum (Reduction.SUM)? {_STATISTICS}"
)
_UPDATE_HINT = f"What a model_fn assigns is merged over towers as the variable's aggregation says. {_STATISTICS}"
_OUTPUT_HINT = f"Metrics and predictions need a value for each example. {_STATISTICS}"


def assert_towers_match_one_batch(
    model_fn: ModelFn,
    features: Features,
    labels: Labels = None,
    *,
    replicate: Callable[..., ModelFn],
    towers: Sequence[int] = (2, 4),
    steps: int = 3,
    params: object = None,
    config: object = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Asserts that a replicated model_fn computes in several towers what it computes in one, from the whole batch.

    Each is trained on the batch for some steps from the same initial values. Then it evaluates and predicts all rows of
    the batch, and all but the last, which towers cannot split evenly. Losses, variables, optimizers' slots, metrics and
    predictions are compared. A model_fn that draws random numbers in a step, as dropout does, draws others in each
    tower: turn that off by its params. Adam and others that divide by the size of a gradient make the rounding of a
    gradient near 0 visible; `optax.sgd` does not.

    >>> import estimator as est, jax, numpy as np, optax
    >>> from estimator.testing import assert_towers_match_one_batch
    >>> from replicate import TowerOptimizer, replicate_model_fn
    >>> def model_fn(features, labels, mode):
    ...     output = features @ est.get_variable("w", (2,), initializer=jax.nn.initializers.ones)
    ...     if mode == est.ModeKeys.PREDICT:
    ...         return est.EstimatorSpec(mode, predictions=output)
    ...     loss = ((output - labels) ** 2).sum()  # but replicate_model_fn takes it for a mean
    ...     train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> x, y = np.ones((4, 2), np.float32), np.zeros(4, np.float32)
    >>> assert_towers_match_one_batch(model_fn, x, y, replicate=replicate_model_fn)
    Traceback (most recent call last):
    ...
    AssertionError: 2 towers differ from one in training step 1:
      the loss: 8.0 in 2 towers, 16.0 in one
    Is the loss a mean over examples, as the loss_reduction says by default, or a sum (Reduction.SUM)? ...

    Args:
      model_fn: with `TowerOptimizer`s, as replicate_model_fn wants it. It is called in all three modes.
      features: of a batch; the number of rows is divisible by each of `towers`.
      labels: of the batch, or None.
      replicate: `replicate_model_fn`, or a `functools.partial` of it with the options that the program uses.
      towers: how many there are to be, each on a CPU device of its own; see `simulate_devices`.
      steps: to train.
      params: of the model_fn.
      config: of the model_fn.
      rtol: how far two numbers may be apart, relative to their size.
      atol: how far two numbers may be apart in any case.

    Raises:
      AssertionError: it names the number of towers, what differs first, and both values.
    """
    # CPU devices, since a process can have any number of them, and they round in the same way.
    devices = jax.local_devices(backend="cpu")
    if max(towers) > len(devices):
        raise ValueError(
            f"{max(towers)} towers need as many CPU devices; jax has {len(devices)}. Call "
            f"`estimator.testing.simulate_devices({max(towers)})` before jax is used."
        )

    def run(number: int) -> Iterator[_Moment]:
        model = transform(replicate(model_fn, devices=devices[:number]), params, config)
        return _moments(model, features, labels, steps)

    one_tower = list(run(1))
    for number in towers:
        # `run` is a generator: the steps after the first difference are not made.
        for got, want in zip(run(number), one_tower, strict=True):
            lines = list(differences(got.values, want.values, f"{number} towers", rtol, atol))
            if lines:
                more = [f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
                head = f"{number} towers differ from one in {got.name}:"
                raise AssertionError("\n  ".join([head, *lines[:_MOST_SHOWN], *more]) + f"\n{got.hint}")


class _Moment(NamedTuple):
    """The values that can be compared at a point of a run."""

    name: str
    values: dict[str, PyTree]
    hint: str


def _moments(model: Model, features: Features, labels: Labels, steps: int) -> Iterator[_Moment]:
    state = model.init(jax.random.key(0), features, labels)
    yield _Moment("the initial values", {"variable": state.variables}, _UPDATE_HINT)
    for step in range(1, steps + 1):
        state, spec = model.train_step(state, features, labels)
        name = f"training step {step}"
        yield _Moment(name, {"loss": spec.loss}, _LOSS_HINT)
        yield _Moment(name, {"variable": state.variables, "slot": state.slots}, _UPDATE_HINT)
    rows = rows_of(features, labels)
    # One row less does not divide by the towers: a remainder must be evaluated exactly, too.
    for count in (rows, rows - 1) if rows > 1 else (rows,):
        some = jax.tree.map(lambda x, count=count: x[:count], (features, labels), is_leaf=is_sparse)
        spec = model.eval_step(state, *some)
        name = f"the evaluation of {count} rows"
        yield _Moment(name, {"loss": spec.loss, "metric": results(spec)}, _OUTPUT_HINT)
        predictions = model.predict_step(state, some[0]).predictions
        yield _Moment(f"the prediction of {count} rows", {"prediction": predictions}, _OUTPUT_HINT)
