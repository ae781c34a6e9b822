"""Synchronising once per block of steps: what users ask for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from estimator.typing import PyTree
from replicate.towers._map import num_towers


class BmufState(NamedTuple):
    """The state of `bmuf`.

    Attributes:
      velocity: how far the last block moved the global variables, by name.
    """

    velocity: PyTree


def bmuf(
    block_learning_rate: float = 1.0, block_momentum: float | None = None, nesterov: bool = False
) -> optax.GradientTransformation:
    """Blockwise model-update filtering, as an outer optimizer for `BlockSync`.

    With g the global variables, a the average over towers, v the velocity, m and r the momentum and the learning rate:
    `v' = m v + r (a - g)` and `g' = g + v'`, with `nesterov` `g' = g + v' - m (v' - v)`. These are the rules of
    Caffe2's `data_parallel_model.Parallelize_BMUF`.

    >>> outer = bmuf(block_learning_rate=0.5, block_momentum=0.8)
    >>> state = outer.init({"w": jnp.zeros(())})
    >>> for _ in range(2):  # the average is at 2, the global variable at 0
    ...     updates, state = outer.update({"w": jnp.float32(0 - 2)}, state)
    ...     print(updates["w"])
    1.0
    1.8

    Args:
      block_learning_rate: r.
      block_momentum: m; by default 1 - 1 / towers.
      nesterov: whether to take a Nesterov step, to where the velocity is about to lead.

    Raises:
      ValueError: a number is out of range; the message names it.
    """
    if not (math.isfinite(block_learning_rate) and block_learning_rate > 0):
        raise ValueError(f"`bmuf` needs a finite block_learning_rate > 0; got {block_learning_rate!r}.")
    if block_momentum is not None and not 0 <= block_momentum < 1:
        raise ValueError(
            f"`bmuf` needs 0 <= block_momentum < 1, or None, which is 1 - 1 / towers; got {block_momentum!r}."
        )

    def init(params: PyTree) -> BmufState:
        return BmufState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: PyTree, state: BmufState, params: PyTree = None) -> tuple[PyTree, BmufState]:
        # Looked up here, within the towers: when the transformation is made, nobody knows how many there will be.
        momentum = 1 - 1 / num_towers() if block_momentum is None else block_momentum

        def move(difference: jax.Array, velocity: jax.Array) -> jax.Array:
            return momentum * velocity - block_learning_rate * difference

        velocity = jax.tree.map(move, updates, state.velocity)
        if not nesterov:
            return velocity, BmufState(velocity)
        ahead = jax.tree.map(lambda new, old: new - momentum * (new - old), velocity, state.velocity)
        return ahead, BmufState(velocity)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class BlockSync:
    """Lets towers train on their own for a block of steps, and takes their mean at its end.

    For `replicate_model_fn(..., block_sync=...)`. Each tower has its own copy of the trainable variables and of the
    slots of its optimizers, and takes steps with the gradients of its own rows, without any communication. After
    `block_steps` steps the copies are averaged, and an outer optimizer takes the pseudo-gradient, the global variables
    less the average, and moves the global variables. All towers continue from those. `state.variables` are the global
    ones, which evaluation, prediction, export and checkpoints use; they change at the end of a block. What is done to
    them by hand counts from the start of the next block if it is done between two, and is lost within one.

    With `block_steps=1`, `optax.sgd` in the model_fn and `optax.sgd(1.0)` as the outer optimizer this is synchronous
    training, for any loss reduction: a tower trains as if its rows were the whole batch. (Caffe2 divided its gradient
    by the number of towers: a learning rate of 0.4 on 4 devices there is 0.1 here.)

    The loss of a step is the loss of all towers, each with its own copy, merged as in synchronous training except
    that a weighted mean is taken over each tower's own weights. It is merged after the last step
    of a program (`train_loop`, `RunConfig.steps_per_loop`), not in each, since that would be communication.

    The state between two synchronisations is in `state.slots["block_sync"]`, a `BlockSyncState`, and in the slots of
    the optimizers, whose arrays have the towers as their first dimension. A checkpoint has all of it, so that a run
    resumes within a block as if it had not stopped; to continue with another number of towers, start from its variables
    (`warm_start_from`).

    >>> import estimator as est
    >>> from replicate import TowerOptimizer, replicate_model_fn
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.zeros)
    ...     loss = jnp.mean((w - features) ** 2)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.25)).minimize(loss))
    >>> block_sync = BlockSync(block_steps=2, outer_optimizer=optax.sgd(1.0))
    >>> model = est.transform(replicate_model_fn(model_fn, devices=["cpu:0", "cpu:1"], block_sync=block_sync))
    >>> x = jnp.array([4.0, 8.0])  # a row for each tower
    >>> state = model.init(jax.random.key(0), x)
    >>> state, spec = model.train_step(state, x)
    >>> print(spec.loss, state.variables["w"], state.slots["block_sync"].copies["w"])
    40.0 0.0 [2. 4.]
    >>> state, spec = model.train_step(state, x)  # to 3 and 6
    >>> print(spec.loss, state.variables["w"], state.slots["block_sync"].copies["w"])
    10.0 4.5 [4.5 4.5]

    Args:
      block_steps: the number of steps between synchronisations; or a function of the step at which a block begins, an
        int32 scalar, that returns the number of its steps, such as `lambda step: jnp.where(step < 1000, 1, 16)`.
      outer_optimizer: an optax transformation: `bmuf(...)`, by default; `optax.sgd(0.7, momentum=0.9, nesterov=True)`,
        known as DiLoCo; `optax.sgd(1.0)`, which is local SGD. Its state is mirrored.
      warmup_steps: after the first N steps all towers get the variables of tower 0, instead of an average.
        Blocks are counted from there.
      reset_slots: whether the slots of the optimizers that belong to variables, such as momenta, are initialized again
        at the end of each block, but not after the warm-up, together with what counts their steps. Learning rates and
        schedules continue.
      sync: names of variables that the model_fn assigns, to be merged at each synchronisation as in synchronous
        training: by their `aggregation` (or as `est.sync_variables` says), and if they are only added to, by the sum
        of what was added. Those not listed stay each tower's own; the global value is tower 0's. Also names of slots,
        as `Estimator.get_variable_names` shows them, or the beginnings of such names: "optimizer/0/trace/w", or
        "optimizer/0/trace" for all momenta. These are averaged at the end of each block.
      sync_slots: "mean" takes the mean of all slots that hold floats for a variable, such as momenta, at the end of
        each block. By default they stay each tower's own.

    Raises:
      TypeError: the outer optimizer is not an optax transformation, or `sync` not a list of names; or later,
        `block_steps` is a function that returns something else than an integer.
      ValueError: a number is not an integer in its range, or `sync_slots` is neither None nor "mean", or was given
        together with `reset_slots`.
    """

    block_steps: int | Callable[[jax.Array], Any]
    outer_optimizer: optax.GradientTransformation = dataclasses.field(default_factory=bmuf)
    warmup_steps: int = 0
    reset_slots: bool = False
    sync: Sequence[str] = ()
    sync_slots: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("block_steps", 1), ("warmup_steps", 0)):
            value = getattr(self, name)
            if name == "block_steps" and callable(value):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"`BlockSync` needs {name} to be an integer of at least {least}; got {value!r}.")
        if not all(callable(getattr(self.outer_optimizer, name, None)) for name in ("init", "update")):
            raise TypeError(
                "`BlockSync` takes an optax transformation as outer_optimizer, such as `bmuf()` or "
                f"`optax.sgd(1.0)`; got {self.outer_optimizer!r}."
            )
        if isinstance(self.sync, str) or not all(isinstance(name, str) for name in self.sync):
            raise TypeError(f"`BlockSync` takes a list of names of variables as sync; got {self.sync!r}.")
        object.__setattr__(self, "sync", tuple(self.sync))
        if self.sync_slots not in (None, "mean") or (self.sync_slots and self.reset_slots):
            raise ValueError(
                f'`BlockSync` takes None or "mean" as sync_slots, and with reset_slots only None; got '
                f"sync_slots={self.sync_slots!r} and reset_slots={self.reset_slots}."
            )

    def ends_block(self, steps: jax.Array, since: jax.Array) -> jax.Array:
        """Returns whether towers are averaged after `steps` steps, `since` of them since the last average.

        A state that comes in mid-block from a model with longer blocks is averaged at its next step.
        """
        at_the_end_of_a_block = since >= self._length(steps - since)
        if not self.warmup_steps:
            return at_the_end_of_a_block
        return (steps > self.warmup_steps) & at_the_end_of_a_block | (steps == self.warmup_steps)

    def _length(self, step: jax.Array) -> Any:
        """The number of steps of the block that begins at a step."""
        if not callable(self.block_steps):
            return self.block_steps
        length = self.block_steps(step)
        if jnp.shape(length) or not jnp.issubdtype(jnp.result_type(length), jnp.integer):
            raise TypeError(
                "The function that `BlockSync` got as block_steps must return an integer, the number of steps of the "
                f"block that begins at the given step; got {length!r}."
            )
        return length
