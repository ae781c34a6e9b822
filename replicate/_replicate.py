"""Wraps a model_fn so that it runs on several devices at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from estimator import EstimatorSpec, ModeKeys, Reduction, TrainOp
from estimator._batch import check_batch
from estimator._forward import Forward, check_transform
from estimator._frame import Frame, PyTree, current_frame, open_frame
from estimator._gradients import has_pending, run
from estimator._model_fn import ModelFn, bind
from estimator._non_finite import POLICIES, marked, non_finite, watch
from estimator._placement import Placement, SeparatePlacement
from estimator._report import merge_reports
from estimator._sparse import is_sparse
from replicate._accumulate import accumulate_steps, accumulated
from replicate._devices import find_devices, of_this_process
from replicate._distribution import Mirrored, VariableDistribution, place
from replicate._merge import (
    apart,
    check_rows,
    join,
    join_metrics,
    merged,
    summed,
    together,
    total,
    with_gradients,
    without_gradients,
)
from replicate._rows import take_rows
from replicate._tower_optimizer import TowerOptimizer
from replicate._towers import (
    cross_tower_mean,
    in_towers,
    num_towers,
    tower_index,
    tower_map,
)
from replicate.cross_tower_ops import CrossTowerOps, choose_the_best


class ReplicatedTwice(ValueError):
    """A replicated model_fn ran in a tower of another one."""


def replicate_model_fn(
    model_fn: ModelFn,
    loss_reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
    devices: Sequence[jax.Device | str] | None = None,
    *,
    variable_distribution: VariableDistribution = VariableDistribution.MIRRORED,
    variable_device: jax.Device | str | None = None,
    on_nan: str | None = None,
    cross_tower_ops: CrossTowerOps | None = None,
    tower_transform: Callable[[Forward], Forward] | None = None,
) -> ModelFn:
    """A model_fn that runs the given one in a tower per device and merges what the towers return.

    It goes wherever a model_fn goes. Features and labels are split along their first dimension; each tower's loss is
    divided by the number of towers, unless the reduction is SUM; the gradients of all towers are summed, and the
    optimizers, wrapped in `TowerOptimizer`, run once on the sums; the losses are added, metrics merged, predictions
    concatenated in input order. The rules are those of `tf.contrib.estimator.replicate_model_fn`; here evaluation
    and prediction take batches of any size, and weighted means are exact. Sparse features
    (`jax.experimental.sparse.BCOO`) are split by rows too; each tower then goes through the entries of all rows,
    unless the rows are a batch dimension (`bcoo.update_layout(n_batch=1)`).

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     if mode == est.ModeKeys.PREDICT:
    ...         return est.EstimatorSpec(mode, predictions=w * features)
    ...     loss = jnp.mean((w * features - labels) ** 2)
    ...     train_op = TowerOptimizer(optax.sgd(0.5)).minimize(loss)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> model = est.transform(replicate_model_fn(model_fn, devices=["cpu:0", "cpu:1"]))
    >>> x, y = jnp.array([1.0, 3.0]), jnp.array([0.0, 0.0])
    >>> state = model.init(jax.random.key(0), x, y)
    >>> state, spec = model.train_step(state, x, y)
    >>> print(spec.loss, state.variables["w"])
    5.0 -4.0
    >>> print(model.predict_step(state, jnp.array([1.0, 2.0, 3.0])).predictions)
    [ -4.  -8. -12.]

    Args:
      model_fn: function of `features` and any of `labels, mode, params, config`.
      loss_reduction: how the model_fn's loss comes from the losses of the examples: SUM, or any of the means.
      devices: one per tower: `jax.Device`s or names such as "/gpu:0", "cpu:1". None means all GPUs or TPU cores, or,
        where there are none, all CPU devices; of several processes (`initialize_distributed`) those of all. Each
        process then gives its own rows of every batch.
      variable_distribution: where the variables live, and where the gradients are summed.
      variable_device: the device of all variables, for SHARED_LOCAL_PARAMETER_SERVER. By default, as in TensorFlow,
        the tower's own where there is one tower, else the first CPU device.
      on_nan: what to do about a step in which a gradient that a tower is about to give to the sum holds an inf or a
        NaN. None: nothing is looked for. "skip": the step changes neither variables nor slots, is counted in the state
        (`est.skipped_steps(state)`), and training goes on. "raise": `est.NonFiniteGradientError` names the step, the
        tower and the variable; a `train_step` of `est.transform` then waits for its result, an Estimator looks as
        often as it looks at the losses, and what is compiled into an outer `jax.jit` can only skip.
      cross_tower_ops: how gradients, losses and whatever else is summed over towers, in training and evaluation; of
        `replicate.cross_tower_ops`. What a model_fn itself sums by `cross_tower_sum` does not go through it.
      tower_transform: `fn(forward)`, which makes of a tower's forward function another one, of which the gradients
        are taken: `est.checkpoint_segments` or `jax.checkpoint` (for memory), `jax.named_scope("tower")` (for
        profiles), or one that runs it under `jax.default_matmul_precision("bfloat16")`. `forward(trained, rest,
        batch)` is pure: pytrees of arrays go in, what is differentiated first, and come out, the losses to
        differentiate first. It is one run of the model_fn, less the sums over towers that follow; each micro-batch
        of `accumulate_steps` has one. It is so in every mode, but for `init`.

    Raises:
      TypeError: `cross_tower_ops` or `tower_transform` is something else, or what the latter returns is no function.
      ValueError: the reduction is NONE, there are no such devices, or, while it runs, the batch does not divide by
        the towers (times `accumulate_steps`) in TRAIN, an optimizer is not wrapped in `TowerOptimizer`, or what
        `tower_transform` makes returns something else than the forward function.
    """
    check_transform(tower_transform)
    if on_nan is not None and on_nan not in POLICIES:
        raise ValueError(f'on_nan must be None, "raise" or "skip"; got {on_nan!r}.')
    if Reduction(loss_reduction) == Reduction.NONE:
        raise ValueError(
            "Tower losses need to be reduced in some way, yet NONE reduction is specified. "
            "Use Reduction.SUM or one of the means."
        )
    towers = find_devices(devices)

    def replicas_on(devices: tuple[jax.Device, ...]) -> _Replicas:
        placement = place(variable_distribution, devices, variable_device)
        return _Replicas(
            devices=devices,
            placement=placement,
            mean_loss=Reduction(loss_reduction) != Reduction.SUM,
            on_nan=on_nan,
            ops=_checked_ops(cross_tower_ops, placement, devices),
            transform=tower_transform,
        )

    everywhere = replicas_on(towers)
    # Each process predicts for itself: nothing of an example depends on the others, nor on how many they have.
    here = replicas_on(of_this_process(towers)) if everywhere.placement.spans_processes else everywhere

    def replicated(
        features: PyTree, labels: PyTree, mode: str, params: Any = None, config: Any = None
    ) -> EstimatorSpec:
        frame = current_frame("a model_fn made by replicate_model_fn")
        if in_towers():
            raise ReplicatedTwice("`replicate_model_fn` was given a model_fn that is replicated already. Wrap it once.")
        mode = ModeKeys(mode)
        replicas = here if mode == ModeKeys.PREDICT else everywhere
        rows = check_batch(features, labels)
        # What initializes has the rows of this process alone.
        size = len(of_this_process(towers)) if frame.initializing else len(towers)
        if mode == ModeKeys.TRAIN and rows % size:
            raise ValueError(
                f"Batch size {rows} needs to be divisible by the number of towers, which is {size}. "
                "Drop the remainder in input_fn (`drop_remainder=True`), or choose another batch size."
            )
        bound = bind(model_fn, params, config)
        frame.placement = replicas.placement
        if on_nan and mode == ModeKeys.TRAIN:
            watch(frame, on_nan)

        def call(batch: PyTree) -> EstimatorSpec:
            return bound(*batch, mode)

        if frame.initializing:
            return replicas.initialize(call, frame, (features, labels))
        if mode == ModeKeys.TRAIN:
            spec = replicas.train(call, frame, (features, labels), rows)
        else:
            used = dataclasses.replace(replicas, devices=towers[:1]) if frame.one_tower else replicas
            spec = used.evaluate(call, frame, (features, labels), rows)
        metrics, reported = replicas.placement.whole_in_each((spec.eval_metric_ops, spec.reported))
        return dataclasses.replace(spec, eval_metric_ops=metrics, reported=reported)

    return replicated


def _checked_ops(given: CrossTowerOps | None, placement: Placement, devices: tuple[jax.Device, ...]) -> CrossTowerOps:
    if given is None:
        return choose_the_best(devices)
    if not isinstance(given, CrossTowerOps):
        raise TypeError(
            'cross_tower_ops must be an object of `replicate.cross_tower_ops`, such as `AllReduce("ring")`; got '
            f"{given!r}."
        )
    if isinstance(placement, SeparatePlacement):
        raise ValueError(
            f"cross_tower_ops was given, an {type(given).__name__}, with a variable_distribution whose gradients are "
            "summed on the devices of the variables, not in the towers. Leave it out, or use "
            "VariableDistribution.MIRRORED or SHARDED."
        )
    return given


Call = Callable[[PyTree], EstimatorSpec]


@dataclasses.dataclass(frozen=True)
class _Replicas:
    """Runs a model_fn in towers, within the frame of the run around it.

    Attributes:
      devices: one per tower.
      placement: where the variables live.
      mean_loss: whether the merged loss is the mean of the towers' losses, not their sum.
      on_nan: None: gradients are not looked at.
      ops: takes the sums over towers.
      transform: what `replicate_model_fn` was told about the forward function of a tower.
    """

    devices: tuple[jax.Device, ...]
    placement: Placement
    mean_loss: bool
    on_nan: str | None
    ops: CrossTowerOps
    transform: Callable[[Forward], Forward] | None

    def initialize(self, call: Call, frame: Frame, batch: PyTree) -> EstimatorSpec:
        """Creates the variables as one tower with the whole batch would."""
        ran: list[Frame] = []

        def tower(key: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
            ran.append(frame.fresh(key=key))
            with open_frame(ran[0]) as started:
                spec = call(batch)
            if len(self.devices) > 1:
                _check_optimizers(spec.train_op)
            spec = dataclasses.replace(spec, train_op=_taken(spec), reported=started.reported)
            return (spec, started.variables, started.slots), None

        (spec, variables, slots), _ = tower_map(tower, self.devices[:1])(frame.key, batch)
        frame.variables.update(variables)
        frame.slots.update(slots)
        _keep_names(frame, ran[0])
        return spec

    def train(self, call: Call, frame: Frame, batch: PyTree, rows: int) -> EstimatorSpec:
        scale = 1 / len(self.devices) if self.mean_loss else 1.0
        separate = isinstance(self.placement, SeparatePlacement)  # it sums the gradients where the variables are
        ran: list[Frame] = []

        def tower(start: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            averaged: list[bool] = []

            def average(denominator: jax.Array) -> jax.Array:
                averaged.append(True)
                return cross_tower_mean(denominator)

            inside = _tower_frame(frame, start, first=0, average_denominator=average)
            outcome, after = run(call, inside, batch, take_gradients=True, loss_scale=scale, transform=self.transform)
            ran.append(after)
            if num_towers() > 1:
                _check_optimizers(outcome.spec.train_op)
                check_rows(outcome.spec, rows // num_towers())
            steps = accumulate_steps(outcome.spec.train_op)
            if steps > 1:  # what ran so far is not used, and left out of the compiled program
                outcome = accumulated(
                    call,
                    batch,
                    inside.fresh(key=start[2]),
                    steps,
                    like=outcome,
                    aggregation=after.aggregation,
                    averaged=bool(averaged),
                    loss_scale=scale,
                    mean_loss=self.mean_loss,
                    transform=self.transform,
                )
            flags = non_finite(outcome.spec.train_op) if self.on_nan else None
            same, own = apart(outcome.spec, scale)
            gradients = None
            if separate:
                same, gradients = without_gradients(same)
            same, written = summed(same, outcome, start[0], after.aggregation, self.ops)
            return (same, written), (own, gradients, flags)

        start = _start(frame)
        (same, written), (own, gradients, flags) = tower_map(tower, self.devices)(start, batch)
        if separate:
            same = with_gradients(same, gradients)
        elif isinstance(self.placement, Mirrored):
            same = dataclasses.replace(same, train_op=self.placement.whole(same.train_op))
        _keep_names(frame, ran[-1])
        frame.assigned.update(written)
        if flags is not None:
            same = dataclasses.replace(same, train_op=marked(same.train_op, flags))
        return together(same, merged(own, len(self.devices)))

    def evaluate(self, call: Call, frame: Frame, batch: PyTree, rows: int) -> EstimatorSpec:
        """Every example counts once: what does not divide by the towers is one more, smaller call."""
        towers = len(self.devices)
        even = rows - rows % towers
        parts = [(self.devices, 0, even), (self.devices[:1], even, rows - even)]
        parts = [part for part in parts if part[2]]

        def run_part(part: Any, denominators: list[jax.Array] | None) -> PyTree:
            devices, begin, size = part
            mine = jax.tree.map(lambda x: take_rows(x, begin, size), batch, is_leaf=is_sparse)
            seen: list[jax.Array] = []

            def average(denominator: jax.Array) -> jax.Array:
                seen.append(denominator)
                if denominators is None:
                    return cross_tower_mean(denominator)
                # So that losses weighted by rows add up to the sum over all divided by this.
                return denominators[len(seen) - 1] * (size / len(devices) / rows)

            def tower(start: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
                inside = _tower_frame(frame, start, first=begin, average_denominator=average)
                scale = 1 / len(devices) if self.mean_loss else 1.0
                outcome, after = run(
                    call,
                    inside,
                    batch,
                    take_gradients=False,
                    loss_scale=scale,
                    denominators=seen,
                    transform=self.transform,
                )
                ran.append(after)
                if towers > 1:
                    check_rows(outcome.spec, size // len(devices))
                same, own = apart(outcome.spec, scale)
                return total([], (same, seen), self.ops)[1], own

            (same, totals), own = tower_map(tower, devices)(_start(frame), mine)
            return same, totals, merged(own, len(devices))

        ran: list[Frame] = []
        results = [run_part(part, None) for part in parts]
        if len(parts) > 1 and results[0][1]:
            totals = [sum(both[1:], both[0]) for both in zip(*(r[1] for r in results), strict=True)]
            results = [run_part(part, totals) for part in parts]
        _keep_names(frame, ran[-1])
        specs = [together(same, own) for same, _, own in results]
        return self._join(specs, [size for _, _, size in parts])

    def _join(self, specs: list[EstimatorSpec], sizes: list[int]) -> EstimatorSpec:
        if len(specs) == 1:
            return specs[0]
        first, second = specs
        loss = first.loss
        if loss is not None:
            weights = [size / sum(sizes) if self.mean_loss else 1.0 for size in sizes]
            loss = first.loss * weights[0] + second.loss * weights[1]
        return dataclasses.replace(
            first,
            loss=loss,
            predictions=join([first.predictions, second.predictions]),
            export_outputs=join([first.export_outputs, second.export_outputs]),
            eval_metric_ops=join_metrics([first.eval_metric_ops, second.eval_metric_ops]),
            reported=merge_reports([first.reported, second.reported], sizes),
        )


def _start(frame: Frame) -> PyTree:
    return frame.variables, frame.slots, frame.key, frame.global_step


def _tower_frame(frame: Frame, start: PyTree, first: int, **changes: Any) -> Frame:
    """The frame of one tower; `first` keeps its random keys apart from those of another call's towers."""
    variables, slots, key, global_step = start
    if num_towers() > 1 or first:
        key = jax.random.fold_in(key, tower_index() + first)
    return frame.fresh(
        variables=variables,
        slots=slots,
        key=key,
        global_step=global_step,
        **({"average_denominator": cross_tower_mean} | changes),
    )


def _check_optimizers(train_op: TrainOp | None) -> None:
    for update in train_op.updates if train_op else ():
        if not isinstance(update.optimizer, TowerOptimizer):
            raise ValueError(
                "Please wrap optimizers with TowerOptimizer in order to use replicate_model_fn with multiple "
                f"`devices`. Got the plain optimizer {update.optimizer.get_name()!r}; write "
                "`TowerOptimizer(optimizer).minimize(loss)`."
            )


def _taken(spec: EstimatorSpec) -> TrainOp | None:
    """A train_op without pending losses: the towers take the gradients, not the run around them."""
    if not has_pending(spec.train_op):
        return spec.train_op
    return TrainOp(tuple(dataclasses.replace(u, gradients={}) for u in spec.train_op.updates))


def _keep_names(frame: Frame, ran: Frame) -> None:
    """Lets the run around the towers know the variables and optimizers they had."""
    frame.trainable.update(ran.trainable)
    frame.aggregation.update(ran.aggregation)
    frame.slot_owners.update(ran.slot_owners)
    frame.rng_calls = ran.rng_calls
