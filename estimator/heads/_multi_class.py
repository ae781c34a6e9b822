"""The head for more than two classes, one per example."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator import losses as losses_lib
from estimator import metrics as metrics_lib
from estimator.core._argument_checks import as_int
from estimator.core._export_output import ExportOutput
from estimator.heads._head import Predictions
from estimator.heads._one_task import (
    OneTaskHead,
    all_class_ids,
    check_encoded,
    checked_vocabulary,
    classification_outputs,
)
from estimator.losses import Reduction
from estimator.metrics import Metric
from estimator.variables._class_names import ClassNames


class MultiClassHead(OneTaskHead):
    """The head of a classifier for more than two classes; the loss is softmax cross entropy.

    >>> import estimator as est, jax.numpy as jnp
    >>> head = est.MultiClassHead(n_classes=3)
    >>> logits = jnp.array([[0.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    >>> print(f"{head.loss(jnp.array([2, 1]), logits):.4f}")  # (log 3 + 0.0134) / 2
    0.5560
    >>> sorted(head.predictions(logits))
    ['all_class_ids', 'class_ids', 'classes', 'logits', 'probabilities']

    Predictions: "logits", "probabilities" and "all_class_ids" of shape `(batch, n_classes)`, "class_ids" of shape
    `(batch, 1)`, and "classes" of that shape, strings as for `est.BinaryClassHead`. Metrics: average_loss, accuracy.

    Args:
      n_classes: more than 2; for two classes use `est.BinaryClassHead`.
      weight_column, label_vocabulary, loss_reduction, loss_fn, name: as for `est.BinaryClassHead`; the vocabulary has
        `n_classes` names.

    Labels are integers in `[0, n_classes)`, of shape `(batch,)` or `(batch, 1)`. The loss of other labels is NaN.
    """

    def __init__(
        self,
        n_classes: int,
        weight_column: str | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., jax.Array] | None = None,
        name: str | None = None,
    ) -> None:
        n_classes = as_int("MultiClassHead", "n_classes", n_classes)
        if n_classes <= 2:
            raise ValueError(f"n_classes must be > 2: {n_classes}. For two classes use `est.BinaryClassHead`.")
        super().__init__(n_classes, 1, 1, weight_column, loss_reduction, loss_fn, name)
        self._label_vocabulary = checked_vocabulary(label_vocabulary, n_classes)

    def _labels_of_kind(self, labels: jax.Array) -> jax.Array:
        check_encoded(self._kind, labels, self._label_vocabulary)
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            raise TypeError(
                f"Labels dtype should be integer. Instead got {labels.dtype}. `{self._kind}` takes the class of each "
                "example: write `labels.astype(np.int32)`."
            )
        return labels

    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        losses = losses_lib.sparse_softmax_cross_entropy(labels, logits, reduction=Reduction.NONE)
        # With a last dimension of 1, as weights have it.
        return losses[..., None]

    def _predictions(self, logits: jax.Array) -> Predictions:
        return {
            "logits": logits,
            "probabilities": jax.nn.softmax(logits),
            "class_ids": _class_ids(logits),
            "classes": ClassNames(_class_ids(logits), self._label_vocabulary),
            "all_class_ids": all_class_ids(logits, self.logits_dimension),
        }

    def _metrics(self, labels: jax.Array, logits: jax.Array, weights: ArrayLike) -> dict[str, Metric]:
        return {"accuracy": metrics_lib.accuracy(labels, _class_ids(logits), weights)}

    def export_outputs(self, predictions: Predictions) -> dict[str, ExportOutput]:
        return classification_outputs(predictions, self._label_vocabulary, self.logits_dimension)


def _class_ids(logits: jax.Array) -> jax.Array:
    return logits.argmax(axis=-1, keepdims=True).astype(jnp.int32)
