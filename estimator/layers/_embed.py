"""Embeddings of integers."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from estimator.core._frame import current_frame
from estimator.layers._layer import Initializer, Regularizer, check_count, layer_scope
from estimator.sparse._embedding import embedding_lookup
from estimator.variables._lookups import Lookups
from estimator.variables._policy import cast_to_compute
from estimator.variables._variable_scope import Reuse
from estimator.variables._variables import get_variable


def embed(
    ids: ArrayLike,
    vocab_size: int,
    embed_dim: int,
    initializer: Initializer = None,
    regularizer: Regularizer = None,
    trainable: bool = True,
    scope: str | None = None,
    reuse: Reuse = None,
) -> jax.Array:
    """A row of a table for each id, as `tf.contrib.layers.embed_sequence`, whose table is `EmbedSequence/embeddings`.

    The gradient has only the rows that were looked up (see `est.embedding_lookup`), unless the table has a regularizer
    that a loss contains, or is not trained, or a `custom_getter` gets it.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     return est.EstimatorSpec(mode, predictions=est.layers.embed(features, vocab_size=100, embed_dim=8))
    >>> model, ids = est.transform(model_fn), jnp.array([[3, 5, 7]])
    >>> state = model.init(jax.random.key(0), ids, mode="infer")
    >>> print(state.variables["EmbedSequence/embeddings"].shape, model.predict_step(state, ids).predictions.shape)
    (100, 8) (1, 3, 8)

    Args:
      ids: integers of any shape. A negative one is padding, whose row is zeros.
      vocab_size, embed_dim: the shape of the table.
      initializer, regularizer, trainable, reuse: as in `dense`.
      scope: as `name` in `dense`; TensorFlow calls it so here.

    Raises:
      TypeError: the ids are not integers.
      ValueError: an argument is wrong, or there is a layer of that name already.
    """
    frame = current_frame("est.layers.embed")
    shape = (check_count("embed", "vocab_size", vocab_size), check_count("embed", "embed_dim", embed_dim))
    with layer_scope("embed", scope, reuse, "EmbedSequence"):
        full = "/".join((*frame.scope, "embeddings"))
        is_new = full not in frame.declared.trainable
        if not is_new and not frame.reuse:
            get_variable("embeddings", shape)  # says that the name is taken
        if is_new:
            table = get_variable("embeddings", shape, None, initializer, trainable, regularizer=regularizer)
            # `get_variable` notes a read of the whole table, which would make its gradient dense. Only a custom_getter
            # has seen the table here; if there is one, lookups read what it returned.
            if frame.scope_defaults.custom_getter is not None:
                frame.notes.get(Lookups).by_getter[full] = table
            elif trainable:
                frame.notes.get(Lookups).read_whole.discard(full)
        return cast_to_compute(embedding_lookup("embeddings", ids))
