"""Random keys and the step counter of a run."""

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._frame import Frame, current_frame, current_trace, transformations_within
from estimator.runtime._transformations import find_repeating


def make_rng(name: str | None = None) -> jax.Array:
    """A fresh PRNG key: a different one at each call, step and tower, but the same in every run with the same seed.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     noise = jax.random.normal(est.make_rng("noise"), features.shape)
    ...     return est.EstimatorSpec(mode, predictions=features + noise)
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), jnp.ones(3), mode="infer")
    >>> first, again = (model.predict_step(state, jnp.ones(3)).predictions for _ in range(2))
    >>> bool((first == again).all())
    True

    In a function under `jax.checkpoint`, `jax.lax.cond` or `jax.jit` the key is of the first call: jax keeps what it
    has traced, and a second call with arguments of the same shapes repeats it, with the same key. A function that is
    called several times, or defined outside of the model_fn, is to be given its key as an argument.

    Args:
      name: keys of one name depend only on the number of calls with that name, so a call added elsewhere in
        the model_fn does not change them.

    Raises:
      TypeError: the name is not a string.
      ValueError: it was called in the body of a loop (`jax.lax.scan`, `map`, `while_loop`, `jax.vmap` ...), of which
        every iteration would get the same key, since jax traces a body once.
    """
    frame = current_frame("est.make_rng")
    if not isinstance(name, str | None):
        raise TypeError(
            f"`est.make_rng` takes a name, a string, or nothing; got {name!r}. The seed is `est.RunConfig(seed=...)`."
        )
    iteration = frame.notes.get(_Iteration)
    if iteration.trace is not None and iteration.trace == current_trace():
        return jax.random.fold_in(next_key(frame, name), iteration.number)
    loop = loop_around(frame)
    if loop is not None:
        call = "est.make_rng()" if name is None else f"est.make_rng({name!r})"
        raise ValueError(
            f"`{call}` was called in a function that `{loop}` runs many times, each time with the same key. Call it "
            "before, split the key by `jax.random.split(key, n)`, and let the loop go over the n keys; or fold the "
            "number of the iteration in, by `jax.random.fold_in(key, i)`."
        )
    return next_key(frame, name)


@dataclasses.dataclass
class _Iteration:
    """The loop of this library that a run is in: jax's trace of its body, and the number of the iteration."""

    trace: Any = None
    number: Any = None


def begin_loop() -> Callable[[jax.Array], contextlib.AbstractContextManager[None]]:
    """Lets `make_rng` work in the body of a loop that begins here: each iteration has keys of its own.

    Returns:
      The context for the loop's body, of the number of the iteration. In a loop within another one it has no effect,
      since the number of the outer one's iteration is not known.
    """
    frame = current_frame("est.make_rng")
    is_outermost = loop_around(frame) is None

    @contextlib.contextmanager
    def iterate(number: jax.Array) -> Iterator[None]:
        note = frame.notes.get(_Iteration)
        if is_outermost:
            note.trace, note.number = current_trace(), number
        try:
            yield
        finally:
            if is_outermost:
                note.trace = note.number = None

    return iterate


def loop_around(frame: Frame) -> str | None:
    """The loop of jax between the model_fn and the code that calls this: all its iterations get one key."""
    within = transformations_within(frame)
    return None if within is None else find_repeating(within)


def next_key(frame: Frame, name: str | None) -> jax.Array:
    """The key that `make_rng` returns, wherever it is called."""
    label = "" if name is None else name
    # `Frame.fresh` copies the counts, so that a pass which is repeated for its gradients draws the same keys.
    frame.declared.rng_calls[label] += 1
    return jax.random.fold_in(jax.random.fold_in(frame.key, name_hash(label)), frame.declared.rng_calls[label])


def global_step() -> jax.Array:
    """The number of training steps finished before this run: an int32 scalar. A step advances it by one."""
    return current_frame("est.global_step").global_step


def name_hash(name: str) -> np.uint32:
    """The same number for a name in every process, to make a key of its own from one PRNG key."""
    # Python's own `hash` of a string differs from process to process.
    return np.uint32(zlib.crc32(name.encode()))


def checked_key(key: Any) -> jax.Array:
    """A typed PRNG key, of a key of any kind."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    # `jax.random.PRNGKey` makes plain integers; `State.key` is typed.
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32:
        return jax.random.wrap_key_data(key)
    raise TypeError(f"`init` needs a PRNG key such as `jax.random.key(0)`; got {key!r}.")
