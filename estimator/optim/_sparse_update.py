"""Optimizers that change only the rows of a table that were looked up.

Where all that an optax transformation does to a row depends only on that row, it can be given the touched rows and
their slots instead of the table and its slots. A step then costs what the lookups cost, whatever the table's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging

from estimator.core._typing import PyTree, Variables
from estimator.optim._given_rate import GivenRate
from estimator.sparse._indexed_slices import IndexedSlices, sum_by_row

# For a CPU, XLA writes rows that may come again one after the other, which takes up to twice as long.
_ONCE: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False, "unique_indices": True}


class _Lazy(optax.GradientTransformationExtraArgs):
    """Marks a transformation that is to see touched rows only."""


class RowWise(optax.GradientTransformationExtraArgs):
    """A transformation that treats each row by itself, and is to see touched rows only."""


class TakesSparseGradients(optax.GradientTransformationExtraArgs):
    """A transformation whose update takes `sparse_gradients`, beside the same gradients as dense arrays."""


def takes_sparse_gradients(transformation: optax.GradientTransformation) -> bool:
    return isinstance(_of_some_rate(transformation), TakesSparseGradients)


def _of_some_rate(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    # Of which class a transformation is does not depend on its rate.
    return transformation.make(0.0) if isinstance(transformation, GivenRate) else transformation


def lazy(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transformation, which of the tables with a sparse gradient changes the looked-up rows only.

    For variables with a dense gradient it does what it does anyway, and its state is the same. It is to Adam what
    `LazyAdam` was in TensorFlow: the moments of a row decay when the row is looked up, not in every step.

    Without it a sparse gradient is dealt with by what the optimizer is:

    - `optax.sgd`, `optax.adagrad` and others that leave a row without a gradient as it is see the looked-up rows only,
      with the results that the dense gradient has; clipping by a norm of the gradients may come before;
    - `optax.sgd(momentum=...)` sees the looked-up rows only; the others do not move by their momentum, as in
      TensorFlow;
    - any other is given the dense gradient, and the log says so.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     rows = est.embedding_lookup("words", features, (1000, 2), initializer=jax.nn.initializers.ones)
    ...     loss = est.losses.mean_squared_error(labels, rows.sum(1))
    ...     train_op = est.Optimizer(est.lazy(optax.adam(0.5))).minimize(loss)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), jnp.array([3]), jnp.zeros(1))
    >>> for word in (3, 5):
    ...     state, _ = model.train_step(state, jnp.array([word]), jnp.zeros(1))
    >>> print(state.variables["words"][3].round(3), state.variables["words"][7])
    [0.5 0.5] [1. 1.]

    Args:
      transformation: row-wise: the update of a row of a table must depend only on that row, and on sums over gradients.
        If the jaxpr of the optimizer does not show that, the training step raises a ValueError. `est.lazy` goes around
        the whole of an `optax.chain`.
    """
    if not isinstance(transformation, optax.GradientTransformation):
        raise TypeError(
            f"`est.lazy` takes an optax.GradientTransformation such as `optax.adam(1e-3)`; got {transformation!r}."
        )
    return _Lazy(*optax.with_extra_args_support(transformation))


class TouchedRows:
    """The rows of tables that have a gradient, taken out of trees of variables and slots, and put back.

    Attributes:
      gradients: by table, the sum of the values of each touched row.
    """

    def __init__(self, gradients: Mapping[str, IndexedSlices], params: Variables) -> None:
        self._params = params
        self._shapes = {table: gradient.dense_shape for table, gradient in gradients.items()}
        self._indices: dict[str, jax.Array] = {}
        self.gradients: dict[str, jax.Array] = {}
        for table, gradient in gradients.items():
            self.gradients[table], self._indices[table] = sum_by_row(gradient)

    def take(self, tree: PyTree) -> PyTree:
        """The tree with the touched rows instead of each array of a table's shape."""
        return self._map(self._take, tree)

    def put(self, tree: PyTree, rows: PyTree) -> PyTree:
        """The tree with new rows, given in a tree as `take` returns it; other leaves are replaced by the new ones."""
        return self._map(self._put, tree, rows)

    def no_steps(self) -> Variables:
        """Updates of the rows that change no number when they are added, and no sign of a zero."""
        dtypes = {table: _at_least_float32(self._params[table]) for table in self._shapes}
        return {table: -jnp.zeros(self.gradients[table].shape, dtype) for table, dtype in dtypes.items()}

    def add(self, variables: Variables, changed: Variables) -> Variables:
        """The variables with updates added to the touched rows of tables; the others are replaced by the new ones."""

        def add(table: str, array: jax.Array, steps: jax.Array) -> jax.Array:
            steps = steps.astype(_at_least_float32(array))
            if steps.dtype == array.dtype:  # without a gather of the rows
                return array.at[self._indices[table]].add(steps, **_ONCE)
            return self._put(table, array, self._take(table, array).astype(steps.dtype) + steps)

        return self._map(add, variables, changed)

    def _take(self, table: str, array: jax.Array) -> jax.Array:
        # Rows that came again have indices beyond the table. Any row will do for them, since `_put` drops it.
        return array.at[self._indices[table]].get(mode="clip", wrap_negative_indices=False)

    def _put(self, table: str, array: jax.Array, rows: jax.Array) -> jax.Array:
        dtype = array.dtype
        # Bits, since on CPU devices XLA would convert the whole of a bfloat16 table to float32 and back.
        bits = jnp.dtype(f"uint{8 * dtype.itemsize}") if dtype.itemsize < 4 else dtype
        array, rows = (jax.lax.bitcast_convert_type(x, bits) for x in (array, rows.astype(dtype)))
        array = array.at[self._indices[table]].set(rows, **_ONCE)
        return jax.lax.bitcast_convert_type(array, dtype)

    def _map(self, fn: Callable[..., jax.Array], tree: PyTree, *rest: PyTree) -> PyTree:
        from estimator.optim._row_wise import variable_of

        def visit(path: jax.tree_util.KeyPath, *leaves: Any) -> Any:
            table = variable_of(path, self._params)
            is_table = table in self._shapes and jnp.shape(leaves[0]) == self._shapes[table]
            return fn(table, *leaves) if is_table else leaves[-1]

        return jax.tree_util.tree_map_with_path(visit, tree, *rest)


def _at_least_float32(x: jax.Array) -> jnp.dtype:
    return x.dtype if x.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def takes_rows(
    transformation: optax.GradientTransformation, name: str, tables: list[str], slots: optax.OptState, params: Variables
) -> bool:
    """Returns whether the optimizer `name` is to see only the touched rows of tables; logs it if not."""
    made = _of_some_rate(transformation)
    if isinstance(made, RowWise):
        return True
    from estimator.optim._row_wise import RowRule, row_rule

    is_lazy = isinstance(made, _Lazy)
    rule = row_rule(transformation, tables, slots, params, exact=is_lazy)
    if is_lazy and rule is RowRule.WHOLE_TABLE:
        raise ValueError(
            f"`est.lazy` needs a row-wise transformation, but for the one of the optimizer {name!r} "
            f"{rule.value}, as with `optax.scale_by_trust_ratio`. Leave `est.lazy` out to train {tables} by "
            "dense gradients, or change the gradients between `compute_gradients` and `apply_gradients`."
        )
    if is_lazy or rule is RowRule.OWN_GRADIENT:
        return True
    logging.info(
        "The optimizer %r gets the sparse gradients of %s as dense arrays, since %s; a step takes time by the "
        "size of the tables.%s",
        name,
        tables,
        rule.value,
        " Write `est.lazy(...)` around its transformation to change looked-up rows only, as "
        "`est.train.LazyAdamOptimizer` does."
        if rule is RowRule.ANY_STEP
        else "",
    )
    return False
