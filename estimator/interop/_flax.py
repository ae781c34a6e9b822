"""Flax modules in a model_fn; `docs/how_to/from_flax_haiku_equinox.md` shows how other libraries fit into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from estimator.core._frame import Frame, current_frame
from estimator.interop._flax_base import FlaxModule
from estimator.variables._aggregation import VariableAggregation
from estimator.variables._partitioning import Partition
from estimator.variables._variables import list_names


class _Modules(dict[str, FlaxModule]):
    """The modules that `flax_module` returned in one run, by full name."""


def flax_module(
    module: Any,
    name: str,
    rngs: Sequence[str] | None = None,
    aggregation: VariableAggregation | None = None,
    partition: Partition = None,
) -> FlaxModule:
    """A Flax module to call in this run of the model_fn; its arrays are variables.

    >>> import estimator as est, flax.linen as nn, jax, jax.numpy as jnp
    >>> class Network(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, train):
    ...         x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
    ...         return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))
    >>> def model_fn(features, labels, mode):
    ...     net = est.flax_module(Network(), "net")
    ...     return est.EstimatorSpec(mode, predictions=net(features, train=mode == est.ModeKeys.TRAIN))
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), jnp.ones((3, 2)), mode="infer")
    >>> list(state.variables), sorted(state.variables["net"])
    (['net', 'net/batch_stats'], ['BatchNorm_0', 'Dense_0', 'Dense_1'])

    The parameters are one trainable variable, a pytree, with the name of the module. Every other collection, such as
    batch statistics, is a variable that is not trained, "net/batch_stats". A call updates it in TRAIN, and leaves it as
    it is in EVAL and PREDICT. `nn.BatchNorm(axis_name=TOWER_AXIS)` sees the rows of all towers. Values that a module
    `sow`s into "intermediates" are dropped.

    The first call in a run initializes a Linen module, with the arguments of that call. `train`, `deterministic` and
    the like are ordinary arguments: pass them, as above.

    An NNX model holds its own arrays, so `module` is a function that creates it. Each run creates the model again and
    fills it from the variables, in training mode (`model.train()`) in TRAIN, otherwise in evaluation mode. Its random
    streams get new keys in each call and are not saved:

    >>> from flax import nnx
    >>> def model_fn(features, labels, mode):
    ...     net = est.flax_module(lambda rngs: nnx.Linear(2, 1, rngs=rngs), "net")
    ...     return est.EstimatorSpec(mode, predictions=net(features))
    >>> model = est.transform(model_fn)
    >>> sorted(model.init(jax.random.key(0), jnp.ones((3, 2)), mode="infer").variables["net"])
    ['bias', 'kernel']

    Under an `est.Policy` modules of both kinds compute in its dtype, unless they have a `dtype` of their own.

    The module may be called several times: the calls share the variables, and later calls see the updates of earlier
    ones. `net(x, method="encode")` calls another method. TensorFlow's counterpart was `model_to_estimator`.

    Args:
      module: a `flax.linen.Module`, or a function with an argument `rngs`, an `nnx.Rngs`, that returns an
        `nnx.Module`; the class of an NNX module may be one.
      name: the name of the variables, prefixed by the scopes around the call. No other variable's name may begin with
        it and a "/".
      rngs: the streams of a Linen module that get a key from `make_rng` in each call; by default "dropout".
      aggregation: how collections that several towers update are merged; by default floats are averaged, and the first
        tower's values are kept of all others. Required for a collection with both.
      partition: how the parameters are sharded over the devices of a tower, if towers have several: a function of each
        of their arrays, as for `est.get_variable`, such as
        `lambda x: (None, "part") if x.ndim == 2 else None`. Other collections are not cut.

    Raises:
      TypeError: `module` is something else, or the partition is not a function.
      ValueError: the name is taken in this run (in a scope with `reuse` it may be, by an equal module).
      ImportError: Flax is not installed.
    """
    frame = current_frame("est.flax_module")
    if partition is not None and not callable(partition):
        raise TypeError(
            f"`est.flax_module` needs a function of an array as `partition`; got {partition!r}. Write "
            '`lambda x: (None, "part") if x.ndim == 2 else None`.'
        )
    if not isinstance(name, str) or not name:
        raise ValueError(f"`est.flax_module` needs a non-empty name; got {name!r}.")
    try:
        from estimator.interop import _flax_linen, _flax_nnx
    except ImportError as e:
        raise ImportError(f"`est.flax_module` needs Flax: `pip install flax`. To import it raised: {e}") from e
    full = "/".join((*frame.scope, name))
    modules = frame.notes.get(_Modules)
    if full in modules:
        return _reuse_module(frame, full, module)
    if frame.reuse is True:
        raise ValueError(
            f"`est.flax_module({full!r})` is in a scope with `reuse=True`, but no such module was created in this run, "
            f"only {list_names(modules)}. Create it first, or use `reuse=est.AUTO_REUSE`."
        )
    for other in modules:
        if f"{full}/".startswith(f"{other}/") or f"{other}/".startswith(f"{full}/"):
            raise ValueError(
                f"`est.flax_module` got the name {full!r} beside {other!r}: one is a prefix of the other, so that "
                "their variables would have the same names. Choose another name."
            )
    flax_module: FlaxModule
    if _flax_linen.is_module(module):
        # Flax does not say which random streams a module draws from; "dropout" is the usual one.
        streams = ("dropout",) if rngs is None else (rngs,) if isinstance(rngs, str) else tuple(rngs)
        flax_module = _flax_linen.LinenModule(frame, module, full, aggregation, partition, streams)
    else:
        _flax_nnx.check_factory(module)
        if rngs is not None:
            raise ValueError(
                f"`est.flax_module` got rngs={rngs!r} for an NNX model, which has its own random streams: all of them "
                "get new keys. Leave `rngs` out."
            )
        flax_module = _flax_nnx.NNXModule(frame, module, full, aggregation, partition)
    modules[full] = flax_module
    return flax_module


def _reuse_module(frame: Frame, full: str, module: Any) -> FlaxModule:
    earlier = frame.notes.get(_Modules)[full]
    if not frame.reuse:
        raise ValueError(
            f"`est.flax_module` got the name {full!r} twice in one run of the model_fn. To share its variables, call "
            "what the first one returned again; otherwise choose another name."
        )
    # Linen's modules are dataclasses: equal modules create the same variables.
    if earlier.module != module:
        raise ValueError(
            f"`est.flax_module` got the name {full!r} twice in one run of the model_fn, for {module!r} and for "
            f"{earlier.module!r}. Only the same module can share its variables: choose another name."
        )
    return earlier
