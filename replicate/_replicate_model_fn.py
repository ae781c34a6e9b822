"""Wraps a model_fn so that it runs on several devices at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from estimator import EstimatorSpec, ModeKeys, Reduction
from estimator.replication import ModelRun, NonFinitePolicy, Placement
from estimator.typing import Features, Forward, Labels, ModelFn
from replicate.block_sync._block_sync import BlockSync
from replicate.block_sync._runner import BlockSyncRunner, LocalCopies
from replicate.cross_tower_ops import AllReduce, CrossTowerOps, choose_the_best
from replicate.cross_tower_ops._all_reduce import OneByOne
from replicate.placement._distribution import VariableDistribution, place
from replicate.runner._base import Runner
from replicate.runner._runner import SyncRunner
from replicate.runner._tower_transform import checked_transform
from replicate.towers._devices import find_devices, in_towers_of, of_this_process
from replicate.towers._map import in_towers
from replicate.towers._split_batch import rows_of_tower


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
    block_sync: BlockSync | None = None,
    devices_per_tower: int = 1,
    check: bool = False,
) -> ModelFn:
    """A model_fn that runs the given one in a tower per device and merges what the towers return.

    It goes wherever a model_fn goes. Features and labels are split along their first dimension; each tower's loss is
    divided by the number of towers, unless the reduction is SUM; the gradients of all towers are summed, and the
    optimizers, wrapped in `TowerOptimizer`, run once on the sums; the losses are added, metrics merged, predictions
    concatenated in input order. The rules are `tf.contrib.estimator.replicate_model_fn`'s; here evaluation
    and prediction take batches of any size, and weighted means are exact. Sparse features
    (`jax.experimental.sparse.BCOO`) are split by rows too; each tower then goes through the entries of all rows,
    unless the rows are a batch dimension (`bcoo.update_layout(n_batch=1, on_inefficient=None)`).

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> from replicate import TowerOptimizer
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
      devices: one per tower: `jax.Device`s or names such as "/gpu:0", "cpu:1". None means all GPUs or TPU cores or, if
        there are none, all CPU devices; of several processes (`initialize_distributed`) the devices of all. Each
        process then gives its own rows of every batch. `["gpu:0"] * 4` runs four towers on one device, by `jax.vmap`,
        with the numbers of four devices, to test and debug; variables live on that device, whatever their distribution.
      variable_distribution: where the variables live, and where the gradients are summed.
      variable_device: the device of all variables, for SHARED_LOCAL_PARAMETER_SERVER. By default, as in TensorFlow, the
        tower's own device if there is one tower, else the first CPU device.
      on_nan: what to do about a step in which the gradient of a tower holds an inf or a NaN. If None, gradients are not
        checked. "skip": the step changes neither variables nor slots, is counted in the state
        (`est.skipped_steps(state)`), and training continues. "raise": `est.NonFiniteGradientError` names the step, the
        tower and the variable; a `train_step` of `est.transform` then waits for its result, an Estimator checks as
        often as it reads the losses, and a step compiled into an outer `jax.jit` can only skip.
      cross_tower_ops: how gradients, losses and whatever else is summed over towers, in training and evaluation; of
        `replicate.cross_tower_ops`. Sums that a model_fn takes itself, by `cross_tower_sum`, do not go through it.
      tower_transform: `fn(forward)`, which turns a tower's forward function into another one, whose gradients are
        taken: `est.checkpoint_segments`, which saves memory (`jax.checkpoint` with any policy is possible, but around a
        whole forward pass its peak stays), `jax.named_scope("tower")` for profiles, or one that runs it under
        `jax.default_matmul_precision("bfloat16")`. `forward(trained, rest, batch)` is pure: pytrees of arrays go in,
        what is differentiated first, and come out, the losses to differentiate first. It is one run of the model_fn,
        without the cross-tower reductions; each micro-batch of `accumulate_steps` has one. This holds in every mode
        except `init`.
      block_sync: towers train on their own for a block of steps and are averaged at its end, instead of summing
        gradients in each step.
      devices_per_tower: the number of neighbours in `devices` that make a tower, for models that do not fit on one
        device: `est.get_variable(..., partition=...)` cuts variables over them, and `est.spread` activations. Nothing
        else changes: k devices work on the rows of one tower. For MIRRORED variables, in one process.
      check: whether the first batch in TRAIN and in EVAL runs forward in one tower too, on the first device, and a
        loss, metric or prediction that differs is one warning in the log. It finds means taken by hand, since each
        tower takes its own; dropout differs too. It costs two forward passes, each compiled once, before the first
        step; the steps stay as they are. Of towers in several processes it compares nothing.

    Raises:
      TypeError: `cross_tower_ops`, `tower_transform` or `block_sync` is something else, what `tower_transform` returns
        is not a function, or `devices_per_tower` is not an integer.
      ValueError: the reduction is NONE, there are no such devices, they do not divide by `devices_per_tower`, or
        arguments were given that do not go together; or, while it runs, the batch does not divide by the towers
        (times `accumulate_steps`) in TRAIN, an optimizer is not wrapped in `TowerOptimizer`, or what
        `tower_transform` makes returns something else than the forward function.
    """
    transform = checked_transform(tower_transform)
    towers = in_towers_of(devices_per_tower, find_devices(devices, repeated=True))
    if Reduction(loss_reduction) == Reduction.NONE:
        raise ValueError(
            "Tower losses need to be reduced in some way, yet NONE reduction is specified. "
            "Use Reduction.SUM or one of the means."
        )
    if block_sync is not None:
        _check_block_sync(block_sync, variable_distribution, on_nan, devices_per_tower)

    def make_runner(devices: tuple[Any, ...]) -> Runner:
        placement = place(variable_distribution, devices, variable_device)
        make: Callable[..., Runner] = SyncRunner
        if block_sync is not None:
            placement = LocalCopies(devices, block_sync, Reduction(loss_reduction) != Reduction.SUM)
            make = functools.partial(BlockSyncRunner, block_sync=block_sync)
        return make(
            devices=devices,
            placement=placement,
            mean_loss=Reduction(loss_reduction) != Reduction.SUM,
            on_nan=None if on_nan is None else NonFinitePolicy(on_nan),
            ops=_checked_ops(cross_tower_ops, placement, devices, on_nan),
            transform=transform,
        )

    everywhere = make_runner(towers)
    # Each process predicts for itself: nothing of an example depends on the others, nor on how many they have.
    here = make_runner(of_this_process(towers)) if everywhere.placement.spans_processes else everywhere

    def replicated_model_fn(
        features: Features, labels: Labels, mode: str, params: Any = None, config: Any = None
    ) -> EstimatorSpec:
        caller = "a model_fn made by replicate_model_fn"
        run = ModelRun.begin(caller, model_fn, features, labels, mode, params, config)
        frame, mode = run.frame, ModeKeys(mode)
        trains = mode == ModeKeys.TRAIN and not frame.initializing and not frame.replica.forward_only
        # `explain` relies on this error to find out whether a model_fn is replicated.
        if in_towers() and not (trains and block_sync is not None):
            raise ReplicatedTwice(
                "`replicate_model_fn` was given a model_fn that is replicated already. Wrap it once. "
                "`RunConfig(train_distribute=...)` does so by itself."
            )
        runner = here if mode == ModeKeys.PREDICT else everywhere
        # What initializes has only the rows of this process.
        size = len(here.devices if frame.initializing else towers)
        if mode == ModeKeys.TRAIN and not in_towers():
            rows_of_tower(run.rows, size)
        frame.placement = runner.placement
        if check and len(towers) > 1 and mode != ModeKeys.PREDICT and not runner.placement.spans_processes:
            frame.compared_on = jax.tree.leaves(towers)[0]
        # What is exported, or compared with the towers, runs on one device, over which nothing can be cut.
        if not frame.replica.one_tower:
            own = runner.placement
            frame.replica = dataclasses.replace(frame.replica, parts=own.parts, shard=own.shard)
        if runner.on_nan is not None and mode == ModeKeys.TRAIN:
            runner.on_nan.guard_run(frame)

        if frame.initializing:
            return runner.initialize(run)
        if trains:
            return runner.train(run)
        if frame.replica.one_tower:
            runner = dataclasses.replace(runner, devices=towers[:1], placement=Placement())
        return runner.evaluate(run)

    return replicated_model_fn


def _check_block_sync(block_sync: Any, distribution: VariableDistribution, on_nan: str | None, size: int) -> None:
    if not isinstance(block_sync, BlockSync):
        raise TypeError(f"block_sync must be a `BlockSync`, such as `BlockSync(block_steps=16)`; got {block_sync!r}.")
    if VariableDistribution(distribution) != VariableDistribution.MIRRORED:
        raise ValueError(
            f"block_sync was given with variable_distribution={str(distribution)!r}. Towers that train on their own "
            "have their own copies of all variables: use VariableDistribution.MIRRORED, or leave out block_sync."
        )
    if on_nan is not None:
        raise ValueError(
            f"block_sync was given with on_nan={on_nan!r}, which keeps gradients that are not finite out of the sum "
            "over towers; within a block there is none. Leave out one of them, or use "
            "`optax.apply_if_finite(optimizer, max_consecutive_errors)` in each tower."
        )
    if size > 1:
        raise ValueError(
            f"block_sync was given with devices_per_tower={size}. Towers that train on their own have one device each, "
            "which holds a copy of all variables. Leave out one of them."
        )


def _checked_ops(
    given: CrossTowerOps | None, placement: Placement, devices: tuple[Any, ...], on_nan: str | None
) -> CrossTowerOps:
    if given is None:
        is_one_device = len(devices) > len(set(devices))
        return OneByOne() if placement.parts > 1 or is_one_device else choose_the_best(devices)
    if not isinstance(given, CrossTowerOps):
        raise TypeError(
            'cross_tower_ops must be an object of `replicate.cross_tower_ops`, such as `AllReduce("ring")`; got '
            f"{given!r}."
        )
    if placement.parts > 1:
        raise ValueError(
            f"cross_tower_ops was given, an {type(given).__name__}, with devices_per_tower={placement.parts}. Towers "
            "of several devices sum each array by itself, since packing would put together what is cut over the "
            "devices of a tower. Leave out one of them."
        )
    if not placement.is_one_program:
        raise ValueError(
            f"cross_tower_ops was given, an {type(given).__name__}, with a variable_distribution whose gradients are "
            "summed on the devices of the variables, not in the towers. Leave it out, or use "
            "VariableDistribution.MIRRORED or SHARDED."
        )
    # float16 ends at 65504; bfloat16 has about the range of float32.
    dtype = given.compress_dtype if isinstance(given, AllReduce) else None
    if on_nan is not None and dtype is not None and jnp.finfo(dtype).max < jnp.finfo(jnp.bfloat16).max:
        raise ValueError(
            f"on_nan={on_nan!r} was given with a cross_tower_ops that sums gradients in {dtype}. It looks at the "
            "gradients of each tower, but their sum may overflow. Use compress_dtype=jnp.bfloat16, or leave out one."
        )
    return given
