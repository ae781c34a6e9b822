"""Reads what a training step does off its trace and its compiled program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding

import estimator as est
from estimator import EstimatorSpec
from estimator.core._batch import abstract, check_batch
from estimator.core._bcoo import is_sparse, pad_sparse
from estimator.core._estimator_spec import loss_of
from estimator.core._frame import current_frame
from estimator.core._model_fn import ModelFn, bind
from estimator.core._placement import Halves, OffTowerPlacement, Placement
from estimator.loop._context import RunContext
from estimator.loop._programs import Programs
from estimator.loop._steps_per_loop import choose, steps_between_looks
from estimator.runtime._program import Program
from estimator.steps._model_info import ModelInfo
from estimator.steps._transform import Model
from estimator.typing import Features, Labels, PyTree
from replicate._replicate_model_fn import ReplicatedTwice, replicate_model_fn
from replicate.explain._explanation import Explanation, Home, Memory, Split, Transfer
from replicate.explain._hlo import collectives
from replicate.runner._micro_batches import accumulate_steps


def explain(
    model_fn: ModelFn,
    features: Features,
    labels: Labels = None,
    *,
    params: Any = None,
    config: Any = None,
    bandwidth: float = 10e9,
    latency: float = 10e-6,
    **options: Any,
) -> Explanation:
    """Explains what one training step of a model_fn does on its towers, without running it.

    The step is the one of `Estimator.train`: it leaves the state and the loss. It is traced and compiled for the
    devices of the towers, with nothing computed on them.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> from replicate import TowerOptimizer, explain
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (3,), initializer=jax.nn.initializers.zeros)
    ...     loss = jnp.mean((features @ w - labels) ** 2)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.adam(0.1)).minimize(loss))
    >>> batch = jax.ShapeDtypeStruct((8, 3), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
    >>> explanation = explain(model_fn, *batch, devices=["cpu:0", "cpu:1"])
    >>> # The gradient, the loss of the step and the loss of the optimizer:
    >>> [(each.kind, each.dtype, each.bytes, each.participants) for each in explanation.collectives]
    [('all-reduce', 'float32', 20, 2)]
    >>> [(home.name, home.where) for home in explanation.variables]
    [('w', 'whole on each of 2 devices')]

    Args:
      model_fn: a model_fn, replicated or not; if not, it is wrapped in `replicate_model_fn`.
      features, labels: a batch, or `jax.ShapeDtypeStruct`s instead of its arrays.
      params, config: passed on to the model_fn.
      bandwidth: of the way between two devices, in bytes per second, to estimate the time of communication.
      latency: of a message between two devices, in seconds.
      **options: of `replicate_model_fn`, such as `devices` and `variable_distribution`.

    Raises:
      ValueError: the model_fn is replicated already, and options were given; the towers are on several processes; the
        bandwidth is not positive, or the latency negative; or what `replicate_model_fn` says.
    """
    if not bandwidth > 0 or not latency >= 0:
        raise ValueError(
            "`explain` needs a positive bandwidth, in bytes per second, and a latency of 0 or more, in seconds; got "
            f"bandwidth={bandwidth!r} and latency={latency!r}."
        )
    name = getattr(model_fn, "__name__", str(model_fn))
    rows = check_batch(features, labels)
    # Padded as the input of a run pads them: a program is compiled for a number of stored entries.
    features, labels = jax.tree.map(abstract, pad_sparse((features, labels)))
    if not _is_replicated(model_fn, params, config, features, labels):
        model_fn = replicate_model_fn(model_fn, **options)
    elif options:
        raise ValueError(
            f"`explain` got {', '.join(options)} for a model_fn that is replicated already, which says itself what "
            "they are. Leave them out, or give the model_fn that is not replicated."
        )
    # Filled while the step is traced, the only time when the train_op can be seen.
    notes: dict[str, int] = {}
    model = est.transform(_observe(model_fn, params, config, notes))
    info = model.info(features, labels)
    if info.placement.spans_processes:
        raise ValueError(
            "`explain` reads the program of one process, and these towers are on several. Call it in one process "
            'with as many devices, such as CPU devices that `jax.config.update("jax_num_cpu_devices", N)` makes.'
        )
    # The placement of the batch has the towers' devices, in their order.
    sharding = info.placement.batch(rows)
    assert sharding is not None  # a replicated model_fn says where its batches go
    devices = sharding.mesh.devices if isinstance(sharding, NamedSharding) else np.array(list(sharding.device_set))
    towers = devices.reshape(len(devices), -1)  # [towers, devices of a tower]
    if devices.size == 1:
        towers = towers.repeat(info.placement.towers_per_process, axis=0)
    programs, state = Programs(model, features, labels), model.abstract_init(features, labels)
    if info.is_one_program:
        step = programs.trace_step(state)
    else:
        step = _trace_towers(model, info, state, features, labels)
    compiled = step.lower().compile()
    homes = jax.tree.broadcast(info.shardings, info.like)
    return Explanation(
        name=name,
        towers=tuple(", ".join(map(str, tower)) for tower in towers),
        placement=info.placement.describe(),
        rows=rows,
        micro_batches=notes["micro_batches"],
        batch=_splits(features, labels, len(towers)),
        collectives=collectives(compiled.as_text() or ""),
        transfers=() if info.is_one_program else _transfers(step, state, homes, list(devices.flat)),
        variables=_homes(info.like.variables, homes.variables),
        slots=_homes(info.like.slots, homes.slots),
        steps_per_program=_steps_per_program(programs, config),
        flops=(compiled.cost_analysis() or {}).get("flops"),
        memory=_memory(compiled),
        bandwidth=bandwidth,
        latency=latency,
    )


def _is_replicated(model_fn: ModelFn, params: object, config: object, features: Features, labels: Labels) -> bool:
    """Finds out by an abstract run in a tower, where `TOWER_AXIS` is bound for a model_fn that needs it."""
    in_tower = replicate_model_fn(model_fn, devices=jax.local_devices()[:1])
    try:
        est.transform(in_tower, params, config).info(features, labels)
    # Only a replicated model_fn raises this error in a tower; any other error is the model_fn's own.
    except ReplicatedTwice:
        return True
    return False


class _TowersAlone(OffTowerPlacement):
    """A placement of variables on devices of their own, whose step is only the part that runs in the towers: it leaves
    what they send to the variables' devices instead of the state.

    A step of such a placement takes several programs: one in the towers, and one on each device of variables. `explain`
    reads the first, which has all collectives, and finds the copies around it from its arguments and results.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def describe(self) -> str:
        return self._placement.describe()

    def state(self, like: Any) -> Any:
        return self._placement.state(like)

    def state_to_read(self, like: Any) -> Any:
        return self._placement.state_to_read(like)

    def batch(self, rows: int) -> Any:
        return self._placement.batch(rows)

    def split_step(self, halves: Halves, like: Any, donate: bool) -> Callable[..., Any]:
        def compute(state: Any, features: Features, labels: Labels) -> Any:
            spec, gradients, assigned = halves.compute(state, features, labels)
            return (gradients.by_slots, assigned), spec

        return compute

    def split_read(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return step


def _observe(model_fn: ModelFn, params: object, config: object, notes: dict[str, int]) -> ModelFn:
    """Makes a model_fn that notes what its train_op says, and puts `_TowersAlone` in place."""
    bound = bind(model_fn, params, config)

    def observe(features: Features, labels: Labels, mode: est.ModeKeys) -> EstimatorSpec:
        spec = bound(features, labels, mode)
        notes["micro_batches"] = accumulate_steps(spec.train_op)
        frame = current_frame("a model_fn to explain")
        if frame.placement is not None and not frame.placement.is_one_program:
            frame.placement = _TowersAlone(frame.placement)
        return spec

    return observe


def _trace_towers(
    model: Model, info: ModelInfo, state: est.State, features: Features, labels: Labels
) -> jax.stages.Traced:
    """The part of a step that `_TowersAlone` leaves, for a state that the towers have."""

    def step(state: est.State, features: Features, labels: Labels) -> tuple[Any, jax.Array]:
        sent, spec = model.train_step(state, features, labels)
        return sent, loss_of(spec)

    # One program takes arrays of one set of devices: the state is where the towers read it, after the copies.
    near = jax.tree.broadcast(info.placement.state_to_read(info.like), state)
    state = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, near)
    return Program(step).trace(state, features, labels)


def _steps_per_program(programs: Programs, config: object) -> int:
    looks = steps_between_looks(getattr(config, "log_step_count_steps", None))
    return choose("auto", programs, (), RunContext(est.ModeKeys.TRAIN), looks).bounds().room


def _splits(features: Features, labels: Labels, towers: int) -> tuple[Split, ...]:
    splits = []
    leaves = jax.tree_util.tree_leaves_with_path({"features": features, "labels": labels}, is_leaf=is_sparse)
    for path, leaf in leaves:
        tower_shape = (leaf.shape[0] // towers, *leaf.shape[1:])
        splits.append(Split(_name_of(path), str(leaf.dtype), leaf.shape, tower_shape, is_sparse(leaf)))
    return tuple(splits)


def _homes(arrays: PyTree, shardings: PyTree) -> tuple[Home, ...]:
    """Variables in the order in which they were created, as dicts keep it."""
    homes = []
    for name, tree in arrays.items():
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings[name]), strict=True):
            shard = sharding.shard_shape(leaf.shape)
            cut = [axis for axis, (part, whole) in enumerate(zip(shard, leaf.shape, strict=True)) if part < whole]
            devices = sorted(sharding.device_set, key=lambda device: device.id)
            pieces = math.prod(leaf.shape) // max(1, math.prod(shard))
            size = math.prod(shard) * leaf.dtype.itemsize
            homes.append(
                Home(
                    name="/".join(filter(None, (name, _name_of(path)))),
                    dtype=str(leaf.dtype),
                    shape=leaf.shape,
                    bytes=_bytes(leaf),
                    bytes_by_device={str(device): size for device in devices},
                    cut_axis=cut[0] if cut else None,
                    copies=len(devices) // pieces,
                )
            )
    return tuple(homes)


def _transfers(
    step: jax.stages.Traced, state: est.State, homes: est.State, devices: list[jax.Device]
) -> tuple[Transfer, ...]:
    """The part of the state that towers read, and their gradients: stacked, a part from each tower."""
    # A variable that the step does not read is not sent.
    jaxpr = step.jaxpr.jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    transfers = []
    leaves = jax.tree_util.tree_leaves_with_path(state)
    # Not strict: after the state, `used` has the features and labels.
    for (path, leaf), source, is_read in zip(leaves, jax.tree.leaves(homes), used, strict=False):
        [device] = source.device_set
        # The variable's own device needs no copy.
        copies = len(set(devices) - {device})
        if is_read and copies:
            name = _SCALARS.get(path[0].name) or _name_of(path[1:])
            transfers.append(Transfer(name, True, copies * _bytes(leaf), str(device)))
    (gradients, assigned), _ = step.out_info
    for own in gradients.values():
        for name, tree in own.items():
            [device] = jax.tree.leaves(homes.variables[name])[0].device_set
            others = len(set(devices) - {device})
            # The gradients are stacked, one part for each tower; a tower on the variable's own device sends nothing.
            size = sum(map(_bytes, jax.tree.leaves(tree))) * others // len(devices)
            transfers.append(Transfer(f"gradient of {name}", False, size, str(device)))
    for name, tree in assigned.items():
        [device] = jax.tree.leaves(homes.variables[name])[0].device_set
        # Assigned values are the same in all towers, and are fetched from the first one.
        if device not in devices[:1]:
            transfers.append(
                Transfer(f"new value of {name}", False, sum(map(_bytes, jax.tree.leaves(tree))), str(device))
            )
    return tuple(each for each in transfers if each.bytes)


_SCALARS = {"global_step": "global_step", "key": "the random key"}
"""The fields of a State that have no names of variables or slots."""


def _bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _name_of(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _memory(compiled: jax.stages.Compiled) -> Memory | None:
    usage = compiled.memory_analysis()
    if usage is None:
        return None
    return Memory(
        usage.argument_size_in_bytes,
        usage.output_size_in_bytes,
        usage.alias_size_in_bytes,
        usage.temp_size_in_bytes,
    )
