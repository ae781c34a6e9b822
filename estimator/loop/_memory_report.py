"""`memory_report`: the memory of each device that a compiled training step needs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from estimator.core._model_fn import ModelFn
from estimator.core._state import State
from estimator.core._typing import Features, Labels
from estimator.loop._programs import Programs
from estimator.runtime._table import ShownAsTable, Table
from estimator.steps._transform import transform


class MemoryUse(NamedTuple):
    """Bytes on one device; of several, each has as many.

    Attributes:
      state: of variables and slots, and the global step, that live there.
      arguments: of what goes into the program: the state, the batch, the random key.
      outputs: of what comes out: the state and the loss.
      donated: of the outputs that replace arguments. If it equals `state`, a step makes no second copy of it.
      temporary: of all else that the program holds: gradients, and what is kept for the backward pass.
      peak: of all of this together: arguments + outputs - donated + temporary.
    """

    state: int
    arguments: int
    outputs: int
    donated: int
    temporary: int
    peak: int


class MemoryReport(ShownAsTable, dict[str, MemoryUse]):
    """A `MemoryUse` for each model_fn, by name; printed, it is a table."""

    def _table(self) -> Table:
        rows = [(name, *(f"{count:,}" for count in use)) for name, use in self.items()]
        alignment = "<" + ">" * len(MemoryUse._fields)
        return Table([("", *MemoryUse._fields), *rows], alignment, above=("bytes on each device in a training step",))


def memory_report(
    model_fn: ModelFn | dict[str, ModelFn], features: Features, labels: Labels = None, params: Any = None
) -> MemoryReport:
    """The memory that the training step of an Estimator needs on each device, as its compiled program says.

    >>> import functools, estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode, network=lambda net: net):
    ...     weights = [est.get_variable(f"w{i}", (16, 16)) for i in range(16)]
    ...     def net(weights, x):
    ...         for w in weights:
    ...             x = jnp.tanh(x @ w)
    ...         return x
    ...     loss = est.losses.mean_squared_error(labels, network(net)(weights, features))
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.adam(1e-3)).minimize(loss))
    >>> x = jax.ShapeDtypeStruct((512, 16), jnp.float32)
    >>> segments = functools.partial(model_fn, network=est.checkpoint_segments)
    >>> report = est.memory_report({"plain": model_fn, "segments": segments}, x, x)
    >>> report["plain"].donated == report["plain"].state, report["segments"].temporary < report["plain"].temporary / 2
    (True, True)
    >>> print(report)  # doctest: +ELLIPSIS
    bytes on each device in a training step
                        state      arguments        outputs        donated      temporary           peak
    plain              49,...
    segments           49,...

    It compiles a step, and runs none. With `RunConfig(steps_per_loop=...)` a program holds the batches of all its
    steps besides.

    Args:
      model_fn: a model_fn, replicated or not, or several by name, to be compared.
      features, labels: a batch, or `jax.ShapeDtypeStruct`s instead of its arrays.
      params: what the model_fn gets.

    Raises:
      TypeError: a model_fn is not a function.
      ValueError: there is none, or its variables live on other devices than the towers, where a step is several
        programs; or as the model_fn does.
    """
    model_fns = model_fn if isinstance(model_fn, dict) else {"model_fn": model_fn}
    if not model_fns:
        raise ValueError("`est.memory_report` needs a model_fn, or several by name; got an empty dict.")
    return MemoryReport({str(name): _use(each, features, labels, params) for name, each in model_fns.items()})


def _use(model_fn: ModelFn, features: Features, labels: Labels, params: Any) -> MemoryUse:
    model = transform(model_fn, params)
    programs = Programs(model, features, labels)
    if not programs.info.is_one_program:
        raise ValueError(
            "`est.memory_report` reads one program per training step; variables on devices of their own "
            "(VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER, SHARED_ROUND_ROBIN) make it several. Give the same "
            "model_fn with MIRRORED or SHARDED variables."
        )
    state = model.abstract_init(features, labels)
    return memory_use(programs.trace_step(state), state)


def memory_use(traced: jax.stages.Traced, state: State) -> MemoryUse:
    """The memory of a program of one step, which is compiled for it, with such a state."""
    stats = traced.lower().compile().memory_analysis()
    return MemoryUse(
        state=sum(_bytes(x) for x in jax.tree.leaves((state.variables, state.slots, state.global_step))),
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        donated=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        peak=stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes,
    )


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize
