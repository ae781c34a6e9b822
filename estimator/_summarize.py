"""`summarize`: the variables of a model, and the work and the memory of a step, before anything is trained."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax

from estimator._estimator import Estimator
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn
from estimator.core._state import State
from estimator.core._typing import Features, Labels
from estimator.loop._evaluate import EvalSteps
from estimator.loop._flops import count_flops
from estimator.loop._memory_report import MemoryUse, memory_use
from estimator.loop._predict import PredictSteps
from estimator.loop._programs import Programs
from estimator.runtime._table import ShownAsTable, Table, show_bytes
from estimator.steps._step_loops import carry_of
from estimator.steps._transform import Model, transform


@dataclasses.dataclass(frozen=True)
class VariableSummary:
    """A variable, or one array of a variable that is a tree of several.

    Attributes:
      name: with its scopes.
      shape, dtype: of the whole variable, which may be cut over devices.
      bytes: of one copy.
      trainable: whether optimizers change it by default.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ModelSummary(ShownAsTable):
    """Variables of a model, and the work and the memory of a step; printed, a table of them by scope, with totals.

    Attributes:
      mode: of the step.
      rows: the variables, sorted by scope and name.
      slot_bytes: of the optimizers' slots, one copy.
      flops: of a step on one device, as XLA counts them; None if a step is several programs, since variables live on
        other devices than the towers. A `while_loop` counts once where XLA cannot know how often it runs.
      memory: of a step on one device; None as for `flops`.
    """

    mode: ModeKeys
    rows: tuple[VariableSummary, ...]
    slot_bytes: int
    flops: float | None
    memory: MemoryUse | None

    @property
    def size(self) -> int:
        """The number of elements in all variables."""
        return sum(row.size for row in self.rows)

    @property
    def trainable_size(self) -> int:
        """The number of elements in trainable variables."""
        return sum(row.size for row in self.rows if row.trainable)

    @property
    def bytes(self) -> int:
        """The bytes of one copy of all variables."""
        return sum(row.bytes for row in self.rows)

    def _table(self) -> Table:
        lines: list[tuple[str, ...]] = [("variable", "shape", "dtype", "elements", "bytes", "trainable")]
        for scope, rows in itertools.groupby(self.rows, _scope):
            lines += _lines_of_scope(scope, list(rows))
        name = self.mode.name.lower()
        if self.flops is None or self.memory is None:
            step = f"a step of {name!r} is several programs: no FLOPs, no memory"
        else:
            memory = ", ".join(f"{field} {show_bytes(size)}" for field, size in self.memory._asdict().items())
            step = f"a step of {name!r} on each device: {self.flops:.4g} FLOPs; memory: {memory}"
        totals = f"{self.size:,} elements, {show_bytes(self.bytes)}, of which trainable: {self.trainable_size:,}"
        slots = f"slots of optimizers: {show_bytes(self.slot_bytes)}"
        return Table(lines, "<<<>><", below=(totals, slots, step))


def _scope(row: VariableSummary) -> str:
    return row.name.rpartition("/")[0]


def _lines_of_scope(scope: str, rows: Sequence[VariableSummary]) -> list[tuple[str, ...]]:
    """A line for the scope, if there is one, and one for each of its variables."""
    heads = [(f"{scope}/", "", "", f"{sum(r.size for r in rows):,}", f"{sum(r.bytes for r in rows):,}", "")]
    shown = [
        (
            "  " + row.name.removeprefix(f"{scope}/") if scope else row.name,
            str([*row.shape]),
            row.dtype,
            f"{row.size:,}",
            f"{row.bytes:,}",
            "yes" if row.trainable else "no",
        )
        for row in rows
    ]
    return [*heads * bool(scope), *shown]


def summarize(
    model: Estimator | ModelFn,
    features: Features,
    labels: Labels = None,
    *,
    params: Any = None,
    mode: str = ModeKeys.TRAIN,
) -> ModelSummary:
    """The variables that a model has for such a batch, the FLOPs of a step, and its memory, as Keras' `summary` and
    Flax's `tabulate` show them.

    It compiles a step and runs none; nothing is written. As `est.memory_report`, which compares several model_fns, it
    is of a program of one step.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     hidden = est.layers.dense(features, 100, jax.nn.relu, name="hidden")
    ...     loss = est.losses.mean_squared_error(labels, est.layers.dense(hidden, 1, name="output"))
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.adam(1e-3)).minimize(loss))
    >>> x, y = (jax.ShapeDtypeStruct((32, width), jnp.float32) for width in (64, 1))
    >>> summary = est.summarize(model_fn, x, y)
    >>> print("\\n".join(str(summary).splitlines()[:-1]))
    variable  shape      dtype    elements   bytes  trainable
    hidden/                          6,500  26,000
      bias    [100]      float32       100     400  yes
      kernel  [64, 100]  float32     6,400  25,600  yes
    output/                            101     404
      bias    [1]        float32         1       4  yes
      kernel  [100, 1]   float32       100     400  yes
    ---------------------------------------------------------
    6,601 elements, 26.4 kB, of which trainable: 6,601
    slots of optimizers: 52.8 kB
    >>> 6 * 32 * 6_500 * 0.6 < summary.flops < 6 * 32 * 6_500 * 1.2
    True
    >>> summary.memory.donated == summary.memory.state
    True

    Args:
      model: a model_fn, replicated or not, or an Estimator, whose model_dir is neither read nor written.
      features, labels: a batch, or `jax.ShapeDtypeStruct`s instead of its arrays.
      params: what the model_fn gets; an Estimator has its own.
      mode: of the step; only in "train" there are slots.

    Raises:
      TypeError: the model is neither an Estimator nor a function.
      ValueError: params are given for an Estimator, or there is no such mode; or as the model_fn does.
    """
    mode = ModeKeys(mode)
    if not isinstance(model, Estimator):
        functions = transform(model, params)
    elif params is None:
        functions = transform(model.model_fn, config=model.config)
    else:
        raise ValueError(f"`est.summarize` takes the params of the Estimator; got params={params!r}. Leave them out.")
    labels = None if mode == ModeKeys.PREDICT else labels
    state = functions.abstract_init(features, labels, mode)
    trainable = functions.info(features, labels, mode).trainable
    rows = [row for name, value in state.variables.items() for row in _rows(name, value, name in trainable)]
    traced = _trace(functions, state, features, labels, mode)
    return ModelSummary(
        mode,
        tuple(sorted(rows, key=lambda row: (_scope(row), row.name))),
        sum(map(_bytes, jax.tree.leaves(state.slots))),
        None if traced is None else count_flops(traced),
        None if traced is None else memory_use(traced, state),
    )


def _trace(
    functions: Model, state: State, features: Features, labels: Labels, mode: ModeKeys
) -> jax.stages.Traced | None:
    """The program of a step, as an Estimator runs it; None if it is several."""
    if not functions.info(features, labels, mode).is_one_program:
        return None
    if mode == ModeKeys.TRAIN:
        return Programs(functions, features, labels).trace_step(state)
    held = carry_of(state), jax.eval_shape(jax.random.key_data, state.key)
    if mode == ModeKeys.EVAL:
        return EvalSteps(functions).step.trace(*held, features, labels)
    return PredictSteps(functions).step.trace(*held, features)


def _rows(name: str, variable: Any, trainable: bool) -> list[VariableSummary]:
    return [
        VariableSummary(name + jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype), _bytes(leaf), trainable)
        for path, leaf in jax.tree_util.tree_leaves_with_path(variable)
    ]


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
