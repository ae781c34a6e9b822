"""Turns a model_fn into pure, compiled functions of an explicit state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from estimator.core._batch import abstract, call_with_batch_errors, check_batch
from estimator.core._bcoo import pad_sparse, per_step
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn, bind
from estimator.core._replica import Replica
from estimator.core._rng import checked_key
from estimator.core._state import State
from estimator.core._typing import Features, Labels, PyTree, Variables
from estimator.inputs._batch_values import copy_batch, stack_batches
from estimator.multihost._global_arrays import put
from estimator.runtime._program import Program, trace_once
from estimator.steps._init_programs import split_init
from estimator.steps._model_info import ModelInfo
from estimator.steps._pure_steps import PureSteps, check_modes
from estimator.steps._step_loops import compile_read
from estimator.variables._initial_value import InitialValues


class _Init(Protocol):
    def __call__(
        self, key: jax.Array, features: Features, labels: Labels = None, mode: str = ModeKeys.TRAIN
    ) -> State: ...


class _TrainStep(Protocol):
    def __call__(self, state: State, features: Features, labels: Labels = None) -> tuple[State, EstimatorSpec]: ...


class _EvalStep(Protocol):
    def __call__(self, state: State, features: Features, labels: Labels = None) -> EstimatorSpec: ...


class Model(NamedTuple):
    """Six functions that do what a model_fn describes. A second call with the same shapes traces and compiles nothing.

    The leaves of features and labels are arrays of numbers, or `jax.experimental.sparse.BCOO`s. The stored entries of
    those are padded up to a power of two, so that one program serves all numbers of entries between two of them. Arrays
    of numpy are copied by the call, and may be written after it.

    Attributes:
      init: `(key, features, labels=None, mode="train") -> State`. Only TRAIN creates slots.
      train_step: `(state, features, labels=None) -> (State, EstimatorSpec)`.
      eval_step: `(state, features, labels=None) -> EstimatorSpec`.
      predict_step: `(state, features) -> EstimatorSpec`.
      train_loop: `(state, batches) -> (State, EstimatorSpec)`: as many training steps as there are batches, in one
        program. `batches` is a list of `(features, labels)`, or one such pair of arrays of shape `[steps, batch, ...]`;
        the arrays of the spec have `steps` as their first dimension. In the pair, a BCOO has it as a batch dimension.
      abstract_init: the State that `init` returns for such a batch, as `jax.ShapeDtypeStruct`s with their shardings:
        `(features, labels=None, mode="train") -> State`. Nothing is computed.
      inner_steps, inner_read, info, compare: for the Estimator, and not public. `inner_steps`, `(run, state, features,
        labels, *bounds, stacked=False)`, calls `run(step, state, features, labels, *bounds)` as a part of another
        program, if the placement allows it; `step` is a `train_step`, and `run` returns what `Placement.map_steps`
        takes. `inner_read`, `(mode, state, features, labels=None)`, is an `eval_step` or `predict_step` of that kind.
        `info` returns the `ModelInfo`, from the arguments of `abstract_init`. `compare` is the check of
        `replicate_model_fn(check=True)` at the first call: `(mode, state, features, labels)`.
    """

    init: _Init
    train_step: _TrainStep
    eval_step: _EvalStep
    predict_step: Callable[[State, PyTree], EstimatorSpec]
    train_loop: Callable[[State, Any], tuple[State, EstimatorSpec]]
    inner_steps: Callable[..., tuple[State, Any]]
    inner_read: Callable[..., EstimatorSpec]
    abstract_init: Callable[..., State]
    info: Callable[..., ModelInfo]
    compare: Callable[..., None]


def transform(model_fn: ModelFn, params: Any = None, config: Any = None, donate: bool = False) -> Model:
    """Pure, compiled functions that do what the model_fn describes.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode, params):
    ...     w = est.get_variable("w", (2, 1), initializer=jax.nn.initializers.zeros)
    ...     loss = est.losses.mean_squared_error(labels, features @ w)
    ...     train_op = est.Optimizer(optax.sgd(params["learning_rate"])).minimize(loss)
    ...     return est.EstimatorSpec(mode, predictions=features @ w, loss=loss, train_op=train_op)
    >>> model = est.transform(model_fn, params={"learning_rate": 0.25})
    >>> x, y = jnp.eye(2), jnp.ones((2, 1))
    >>> state = model.init(jax.random.key(0), x, y)
    >>> state, spec = model.train_step(state, x, y)
    >>> print(spec.loss, model.eval_step(state, x, y).loss, state.global_step)
    1.0 0.5625 1

    Args:
      model_fn: function of `features` and any of `labels, mode, params, config` that returns an `EstimatorSpec`.
      params, config: passed on to it.
      donate: whether `train_step` and `train_loop` may reuse the memory of the state they are given, which is then
        gone for the caller.

    Raises:
      ValueError: the model_fn has other arguments.
    """
    steps = _Steps(bind(model_fn, params, config), donate)
    return Model(*(getattr(steps, name) for name in Model._fields))


class _Steps:
    """The functions of a Model, each compiled at its first call."""

    def __init__(self, call: ModelFn, donate: bool) -> None:
        self._pure = PureSteps(call)
        self._donate = donate
        self._infos: dict[ModeKeys, ModelInfo] = {}
        # One per mode, also for the abstract run, whose trace is then compiled.
        self._inits = {
            mode: Program(functools.partial(self._init, mode), split=split_init, once=True) for mode in ModeKeys
        }
        self._traced: dict[ModeKeys, ModelInfo] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._compared: set[ModeKeys] = set()

    def init(self, key: jax.Array, features: Features, labels: Labels = None, mode: str = ModeKeys.TRAIN) -> State:
        mode = ModeKeys(mode)
        key = checked_key(key)
        rows = check_batch(features, labels)
        features, labels = pad_sparse(copy_batch(features, labels))
        info = self.info(features, labels, mode)
        # Read here and not in the model_fn, which also runs for each program and when training resumes.
        values = info.notes.get(InitialValues).read(info.like.variables)
        state = self._inits[mode](key, features, labels, values, rows=rows)
        return put(state, info.shardings)

    def _init(
        self, mode: ModeKeys, key: jax.Array, features: Features, labels: Labels, initial_values: Variables
    ) -> State:
        # Beside the result: a compiled program, which others may share, knows nothing of the model_fn.
        state, self._traced[mode] = self._pure.init(key, features, labels, initial_values, mode)
        return state

    def abstract_init(self, features: Features, labels: Labels = None, mode: str = ModeKeys.TRAIN) -> State:
        return self.info(features, labels, mode).placed_state

    def info(self, features: Features, labels: Labels = None, mode: str = ModeKeys.TRAIN) -> ModelInfo:
        """The facts about the model_fn, from an abstract run at the first call in a mode."""
        mode = ModeKeys(mode)
        if mode not in self._infos:
            check_batch(features, labels)
            # Any key will do: only shapes and Python values of this run are kept.
            args: tuple[Any, ...] = jax.random.key(0), features, labels, {}
            no_jit = jax.config.jax_disable_jit  # type: ignore[attr-defined]
            if no_jit and all(hasattr(x, "__array__") for x in jax.tree.leaves((features, labels))):
                self._inits[mode](*args)  # without jit, the user wants to see values
            else:
                self._inits[mode].trace(*args)
            info = self._traced[mode]
            # Before it is stored, so that what contradicts another mode is an error at every call.
            check_modes({**self._infos, mode: info})
            self._infos[mode] = info
        return self._infos[mode]

    def train_step(self, state: State, features: Features, labels: Labels = None) -> tuple[State, EstimatorSpec]:
        step = self._compiled.get("train_step")
        if step is None:
            self.info(features, labels)
            step = self._compile_training("train_step", self._pure.train_step)
            # Before the step, which may donate the state.
            self.compare(ModeKeys.TRAIN, state, features, labels)
        return self._train(step, state, features, labels)

    def inner_steps(self, run: Callable[..., Any], *args: Any, stacked: bool = False) -> tuple[State, Any]:
        info = self._infos[ModeKeys.TRAIN]
        if not info.is_one_program:
            return run(self.train_step, *args)
        if "inner step" not in self._compiled:
            self._compiled["inner step"] = trace_once(functools.partial(self._pure.train, info))
        return info.placement.map_steps(functools.partial(run, self._compiled["inner step"]), stacked)(*args)

    def inner_read(self, mode: ModeKeys, state: State, features: Features, labels: Labels = None) -> EstimatorSpec:
        name = f"inner {mode}"
        if name not in self._compiled:
            info = self.info(features, labels, mode)
            self._compiled[name] = trace_once(functools.partial(self._pure.read, info, mode))
        return self._compiled[name](state, features, labels)

    def train_loop(self, state: State, batches: Any) -> tuple[State, EstimatorSpec]:
        features, labels = stack_batches(batches)
        loop = self._compiled.get("train_loop")
        if loop is None:
            first = jax.tree.map(lambda x: abstract(x).update(shape=x.shape[1:]), per_step((features, labels)))
            info = self.info(*first)
            loop = self._compile_training("train_loop", self._pure.train_loop)
            # `compare` asks the same, but by then its argument, a slice of each array, would have been made.
            if info.compared_on is not None:
                self.compare(ModeKeys.TRAIN, state, *jax.tree.map(lambda x: x[0], per_step((features, labels))))
        return self._train(loop, state, features, labels, stacked=True)

    def _compile_training(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """The program of `run`, `(info, state, features, labels) -> (state, spec)`; or several, if the variables are on
        other devices than the model_fn."""
        info = self._infos[ModeKeys.TRAIN]
        split = info.placement.split_step(self._pure.halves(info), info.like, self._donate)
        if split is not None:
            program = functools.partial(_step_by_step, split) if name == "train_loop" else split
        else:
            program = Program(
                functools.partial(run, info),
                self._donate,
                # A batch stays where the caller has it; `PureSteps.compute` constrains it within the program.
                in_shardings=(info.shardings, None, None),
                # The state comes out as it goes in: its memory can be reused, and the next call needs no other program.
                out_shardings=(info.shardings, None),
            )
        self._compiled[name] = program
        return program

    def _train(
        self, step: Callable[..., Any], state: State, features: Features, labels: Labels, stacked: bool = False
    ) -> tuple[State, EstimatorSpec]:
        """Runs steps under the guard of the model_fn, unless the caller traces: who then has to look itself."""
        info = self._infos[ModeKeys.TRAIN]
        guard = None if isinstance(state.global_step, jax.core.Tracer) else info.guard
        if guard is not None:
            state = guard.before_step(state)
        after, spec = self._call(step, info, state, features, labels, stacked)
        if guard is not None:
            guard.after_step(after)
        return after, spec

    def eval_step(self, state: State, features: Features, labels: Labels = None) -> EstimatorSpec:
        return self._read(ModeKeys.EVAL, state, features, labels)

    def predict_step(self, state: State, features: Features) -> EstimatorSpec:
        return self._read(ModeKeys.PREDICT, state, features, None)

    def _read(self, mode: ModeKeys, state: State, features: Features, labels: Labels) -> EstimatorSpec:
        step = self._compiled.get(mode)
        if step is None:
            info = self.info(features, labels, mode)
            step = self._compiled[mode] = compile_read(info, functools.partial(self._pure.read, info, mode))
            self.compare(mode, state, features, labels)
        return self._call(step, self._infos[mode], state, features, labels)

    def _call(
        self,
        step: Callable[..., Any],
        info: ModelInfo,
        state: State,
        features: Features,
        labels: Labels,
        stacked: bool = False,
    ) -> Any:
        features, labels = copy_batch(features, labels, info.batch_devices)
        if self._pure.saw_sparse:
            features, labels = pad_sparse((features, labels))
        if info.placement.spans_processes:  # each has some rows
            features, labels = info.placement.from_processes((features, labels), stacked)
        return call_with_batch_errors(step, features, labels, state, features, labels)

    def compare(self, mode: ModeKeys, state: State, features: Features, labels: Labels = None) -> None:
        info = self.info(features, labels, mode)
        if info.compared_on is None or mode in self._compared or isinstance(state.global_step, jax.core.Tracer):
            return
        self._compared.add(mode)
        from estimator.steps._one_tower_check import compare_with_one_tower

        def forward(replica: Replica, *batch: Any) -> EstimatorSpec:
            return self._pure.compute(info, *batch, mode, replica)[0]  # type: ignore[call-arg]

        compare_with_one_tower(forward, info, mode, (state, *copy_batch(features, labels, info.batch_devices)))


def _step_by_step(
    step: Callable[..., tuple[State, EstimatorSpec]], state: State, features: Features, labels: Labels
) -> tuple[State, EstimatorSpec]:
    """Makes a step with each of the stacked batches, one after the other."""
    specs = []
    batches = per_step((features, labels))
    # Sparse leaves say the shape of one step by now, but their arrays have all steps, like dense leaves.
    for i in range(len(jax.tree.leaves(batches)[0])):
        state, spec = step(state, *jax.tree.map(lambda x, i=i: x[i], batches))
        specs.append(spec)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *specs)
