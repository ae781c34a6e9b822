"""The result of one run of a model_fn, and its contribution to the whole batch."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from estimator.core._estimator_spec import EstimatorSpec, train_op_of
from estimator.core._frame import Frame, Writes
from estimator.core._record import Rows
from estimator.core._typing import Gradients, Slots, Variables
from estimator.metrics._merge import merges_by_sum
from estimator.optim._apply_updates import StepGradients
from estimator.optim._reinitialize import reinitialize_slots
from estimator.steps._merge_specs import PerPart

_PLURAL = {"tower": "towers", "micro-batch": "micro-batches"}  # the kinds of parts, for messages


class RunResult(NamedTuple):
    """The result of a run of a model_fn.

    Attributes:
      spec: what the model_fn returned.
      gradients: of the updates that it asks for.
      writes: the variables that the model_fn wrote.
      denominators: what its losses divide by, before `Frame.average_denominator`, in the order of the losses; only
        those that are known in the model_fn itself, not in a loop or a branch within it.
      frame: as the run left it; of a run that was differentiated, good for its Python values only.
    """

    spec: EstimatorSpec
    gradients: StepGradients
    writes: Writes
    denominators: list[jax.Array]
    frame: Frame

    def list_gradients(self) -> list[Gradients]:
        """The gradients of each update, by name in the order of its variables."""
        # Out of a compiled function a dict comes sorted by its keys; `var_list` still has the order of the variables.
        values, updates = self.gradients.by_slots, train_op_of(self.spec).updates
        return [
            {n: values[update.slots][n] for n in update.var_list if n in values[update.slots]} for update in updates
        ]

    def scale(self, share: float) -> RunResult:
        """With the part's share of the merged losses, so that the sum over parts is the merged loss."""
        loss, train_op = self.spec.loss, self.spec.train_op
        if train_op is not None:
            updates = (u if u.loss is None else dataclasses.replace(u, loss=u.loss * share) for u in train_op.updates)
            train_op = dataclasses.replace(train_op, updates=tuple(updates))
        return self._replace(
            spec=self.spec.replace_unchecked(loss=None if loss is None else loss * share, train_op=train_op)
        )

    def split(self) -> tuple[EstimatorSpec, PerPart]:
        """The fields of the spec that are merged by a sum over parts, and the others."""
        spec, metrics = self.spec, self.spec.eval_metric_ops
        # Sums over towers share an all-reduce with the gradients; metrics that do not merge by a sum are gathered from
        # all towers.
        by_sum = {name: metric for name, metric in metrics.items() if merges_by_sum(metric)}
        others = {name: metric for name, metric in metrics.items() if name not in by_sum}
        summed = spec.replace_unchecked(predictions=None, eval_metric_ops=by_sum, export_outputs=None, reported={})
        return summed, PerPart(spec.predictions, others, spec.export_outputs, spec.reported)

    def addends(self, index: jax.Array, parts: int, part: str = "tower") -> Writes:
        """The `index`-th part's addend to the sum over parts that is `writes` of the whole batch.

        Args:
          part: the kind of parts, for messages: "tower" or "micro-batch".

        Raises:
          ValueError: integers were to be averaged.
        """
        aggregation = self.frame.declared.aggregation
        assigned = {
            name: aggregation[name].addend(name, value, index, parts, _PLURAL[part])
            for name, value in self.writes.assigned.items()
        }
        return Writes(assigned, self.writes.added)

    def check_rows(self, rows: int, part: str = "tower") -> None:
        """Raises a ValueError unless all that is to be concatenated has the rows of its tower, or its other `part`.

        Exactly those: an array of fixed size, such as a bias, would otherwise be repeated without a word.
        """
        for field in ("predictions", "export_outputs"):
            for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(self.spec, field)):
                if leaf.shape[:1] != (rows,):
                    raise ValueError(
                        f"{field}{jax.tree_util.keystr(path)} must have the batch as its first dimension to be put "
                        f"together from several {_PLURAL[part]}; it has shape {leaf.shape} in a {part} of {rows} "
                        "examples. Report a value of the whole batch by eval_metric_ops."
                    )
        for name, report in self.spec.reported.items():
            if not isinstance(report, Rows):
                continue
            if report.value.shape[:1] != (rows if report.limit is None else min(rows, report.limit),):
                raise ValueError(
                    f"What `est.record({name!r}, ...)` reports must be a scalar, or have the batch as its first "
                    f"dimension, to be put together from several {_PLURAL[part]}; it has shape {report.value.shape} in "
                    f"a {part} of {rows} examples. Record its elements one by one, or show it by "
                    "`est.summary.histogram`."
                )

    def with_new_slots(self, slots: Slots, variables: Variables) -> Slots:
        """The slots with all that belongs to variables initialized again; learning rates and schedules continue."""
        frame = self.frame.fresh(reuse=True)  # for optimizers that ask for the step or a variable
        frame.declared.trainable = self.frame.declared.trainable
        updates = train_op_of(self.spec).updates
        return {**slots, **{u.slots: reinitialize_slots(u, slots[u.slots], variables, frame) for u in updates}}
