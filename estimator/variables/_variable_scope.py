"""Scopes: prefixes of variables' names, and defaults for all variables within."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from estimator.core._frame import Frame, ScopeDefaults, current_frame, innermost_frame
from estimator.core._record import unique_name
from estimator.core._typing import PyTree


class _AutoReuse(enum.Enum):
    AUTO_REUSE = "auto_reuse"


AUTO_REUSE: Final = _AutoReuse.AUTO_REUSE
"""Value of `variable_scope(reuse=...)`: create a variable the first time, return it from then on."""

Reuse = bool | _AutoReuse | None


@dataclasses.dataclass
class VariableScope:
    """The `scope` of `with est.variable_scope(...) as scope`, to enter it again by `est.variable_scope(scope)`.

    Attributes:
      name: its full name; "" at the top.
      reuse: whether variables in it are shared; see `variable_scope`.
      defaults: what its variables have in common.
    """

    name: str
    reuse: Reuse
    defaults: ScopeDefaults

    def reuse_variables(self) -> None:
        """Requires that variables exist already, from here to the end of the scope."""
        self.reuse = True
        frame = innermost_frame()
        if frame is not None and "/".join(frame.scope) == self.name:
            frame.reuse = True


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | VariableScope | None,
    default_name: str | None = None,
    values: Any = None,
    *,
    reuse: Reuse = None,
    initializer: Callable[..., PyTree] | None = None,
    regularizer: Callable[[PyTree], Any] | None = None,
    custom_getter: Callable[..., PyTree] | None = None,
) -> Iterator[VariableScope]:
    """Prefixes the names of the variables got in the block with a name and a "/".

    The names of summaries and records in it are prefixed too: by `name`, and by `name_1`, `name_2` ... where the scope
    is entered again, as in TensorFlow.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     with est.variable_scope("layer") as scope:
    ...         w = est.get_variable("w", (1, 2))
    ...     with est.variable_scope(scope, reuse=True):
    ...         features = features @ est.get_variable("w", (1, 2))
    ...     for _ in range(2):
    ...         with est.variable_scope(None, default_name="block", initializer=jax.nn.initializers.ones):
    ...             features = features @ est.get_variable("w", (2, 2))
    ...     return est.EstimatorSpec(mode, predictions=features)
    >>> model = est.transform(model_fn)
    >>> sorted(model.init(jax.random.key(0), jnp.ones((3, 1)), mode="infer").variables)
    ['block/w', 'block_1/w', 'layer/w']

    Args:
      name_or_scope: the prefix; scopes nest. Or a scope, as `with ... as scope` gives it: then the names in the block
        are as if it had not ended, wherever the block stands. If None, the `default_name`.
      default_name: where there is no name: the prefix, made unique in the enclosing scope (`block`, `block_1`, ...).
        A scope opened again by its name counts from the beginning, so that the names in it are the same.
      values: without effect; TensorFlow checked that they are of one graph.
      reuse: True: variables must exist in this run already; `AUTO_REUSE`: they may. If None, as in the scope around.
        As in TensorFlow, an inner scope does not end an outer one's reuse.
      initializer, regularizer: of `get_variable`, where it is called without; a regularizer of trainable variables,
        while TensorFlow's loss would have `moving_mean` of a batch norm too.
      custom_getter: `fn(getter, name, **arguments)`, called in place of getting a variable; what it returns is what
        `get_variable` and the layers see. `name` is the full name, and `getter(name, **arguments)` gets the variable;
        in a scope within another one that has a getter too, it calls that.

    Raises:
      ValueError: there is neither a name nor a default name, or only a default name where variables are reused.
      TypeError: the name, or an argument, is of another type.
      RuntimeError: no model_fn is running.
    """
    name = name_or_scope
    if default_name is not None and not isinstance(default_name, str):
        raise TypeError(
            f"`est.variable_scope` takes a default name second, a string; got {default_name!r}. Write `reuse=`."
        )
    if isinstance(values, bool | _AutoReuse):
        raise TypeError(f"`est.variable_scope` takes `values` third, without effect; got {values!r}. Write `reuse=`.")
    if not isinstance(name, VariableScope) and not (name or default_name and name is None):
        raise ValueError(
            f"`est.variable_scope` needs a non-empty name; got {name!r}. Or give None, and a `default_name`."
        )
    if not isinstance(name, str | VariableScope | None):
        raise TypeError(f"`est.variable_scope` needs a name, or a scope; got {name!r}.")
    for given, what in ((initializer, "initializer"), (regularizer, "regularizer"), (custom_getter, "custom_getter")):
        if given is not None and not callable(given):
            raise TypeError(f"`est.variable_scope({name!r})` needs a function as `{what}`; got {given!r}.")
    frame = current_frame("est.variable_scope")
    before = frame.scope, frame.reuse, frame.scope_defaults, frame.name_scope
    if isinstance(name, VariableScope):
        path, reuse, defaults = tuple(filter(None, [name.name])), reuse or name.reuse, name.defaults
    else:
        path = (*frame.scope, name or _make_unique(frame, str(default_name), reuse))
        # As in TensorFlow, sub-scopes inherit reuse, even with `reuse=False`.
        reuse, defaults = reuse or frame.reuse, frame.scope_defaults
    defaults = ScopeDefaults(
        initializer or defaults.initializer,
        regularizer or defaults.regularizer,
        _nest_getters(custom_getter, defaults.custom_getter),
    )
    scope = VariableScope("/".join(path), reuse, defaults)
    uses = frame.declared.scope_uses
    uses[scope.name] += 1
    at_start = Counter(uses)
    frame.scope, frame.reuse, frame.scope_defaults = path, reuse, defaults
    own = name.name.rpartition("/")[2] if isinstance(name, VariableScope) else name or str(default_name)
    if own:  # as in TensorFlow: a scope entered by its object has its last part, within the scopes around the block
        prefix = unique_name("/".join((*frame.name_scope, own)), frame.declared.name_scopes)
        frame.declared.name_scopes.add(prefix)
        frame.name_scope = (prefix,)
    try:
        yield scope
    finally:
        frame.scope, frame.reuse, frame.scope_defaults, frame.name_scope = before
        for inner in [each for each in uses if each.startswith(f"{scope.name}/")]:
            # Names within a scope count from the beginning when it is opened by name again; a scope that is entered
            # by its object leaves the counts as they were.
            del uses[inner]
        if isinstance(name, VariableScope):
            uses.update({inner: count for inner, count in at_start.items() if inner not in uses})


def get_variable_scope() -> VariableScope:
    """The innermost open scope, as `with est.variable_scope(...) as scope` gives it.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     with est.variable_scope("outer"), est.variable_scope("inner"):
    ...         print(est.get_variable_scope().name)
    ...     return est.EstimatorSpec(mode, predictions=features)
    >>> _ = est.transform(model_fn).init(jax.random.key(0), jnp.ones(3), mode="infer")
    outer/inner
    """
    frame = current_frame("est.get_variable_scope")
    return VariableScope("/".join(frame.scope), frame.reuse, frame.scope_defaults)


def _make_unique(frame: Frame, default_name: str, reuse: Reuse) -> str:
    if reuse is True:
        raise ValueError(
            f"`est.variable_scope(None, {default_name!r}, reuse=True)` cannot know which of the scopes so named is to "
            "be reused. Give the name."
        )
    full = "/".join((*frame.scope, default_name))
    # Closed scopes count, too: a second layer of the same kind has its own variables.
    number, uses = 0, frame.declared.scope_uses
    while uses[full if number == 0 else f"{full}_{number}"] > 0:
        number += 1
    return default_name if number == 0 else f"{default_name}_{number}"


def _nest_getters(
    inner: Callable[..., PyTree] | None, outer: Callable[..., PyTree] | None
) -> Callable[..., PyTree] | None:
    """Makes a getter for variables that calls the inner one, whose own getter calls the outer one."""
    if inner is None or outer is None:
        return inner or outer

    def get_nested(getter: Callable[..., PyTree], *args: Any, **arguments: Any) -> PyTree:
        def through_outer(*args: Any, **arguments: Any) -> PyTree:
            return outer(getter, *args, **arguments)

        return inner(through_outer, *args, **arguments)

    return get_nested
