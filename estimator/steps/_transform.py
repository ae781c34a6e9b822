"""Turns a model_fn into pure, compiled functions of an explicit state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from estimator.core._batch import abstract, check_batch, guarded
from estimator.core._bcoo import constrained, has_sparse, padded, per_step
from estimator.core._estimator_spec import EstimatorSpec, train_op_of
from estimator.core._frame import Frame, Replica, open_frame
from estimator.core._hook import Hook
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn, bind
from estimator.core._placement import Halves, Placement
from estimator.core._rng import checked_key
from estimator.core._state import State
from estimator.core._train_op import TrainOp
from estimator.core._typing import Features, Labels, PyTree, Variables
from estimator.inputs._batch_values import copy_batch, stack_batches
from estimator.multihost._global_arrays import put
from estimator.optim._apply_updates import applied
from estimator.optim._learning_rate import rates_of
from estimator.optim._moving_average import at_averages, check_averages_move, check_averages_read
from estimator.optim._non_finite import cleared, counted, done, raise_if_any
from estimator.runtime._uninterrupted import compile_first
from estimator.steps._deferred_merge import Deferred, merged, postponed
from estimator.steps._gradients import run_model_fn
from estimator.steps._model_info import ModelInfo
from estimator.steps._one_tower_check import compare_with_one_tower


class _Init(Protocol):
    def __call__(
        self,
        key: jax.Array,
        features: Features,
        labels: Labels = None,
        mode: str = ModeKeys.TRAIN,
    ) -> State: ...


_ALONE = Replica()
_TrainProgram = Callable[[State, PyTree, PyTree], tuple[State, EstimatorSpec]]


class _TrainStep(Protocol):
    def __call__(self, state: State, features: Features, labels: Labels = None) -> tuple[State, EstimatorSpec]: ...


class _EvalStep(Protocol):
    def __call__(self, state: State, features: Features, labels: Labels = None) -> EstimatorSpec: ...


class Model(NamedTuple):
    """A model_fn as pure functions. A second call with the same shapes traces and compiles nothing.

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
      inner_step: `train_step` for a loop of one's own: what towers merge only once per program is still `Deferred` in
        the spec, and is merged by calling `merged` on the spec after the loop.
      abstract_init: what `init` would return for the same batch, as `jax.ShapeDtypeStruct`s with their shardings:
        `(features, labels=None, mode="train") -> State`. Nothing is computed.
      traits: what else is known of the model_fn before it runs: `(features, labels=None, mode="train") -> ModelInfo`.
      compare: the check of `replicate_model_fn(check=True)`, at the first call: `(mode, state, features, labels)`.
    """

    init: _Init
    train_step: _TrainStep
    eval_step: _EvalStep
    predict_step: Callable[[State, PyTree], EstimatorSpec]
    train_loop: Callable[[State, Any], tuple[State, EstimatorSpec]]
    inner_step: _TrainStep
    abstract_init: Callable[..., State]
    traits: Callable[..., ModelInfo]
    compare: Callable[..., None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Static:
    """Carries Python values out of a traced function."""

    value: Any = dataclasses.field(metadata={"static": True})


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
    return Model(
        init=steps.init,
        train_step=steps.train_step,
        eval_step=steps.eval_step,
        predict_step=steps.predict_step,
        train_loop=steps.train_loop,
        inner_step=steps.inner_step,
        abstract_init=steps.abstract_init,
        traits=steps.traits,
        compare=steps.compare,
    )


class _Steps:
    """Makes the functions of a Model, each compiled at its first call."""

    def __init__(self, call: ModelFn, donate: bool) -> None:
        self._call = call
        self._donate = donate
        self._infos: dict[ModeKeys, ModelInfo] = {}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._compared: set[ModeKeys] = set()
        self._sparse = False  # whether a batch had a sparse leaf: looking into each would cost dense ones time
        self._traced_init = jax.jit(self._pure_init, static_argnames="mode")

    def _check(self, features: Features, labels: Labels) -> int:
        rows = check_batch(features, labels)
        self._sparse |= has_sparse((features, labels))
        return rows

    # The pure functions: clean inputs, run in a fresh frame, collect.

    def _pure_init(
        self, key: jax.Array, features: Features, labels: Labels, initial: Variables, mode: ModeKeys
    ) -> tuple[State, _Static]:
        self._check(features, labels)
        step = jnp.zeros((), jnp.int32)
        frame = Frame(mode, {}, {}, key=key, global_step=step, initializing=True, initial=initial)
        with open_frame(frame):
            spec = self._call(features, labels, mode)
        if mode == ModeKeys.TRAIN and frame.declared.averages:
            check_averages_move(train_op_of(spec), frame.declared)
        placement = frame.placement or Placement()
        # Only the kinds of what is reported: its values would be computed, and compiled, for nothing.
        reported = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), {**spec.reported, **frame.reported})
        info = (
            placement,
            spec.train_op is not None and bool(spec.train_op.pending),
            tuple(frame.declared.trainable.items()),
            frame.on_nan,
            frame.compared_on,
            _hooks(spec),
            tuple(sorted(reported.items())),
            tuple(frame.declared.starts),
            tuple(frame.declared.averages.items()),
        )
        return State(frame.variables, frame.slots, step, key), _Static(info)

    def _compute(
        self,
        info: ModelInfo,
        state: State,
        features: Features,
        labels: Labels,
        mode: ModeKeys,
        replica: Replica = _ALONE,
    ) -> tuple[EstimatorSpec, dict[str, PyTree]]:
        """The spec, with gradients, and the variables that the model_fn wrote itself."""
        rows = self._check(features, labels)
        sharding = info.placement.batch(rows)
        if sharding is not None and not replica.one_tower:
            features, labels = constrained((features, labels), sharding)
        frame = Frame(
            mode,
            state.variables if mode == ModeKeys.TRAIN else at_averages(info.averages, state.variables),
            state.slots,
            key=jax.random.fold_in(state.key, state.global_step),
            global_step=state.global_step,
            replica=replica,
        )
        differentiate = info.pending and not replica.forward_only
        result = run_model_fn(lambda: self._call(features, labels, mode), frame, differentiate=differentiate)
        return postponed(result.spec, result.frame.deferred), result.writes.applied_to(state.variables)

    def _apply(
        self,
        state: State,
        train_op: TrainOp,
        assigned: Variables,
        at: Callable[[dict[str, PyTree]], TrainOp] | None = None,
    ) -> State:
        """The state after a step whose gradients are known."""
        variables, slots = applied(train_op, assigned, state.variables, state.slots, state.key, state.global_step, at)
        after = State(variables, slots, state.global_step + 1, state.key)
        return counted(train_op, state, after)

    def _pure_train(
        self, info: ModelInfo, state: State, features: Features, labels: Labels
    ) -> tuple[State, EstimatorSpec]:
        """One step; what is merged only once per program is still `Deferred`."""

        def at(variables: Variables) -> TrainOp:
            start = state._replace(variables=variables)
            return train_op_of(self._compute(info, start, features, labels, ModeKeys.TRAIN)[0])

        spec, assigned = self._compute(info, state, features, labels, ModeKeys.TRAIN)
        after = self._apply(state, train_op_of(spec), assigned, at)
        return after, _finished(info.placement, spec, after)

    # The compiled ones.

    def init(
        self,
        key: jax.Array,
        features: Features,
        labels: Labels = None,
        mode: str = ModeKeys.TRAIN,
    ) -> State:
        mode = ModeKeys(mode)
        key = checked_key(key)
        check_batch(features, labels)
        features, labels = padded(copy_batch(features, labels))
        info = self._info(mode, features, labels)
        initial: Variables = {}  # read here and not in the model_fn, which runs for each program, and to resume
        for start in info.starts:
            initial |= start.read(info.like.variables)
        if not isinstance(key, jax.core.Tracer):
            compile_first(self._traced_init, key, features, labels, initial, mode=mode)
        state, _ = self._traced_init(key, features, labels, initial, mode=mode)
        return put(state, info.shardings)

    def abstract_init(self, features: Features, labels: Labels = None, mode: str = ModeKeys.TRAIN) -> State:
        info = self._info(ModeKeys(mode), features, labels)
        shardings = jax.tree.broadcast(info.shardings, info.like, is_leaf=lambda x: x is None)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            info.like,
            shardings,
        )

    def train_step(self, state: State, features: Features, labels: Labels = None) -> tuple[State, EstimatorSpec]:
        step = self._compiled.get(ModeKeys.TRAIN)
        if step is None:
            info = self._info(ModeKeys.TRAIN, features, labels)
            step = self._compiled[ModeKeys.TRAIN] = self._compile_train(info)
            self.compare(ModeKeys.TRAIN, state, features, labels)
        return self._watched(step, state, features, labels)

    def inner_step(self, state: State, features: Features, labels: Labels = None) -> tuple[State, EstimatorSpec]:
        step = self._compiled.get("inner_step")
        if step is None:
            info = self._info(ModeKeys.TRAIN, features, labels)
            step = functools.partial(self._pure_train, info)
            step = info.placement.compile_step(step, self._halves(info), info.like, self._donate)
            self._compiled["inner_step"] = step
        return self._watched(step, state, features, labels)

    def train_loop(self, state: State, batches: Any) -> tuple[State, EstimatorSpec]:
        features, labels = stack_batches(batches)
        loop = self._compiled.get("train_loop")
        if loop is None:
            first = jax.tree.map(lambda x: abstract(x).update(shape=x.shape[1:]), per_step((features, labels)))
            info = self._info(ModeKeys.TRAIN, *first)
            loop = self._compiled["train_loop"] = self._compile_loop(info)
            if info.compared_on is not None:
                self.compare(ModeKeys.TRAIN, state, *jax.tree.map(lambda x: x[0], per_step((features, labels))))
        return self._watched(loop, state, features, labels)

    def traits(self, features: Features, labels: Labels = None, mode: str = ModeKeys.TRAIN) -> ModelInfo:
        return self._info(ModeKeys(mode), features, labels)

    def compare(self, mode: ModeKeys, state: State, features: Features, labels: Labels = None) -> None:
        info = self._info(mode, features, labels)
        if info.compared_on is None or mode in self._compared or isinstance(state.global_step, jax.core.Tracer):
            return
        self._compared.add(mode)

        def forward(replica: Replica, *batch: Any) -> EstimatorSpec:
            return self._compute(info, *batch, mode, replica)[0]  # type: ignore[call-arg]

        compare_with_one_tower(forward, info, mode, (state, *copy_batch(features, labels, info.batch_devices)))

    def _watched(
        self, steps: _TrainProgram, state: State, features: Features, labels: Labels
    ) -> tuple[State, EstimatorSpec]:
        """Runs steps; with on_nan="raise" it raises at once, unless the caller traces: who then has to look itself."""
        raises = self._infos[ModeKeys.TRAIN].on_nan == "raise" and not isinstance(state.global_step, jax.core.Tracer)
        if raises:
            state = cleared(state)
        features, labels = copy_batch(features, labels, self._infos[ModeKeys.TRAIN].batch_devices)
        if self._sparse:
            features, labels = padded((features, labels))
        after, spec = guarded(steps, features, labels, state, features, labels)
        if raises:
            raise_if_any(after)
        return after, spec

    def eval_step(self, state: State, features: Features, labels: Labels = None) -> EstimatorSpec:
        return self._run_only(ModeKeys.EVAL, state, features, labels)

    def predict_step(self, state: State, features: Features) -> EstimatorSpec:
        return self._run_only(ModeKeys.PREDICT, state, features, None)

    def _run_only(self, mode: ModeKeys, state: State, features: Features, labels: Labels) -> EstimatorSpec:
        step = self._compiled.get(mode)
        if step is None:
            info = self._info(mode, features, labels)

            def step(state: State, features: Features, labels: Labels) -> EstimatorSpec:
                spec, _ = self._compute(info, state, features, labels, mode)
                return dataclasses.replace(spec, train_op=None)

            step = self._compiled[mode] = info.placement.compile_read(step)
            self.compare(mode, state, features, labels)
        features, labels = copy_batch(features, labels, self._infos[mode].batch_devices)
        if self._sparse:
            features, labels = padded((features, labels))
        return guarded(step, features, labels, state, features, labels)

    def _compile_train(self, info: ModelInfo) -> _TrainProgram:
        def step(*batch: Any) -> tuple[State, EstimatorSpec]:
            return merged(self._pure_train(info, *batch))

        return info.placement.compile_step(step, self._halves(info), info.like, self._donate)

    def _compile_loop(self, info: ModelInfo) -> _TrainProgram:
        def scan(state: State, features: Features, labels: Labels) -> tuple[State, EstimatorSpec]:
            # The key stays out of the carry, and so out of what the loop copies from step to step.
            def body(carry: Any, batch: tuple[PyTree, PyTree]) -> tuple[Any, EstimatorSpec]:
                after, spec = self._pure_train(info, State(**carry, key=state.key), *batch)
                return changing(after), spec

            def changing(state: State) -> dict[str, Any]:
                return {name: value for name, value in state._asdict().items() if name != "key"}

            carry, specs = jax.lax.scan(body, changing(state), per_step((features, labels)))
            return State(**carry, key=state.key), merged(specs, stacked=True)

        return info.placement.compile_loop(scan, self._halves(info), info.like, self._donate)

    def _halves(self, info: ModelInfo) -> Halves:
        def compute(state: State, features: Features, labels: Labels) -> tuple[EstimatorSpec, dict[str, PyTree]]:
            return self._compute(info, state, features, labels, ModeKeys.TRAIN)

        return Halves(compute, self._apply, functools.partial(_finished, info.placement))

    def _info(self, mode: ModeKeys, features: Features, labels: Labels) -> ModelInfo:
        """What is known of the model_fn, from an abstract run at the first call in a mode."""
        if mode not in self._infos:
            check_batch(features, labels)
            first_run: Callable[..., Any] = self._traced_init.eval_shape
            no_jit = jax.config.jax_disable_jit  # type: ignore[attr-defined]
            if no_jit and all(hasattr(x, "__array__") for x in jax.tree.leaves((features, labels))):
                first_run = self._traced_init  # whoever turns jit off wants to look at values
            like, info = first_run(jax.random.key(0), features, labels, {}, mode=mode)
            placement, pending, declared, on_nan, device, hooks, reported, starts, averages = info.value
            like = like._replace(variables={name: like.variables[name] for name, _ in declared})  # jax sorts dicts
            trainable = tuple(name for name, is_trainable in declared if is_trainable)
            homes = placement.state(like) if mode == ModeKeys.TRAIN else placement.state_to_read(like)
            info = ModelInfo(
                like,
                placement,
                pending,
                homes,
                on_nan,
                device,
                hooks,
                trainable,
                dict(reported),
                starts,
                dict(averages),
            )
            check_averages_read({**self._infos, mode: info})
            self._infos[mode] = info
        return self._infos[mode]


def _finished(placement: Placement, spec: EstimatorSpec, after: State) -> EstimatorSpec:
    """The spec of a step that was taken: its train_op says how, not what to do."""
    train_op = train_op_of(spec)
    rates: dict[str, Any] = {
        name: rate if rate.ndim == 0 else Deferred(rate, placement.first)
        for name, rate in rates_of(after.slots).items()
        if rate.ndim == 0 or train_op.slots  # of each tower
    }
    return spec.unchecked(train_op=done(train_op, rates))


def _hooks(spec: EstimatorSpec) -> tuple[Sequence[Hook], Sequence[Hook]]:
    if spec.mode == ModeKeys.TRAIN:
        return spec.training_chief_hooks, spec.training_hooks
    return (), spec.evaluation_hooks if spec.mode == ModeKeys.EVAL else spec.prediction_hooks
