"""Variables with one copy, on devices of their own: what a parameter server was.

A program runs on one set of devices, so a training step is three kinds of programs with transfers between them: the
towers compute gradients; each variable's device sums the gradients of its variables; each applies them. Which arrays of
the others a program needs is read off its equations, so that an optimizer which mixes variables, such as clipping by
the global norm, gets the sums of all of them and is as exact as on one device.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import SingleDeviceSharding
from jax.tree_util import DictKey

from estimator import EstimatorSpec, State, TrainOp
from estimator.replication import Halves, OffTowerPlacement, Placement, Program
from estimator.typing import Features, Gradients, Labels, PyTree, Read, Shardings, Step, Tree
from replicate.placement._transfer import Packed, joined_parcels, packed_by_source, transfer
from replicate.towers._collectives import is_slices, join_slices


class ParameterServer(OffTowerPlacement):
    """One copy of each variable and its slots: the n-th variable on device n modulo their number.

    Args:
      towers: where batches go, and the variables while the model_fn reads them.
      devices: of the variables. What belongs to no variable, such as step counts, is on the first.
    """

    def __init__(self, towers: Placement, devices: Sequence[jax.Device]) -> None:
        super().__init__(devices)
        self._towers = towers
        self.towers_per_process = towers.towers_per_process
        self._homes = [SingleDeviceSharding(device) for device in devices]

    @property
    def devices(self) -> Sequence[jax.Device]:
        return self._towers.devices

    def state(self, like: State) -> Shardings:
        homes = {name: self._homes[n % len(self._homes)] for n, name in enumerate(like.variables)}

        def home(path: Any, leaf: Any) -> SingleDeviceSharding:
            # (variables, name, ...), or (slots, optimizer, ..., name, ...) in optax's states
            names = path[1:2] if path[0].name == "variables" else path[2:]
            matches = [homes[key.key] for key in names if isinstance(key, DictKey) and key.key in homes]
            return matches[0] if matches else self._homes[0]

        return jax.tree_util.tree_map_with_path(home, like)

    def batch(self, rows: int) -> jax.sharding.Sharding | None:
        return self._towers.batch(rows)

    def state_to_read(self, like: State) -> Shardings:
        return self._towers.state(like)

    def split_read(self, step: Read[Tree]) -> Read[Tree]:
        programs: dict[Any, tuple[Callable[..., Any], list[int], Any]] = {}

        def call(state: State, features: Features, labels: Labels) -> Any:
            args = (state, features, labels)
            if _is_traced(args):  # within the caller's own program, whose state is near already
                return step(*args)
            leaves, structure = jax.tree.flatten(args)
            # What was pruned fits one structure and these shapes, as a program of `jax.jit` does.
            kind = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            if kind not in programs:
                traced, shape = _trace(step, args)
                run, taken = _prune(traced, [True] * len(traced.jaxpr.outvars))
                programs[kind] = Program(_of_parcels(run)), taken, jax.tree.structure(shape)
            program, taken, result = programs[kind]
            of_state = len(jax.tree.leaves(state))
            parcels = packed_by_source([leaves[i] for i in taken if i < of_state], self.state_to_read(state))
            batch = [leaves[i] for i in taken if i >= of_state]
            return jax.tree.unflatten(result, program(parcels, *batch))

        return call

    def split_step(self, halves: Halves, like: State, donate: bool) -> Step:
        shardings = self.state(like)
        homes = {name: jax.tree.leaves(home)[0] for name, home in shardings.variables.items()}

        def compute(*args: Any) -> tuple[EstimatorSpec, PyTree, PyTree, list[Packed]]:
            spec, gradients, assigned = halves.compute(*args)
            parcels = [_packed_for(home, homes, gradients.by_slots) for home in self._homes]
            return spec, dataclasses.replace(gradients, by_slots={}), assigned, parcels

        def apply(state: State, train_op: TrainOp, bare: PyTree, assigned: PyTree, parcels: list[Packed]) -> State:
            gradients = dataclasses.replace(bare, by_slots=_sum_towers(parcels))
            return halves.apply(state, train_op, gradients, assigned)

        read = self.split_read(compute)
        updates: dict[Any, _Update] = {}

        def several(state: State, features: Features, labels: Labels) -> tuple[State, EstimatorSpec]:
            if _is_traced((state, features, labels)):
                raise ValueError(
                    "A training step whose variables have devices of their own is several programs, and was called "
                    "within another one (`jax.jit`, `jax.lax.scan`). Call it outside, or use "
                    "VariableDistribution.MIRRORED or SHARDED."
                )
            spec, *rest = read(state, features, labels)
            step = spec.train_op, *rest
            kind = tuple(leaf.shape for leaf in jax.tree.leaves(step))  # slices are as many as the batch has ids
            if kind not in updates:
                updates[kind] = _Update(apply, (state, *step), shardings, donate)
            after = updates[kind](state, *step)
            spec = halves.finish(spec, rest[0].is_allowed(), after)
            # The report may have arrays of the state, which the next step may donate.
            return after, spec.replace_unchecked(train_op=spec.train_op.copy_values())

        return several


def _packed_for(home: Any, homes: dict[str, Any], gradients: dict[str, Gradients]) -> Packed:
    """The gradients, of shape `[towers, ...]`, of the variables that are at home there."""
    mine = {slots: {n: g for n, g in own.items() if homes[n] == home} for slots, own in gradients.items()}
    return Packed.of(mine, lead=1)


def _sum_towers(parcels: list[Packed]) -> dict[str, Gradients]:
    """The sums over towers of each update; the slices of a sparse gradient are concatenated, tower after tower."""

    def total(x: Any) -> Any:
        return join_slices(x) if is_slices(x) else x.sum(0, dtype=x.dtype)

    of_homes = [jax.tree.map(total, packed.tree(), is_leaf=is_slices) for packed in parcels]
    return {slots: {n: g for trees in of_homes for n, g in trees[slots].items()} for slots in of_homes[0]}


def _of_parcels(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays, given the first of them in parcels."""

    def program(parcels: list[Packed], *rest: jax.Array) -> Any:
        arrays = joined_parcels([packed.tree() for packed in parcels])
        return run(*(arrays[i] for i in range(len(arrays))), *rest)

    return program


class _Update:
    """A function `(state, *others) -> state` as one program for each device of the state.

    Args:
      apply: a pure function.
      args: what it will be called with, to trace it.
      shardings: of the state, each a single device.
      donate: whether the memory of the state may be reused, less its key, which a caller may hold in other forms.
    """

    def __init__(self, apply: Callable[..., State], args: tuple[Any, ...], shardings: State, donate: bool) -> None:
        self._structure = jax.tree.structure(args[0])
        self._homes = jax.tree.leaves(shardings)
        traced, _ = _trace(apply, args)
        parts = [(home, *_prune(traced, [h == home for h in self._homes])) for home in dict.fromkeys(self._homes)]
        uses = collections.Counter(i for _, _, taken in parts for i in taken)
        keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(args[0])]
        self._programs = []
        for home, run, taken in parts:
            # An array that two programs read must not be donated by the first one.
            only_here = {i for i, h in enumerate(self._homes) if h == home and uses[i] == 1 and not keys[i]}
            donated = [position for position, i in enumerate(taken) if i in only_here] if donate else []
            self._programs.append((home, Program(run, donated), taken))

    def __call__(self, *args: Any) -> State:
        leaves = jax.tree.leaves(args)
        # All transfers start before the first program waits for one.
        ready = [transfer([leaves[i] for i in taken], home) for home, _, taken in self._programs]
        new: list[Any] = [None] * len(self._homes)
        for (home, program, _), mine in zip(self._programs, ready, strict=True):
            outputs = iter(program(*mine))
            for i, h in enumerate(self._homes):
                if h == home:
                    new[i] = next(outputs)
        return jax.tree.unflatten(self._structure, new)


def _trace(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The equations of `fn` as a function of the arrays in `args`, and the shapes of what it returns."""
    leaves, structure = jax.tree.flatten(args)
    return jax.make_jaxpr(lambda *leaves: fn(*jax.tree.unflatten(structure, leaves)), return_shape=True)(*leaves)


def _prune(traced: Any, outputs: list[bool]) -> tuple[Callable[..., Any], list[int]]:
    """The function that gives some of the outputs, and the numbers of the arguments that it takes."""
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # imports Pallas

    equations, needed = dce_jaxpr(traced.jaxpr, outputs)
    run = jaxpr_as_fun(ClosedJaxpr(equations, traced.consts))
    return run, [i for i, is_needed in enumerate(needed) if is_needed]


def _is_traced(args: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
