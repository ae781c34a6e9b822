"""Optax transformations that may be given the looked-up rows of a table instead of the table."""

from __future__ import annotations

import enum
from collections.abc import Collection

import jax
import jax.numpy as jnp
import optax

from estimator.core._typing import Variables
from estimator.optim._parts import leaves


class RowRule(enum.Enum):
    """What becomes of a row; the values complete "since ..." in messages."""

    OWN_GRADIENT = "a row changes by its own gradient and momentum alone"
    ANY_STEP = "a row may change without a gradient of its own"
    WHOLE_TABLE = "it could not be shown that a row changes by its own gradient alone"


# `tests/sparse/test_row_wise.py` tries out on small tables whether all this is so.

# They leave a row without a gradient as it is, or, like `trace`, move it on by its momentum.
_OWN_GRADIENT = {
    "centralize",
    "clip",
    "identity",
    "reduce_on_plateau",
    "scale",
    "scale_by_rss",  # adagrad
    "scale_by_schedule",
    "scale_by_sign",
    "set_to_zero",
    "trace",
    "zero_nans",
}

# They do to a row what the transformations inside them do.
_WRAPPERS = {
    "apply_if_finite",
    "chain",
    "conditionally_mask",
    "conditionally_transform",
    "inject_hyperparams",
    "masked",
    "named_chain",
    "partition",
    "with_extra_args_support",
}

# They change a row by values of other rows, such as by a norm over all.
_WHOLE_TABLE = {
    "adaptive_grad_clip",
    "add_noise",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "dadapt_adamw",
    "differentially_private_aggregate",
    "flatten",
    "hutchinson_estimator_diag_hessian",
    "momo",
    "momo_adam",
    "normalize",
    "normalize_by_update_norm",
    "per_example_global_norm_clip",
    "per_example_layer_norm_clip",
    "sam",
    "scale_by_backtracking_linesearch",
    "scale_by_distance_over_gradients",
    "scale_by_dog",
    "scale_by_dowg",
    "scale_by_galore",
    "scale_by_lbfgs",
    "scale_by_muon",
    "scale_by_novograd",
    "scale_by_param_block_norm",
    "scale_by_param_block_rms",
    "scale_by_polyak",
    "scale_by_sm3",
    "scale_by_trust_ratio",
    "scale_by_zoom_linesearch",
}


# Transformations from elsewhere, and optax's wrappers of a function that the user passes.
_OF_USERS = {"", "stateless", "stateless_with_tree_map"}


def row_rule(
    transformation: optax.GradientTransformation,
    tables: Collection[str],
    slots: optax.OptState,
    params: Variables,
) -> RowRule:
    """What becomes of the rows of the variables `tables`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(slots):
        table = variable_of(path, params)
        if table is not None and table in tables and jnp.shape(leaf) != params[table].shape and jnp.size(leaf) > 1:
            return RowRule.WHOLE_TABLE  # A slot that cannot be cut by rows, such as the sums of optax.adafactor.
    makers = [[name for name in leaves(transformation, table, params) if name not in _WRAPPERS] for table in tables]
    if any(not _WHOLE_TABLE.isdisjoint(names) for names in makers):
        return RowRule.WHOLE_TABLE
    return RowRule.OWN_GRADIENT if all(map(_by_own_gradient, makers)) else RowRule.ANY_STEP


def has_unknown_parts(transformation: optax.GradientTransformation, tables: Collection[str], params: Variables) -> bool:
    """Whether something that is not optax's, such as a user's own transformation, is applied to one of the tables."""
    return any(not _OF_USERS.isdisjoint(leaves(transformation, table, params)) for table in tables)


def _by_own_gradient(makers: list[str]) -> bool:
    after_momentum = makers[makers.index("trace") :] if "trace" in makers else []
    return _OWN_GRADIENT.issuperset(makers) and "scale_by_rss" not in after_momentum  # which would sum the momentum


def variable_of(path: jax.tree_util.KeyPath, params: Variables) -> str | None:
    """The name of the variable that a leaf of an optax state belongs to."""
    keys = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    return next((key for key in keys if key in params), None)
