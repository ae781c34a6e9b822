"""One head of several tasks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._export_output import DEFAULT_SIGNATURE, ExportOutput, PredictOutput
from estimator.core._typing import Features
from estimator.heads._head import (
    Head,
    Labels,
    Logits,
    Predictions,
    RegularizationLosses,
    add_regularization,
    batch_mean,
)
from estimator.heads._one_task import checked_selection
from estimator.losses import Reduction
from estimator.metrics import Metric
from estimator.metrics._positives import Count


class MultiHead(Head):
    """Several heads as one: the loss is the sum of theirs; predictions and metrics are joined.

    >>> import estimator as est, jax.numpy as jnp
    >>> heads = [est.RegressionHead(name="height"), est.BinaryClassHead(name="adult")]
    >>> head = est.MultiHead(heads, head_weights=[2.0, 1.0])
    >>> logits = jnp.array([[1.5, 0.0]])
    >>> labels = {"height": jnp.array([1.0]), "adult": jnp.array([1])}
    >>> print(f"{head.loss(labels, logits):.4f}")  # 2 * 0.25 + 0.6931
    1.1931
    >>> list(head.predictions(logits))[:2]
    [('height', 'predictions'), ('adult', 'logits')]

    Logits are a dict by the names of the heads, or an array that is split along its last dimension. Labels are a dict
    by the names of the heads. The keys of predictions are pairs (head, key). Metrics are all metrics of the heads, and
    the loss of each as loss/<head>: the mean over the examples of the batches' losses, or, for SUM, the sum over all
    examples. The default signature of exports is the first head; each head has a signature of its name.

    Args:
      heads: heads with different names.
      head_weights: the factors of the heads' losses; default: 1.

    Raises:
      ValueError: there are no heads, a name is missing or not unique, the number of weights differs, or the heads
        reduce their losses in different ways.
    """

    def __init__(self, heads: Sequence[Head], head_weights: Sequence[float] | None = None) -> None:
        if not heads:
            raise ValueError(f"Must specify heads. Given: {heads!r}.")
        for head in heads:
            if not isinstance(head, Head):
                raise TypeError(f"`MultiHead` takes heads such as `est.RegressionHead(name=...)`; got {head!r}.")
            if head.name is None:
                raise ValueError(f"All given heads must have name specified. Given: {head!r}.")
        names = [str(head.name) for head in heads]
        if len(set(names)) < len(names):
            raise ValueError(f"All given heads must have different names. Given: {names}.")
        if head_weights is not None and len(head_weights) != len(heads):
            raise ValueError(
                f"heads and head_weights must have the same size. Given len(heads): {len(heads)}. "
                f"Given len(head_weights): {len(head_weights)}."
            )
        reductions = [str(head.loss_reduction) for head in heads]
        if len(set(reductions)) > 1:
            raise ValueError(f"The loss_reduction must be the same for different heads. Given: {reductions}.")
        self._heads = dict(zip(names, heads, strict=True))
        self._head_weights = tuple([1.0] * len(heads) if head_weights is None else head_weights)
        self.name = "_".join(names)
        self.logits_dimension = sum(head.logits_dimension for head in heads)
        self.loss_reduction = heads[0].loss_reduction

    def loss(
        self,
        labels: Labels,
        logits: Logits,
        features: Features = None,
        mode: str | None = None,
        regularization_losses: RegularizationLosses = None,
    ) -> jax.Array:
        by_head = self._split(logits)
        losses = self._losses(self._checked_labels(labels), by_head, features, mode).values()
        # As in TensorFlow, each loss is multiplied by its weight after the reduction of its head.
        weighted = [loss * weight for loss, weight in zip(losses, self._head_weights, strict=True)]
        return add_regularization(sum(weighted[1:], weighted[0]), regularization_losses)

    def predictions(self, logits: Logits, keys: Sequence[Hashable] | None = None) -> Predictions:
        by_head = self._split(logits)
        predictions = {
            (name, key): value
            for name, head in self._heads.items()
            for key, value in head.predictions(by_head[name]).items()
        }
        return predictions if keys is None else checked_selection(predictions, keys)

    def metrics(
        self,
        labels: Labels,
        logits: Logits,
        features: Features = None,
        regularization_losses: RegularizationLosses = None,
    ) -> dict[str, Metric]:
        by_head = self._split(logits)
        rows = jnp.shape(next(iter(by_head.values())))[0]
        metrics: dict[str, Metric] = {}
        by_name = self._checked_labels(labels)
        for name, loss in self._losses(by_name, by_head, features, None).items():
            is_sum = self.loss_reduction == Reduction.SUM
            # Over batches, sums are added, and means are weighted by their rows.
            metrics[f"loss/{name}"] = Count(loss) if is_sum else batch_mean(loss, rows)
            metrics |= self._heads[name].metrics(by_name[name], by_head[name], features)
        return metrics | self._regularization_metric(rows, regularization_losses)

    def export_outputs(self, predictions: Predictions) -> dict[str, ExportOutput]:
        outputs: dict[str, ExportOutput] = {}
        for name, head in self._heads.items():
            # With the head's own keys, for which it exports the same as without a MultiHead.
            own = {key: value for (owner, key), value in predictions.items() if owner == name}
            for signature, output in head.export_outputs(own).items():
                if signature == DEFAULT_SIGNATURE:
                    # As in TensorFlow, the default is the first head's.
                    outputs.setdefault(DEFAULT_SIGNATURE, output)
                    outputs[name] = output
                else:
                    outputs[f"{name}/{signature}"] = output
        named = {f"{name}/{key}": value for (name, key), value in predictions.items()}
        return outputs | {"predict": PredictOutput(named)}

    def _show(
        self,
        loss: jax.Array,
        labels: Labels,
        logits: Logits,
        features: Features,
        regularization_losses: RegularizationLosses,
    ) -> None:
        del loss  # the model's, which `train` shows
        by_head = self._split(logits)
        for name, own in self._losses(self._checked_labels(labels), by_head, features, None).items():
            self._show_loss(f"loss/{name}", own)
        self._show_regularization("regularization_loss", regularization_losses)

    def _losses(
        self, labels: Mapping[str, Labels], logits: Mapping[str, ArrayLike], features: Features, mode: str | None
    ) -> dict[str, jax.Array]:
        return {n: head.loss(labels[n], logits[n], features, mode) for n, head in self._heads.items()}

    def _checked_labels(self, labels: Labels) -> Mapping[str, Labels]:
        if not isinstance(labels, Mapping):
            raise ValueError(
                f"labels must be a dict by the names of the heads, {list(self._heads)}. Given: "
                f"{'None' if labels is None else type(labels).__name__}."
            )
        self._check_names("labels", labels)
        return labels

    def _split(self, logits: Logits) -> Mapping[str, ArrayLike]:
        if isinstance(logits, Mapping):
            self._check_names("logits", logits)
            return logits
        logits = jnp.asarray(logits)
        dimensions = [head.logits_dimension for head in self._heads.values()]
        if logits.ndim < 2 or logits.shape[-1] != self.logits_dimension:
            raise ValueError(
                f"Could not split logits of shape {logits.shape} among the heads with individual logits dimensions: "
                f"{dimensions}. The last dimension of the logits should equal {self.logits_dimension}."
            )
        # `jnp.split` takes the ends of all parts except the last one.
        ends = [sum(dimensions[: i + 1]) for i in range(len(dimensions) - 1)]
        return dict(zip(self._heads, jnp.split(logits, ends, axis=-1), strict=True))

    def _check_names(self, what: str, by_name: Mapping[str, object]) -> None:
        missing = [name for name in self._heads if name not in by_name]
        if missing:
            raise ValueError(f"{what} has missing values for head(s): {missing}; it has {sorted(by_name)}.")
