"""Rows of a warm-started variable that follow the strings of a vocabulary."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class VocabInfo(NamedTuple):
    """The vocabularies by which the rows of a variable are moved in a warm start, as `tf.estimator.VocabInfo`.

    A string that both vocabularies have takes its old row; other strings and the rows of `num_oov_buckets` get the
    values of `backup_initializer`. A vocabulary is a text file with a string on each line.

    >>> import estimator as est
    >>> info = est.VocabInfo("new.txt", 5000, num_oov_buckets=1, old_vocab="old.txt")
    >>> settings = est.WarmStartSettings("/tmp/old", var_name_to_vocab_info={"words/embeddings": info})

    Attributes:
      new_vocab: the path of the vocabulary of the model.
      new_vocab_size: how many of its strings are used, the first ones. With `num_oov_buckets` the variable's size.
      num_oov_buckets: how many rows follow for strings out of the vocabulary.
      old_vocab: the path of the vocabulary of the checkpoint.
      old_vocab_size: how many of its strings were used; -1: all.
      backup_initializer: `fn(key, shape, dtype)`, such as `jax.nn.initializers.normal(0.1)`; zeros if None.
      axis: the dimension that counts the strings: 0, or 1 for the columns of a kernel.
    """

    new_vocab: str
    new_vocab_size: int
    num_oov_buckets: int
    old_vocab: str
    old_vocab_size: int = -1
    backup_initializer: Callable[..., Any] | None = None
    axis: int = 0


def resize(info: VocabInfo, there: Any, here: Any) -> jax.ShapeDtypeStruct:
    """The struct of a variable in the source, with the size that it has by the new vocabulary."""
    shape = list(there.shape)
    if info.axis < min(len(shape), len(here.shape)):
        shape[info.axis] = here.shape[info.axis]
    return jax.ShapeDtypeStruct(tuple(shape), there.dtype)


def move_rows(info: VocabInfo, name: str, old: Any, here: jax.Array, key: jax.Array) -> jax.Array:
    """The value of a variable: the rows of `old` by the strings of the vocabularies.

    Args:
      info: the vocabularies.
      name: the variable's, for errors and for what its initial values follow from.
      old: its value in the source.
      here: an array of the shape and dtype in the model.
      key: of the model.
    """
    size, count = here.shape[info.axis] if 0 <= info.axis < here.ndim else 0, info.new_vocab_size + info.num_oov_buckets
    words, old_words = _words(info.new_vocab)[: info.new_vocab_size], _words(info.old_vocab)
    if info.old_vocab_size != -1:
        old_words = old_words[: info.old_vocab_size]
    if size != count or len(words) != info.new_vocab_size:
        raise ValueError(
            f"`VocabInfo` of {name!r} has new_vocab_size={info.new_vocab_size} and num_oov_buckets="
            f"{info.num_oov_buckets}: then {info.new_vocab!r} must have as many strings, and the variable {count} rows "
            f"in dimension {info.axis}; got {len(words)} strings and shape {here.shape}."
        )
    if len(old_words) < info.old_vocab_size or len(old_words) > old.shape[info.axis]:
        raise ValueError(
            f"`VocabInfo` of {name!r}: {info.old_vocab!r} has {len(old_words)} strings, with old_vocab_size="
            f"{info.old_vocab_size}, but the variable has {old.shape[info.axis]} rows in the source. Give the size "
            "that was used."
        )
    # Backwards, so that the first of equal strings counts.
    places = {word: place for place, word in reversed([*enumerate(old_words)])}
    # -1: a new string, or a bucket for unknown ones, has no row in the source and gets its value from `start`.
    rows = np.array([places.get(word, -1) for word in words] + [-1] * info.num_oov_buckets)
    if info.backup_initializer is None:
        start = jnp.zeros(here.shape, here.dtype)
    else:
        # By the name, as in `get_variable`: two variables must not start with the same random rows.
        key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        start = info.backup_initializer(key, here.shape, here.dtype)
    known = np.expand_dims(rows >= 0, [axis for axis in range(here.ndim) if axis != info.axis])
    return jnp.where(known, np.take(np.asarray(old), np.maximum(rows, 0), info.axis).astype(here.dtype), start)


def _words(path: str) -> list[str]:
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()
