"""What a package that maps a model_fn over devices builds on, as `replicate` does.

Everything else with an underscore in `estimator` is private. What is here serves four purposes:

- **Run a model_fn once**: `bind` gives it the arguments it declares, `run_model_fn` runs it in a `Frame` and takes its
  gradients, `apply_train_op` lets its optimizers move the variables.
- **Merge the results of parts of a batch**: a spec is split into the fields that a sum merges and those that need a
  value of each part (`split_spec`, `merge_parts`, `join_spec`); parts of several sizes are put together by
  `concatenate_specs`. `Deferred` leaves a merge to the end of a program.
- **Say where things live**: a `Placement`, or an `OffTowerPlacement` if the variables are on other devices than the
  model_fn, goes into the frame and compiles the steps.
- **Values of several kinds**: `IndexedSlices` as gradients, sparse features, non-finite gradients.

It changes with the library: a package that uses it depends on a version.
"""

from estimator.core._batch import check_batch
from estimator.core._bcoo import is_sparse, with_shape
from estimator.core._estimator_spec import loss_of, train_op_of
from estimator.core._frame import Frame, Writes, current_frame, open_frame
from estimator.core._model_fn import ModelFn, bind
from estimator.core._partitioning import PART_AXIS
from estimator.core._placement import Halves, OffTowerPlacement, Placement
from estimator.core._record import Report
from estimator.core._state import BLOCK_SYNC_SLOTS
from estimator.multihost._initialize import initialize_distributed
from estimator.optim._apply_updates import applied as apply_train_op
from estimator.optim._finite import select, update_if
from estimator.optim._learning_rate import rates_of
from estimator.optim._non_finite import NonFinitePolicy
from estimator.optim._reinitialize import reinitialized
from estimator.porting._tensorflow_names import names_missing_in
from estimator.runtime._uninterrupted import compile_first
from estimator.sparse._indexed_slices import is_slices, joined
from estimator.steps._deferred_merge import Deferred
from estimator.steps._forward_transform import Forward, check_transform
from estimator.steps._gradients import RunResult, has_pending, run_model_fn
from estimator.steps._merge_specs import (
    PerPart,
    addend,
    check_rows,
    concatenate_rows,
    concatenate_specs,
    join_spec,
    merge_metrics,
    merge_parts,
    merge_stacked_reports,
    split_spec,
)

__all__ = [
    "BLOCK_SYNC_SLOTS",
    "Deferred",
    "Forward",
    "Frame",
    "Halves",
    "ModelFn",
    "NonFinitePolicy",
    "OffTowerPlacement",
    "PART_AXIS",
    "PerPart",
    "Placement",
    "Report",
    "RunResult",
    "Writes",
    "addend",
    "apply_train_op",
    "bind",
    "check_batch",
    "check_rows",
    "check_transform",
    "compile_first",
    "concatenate_rows",
    "concatenate_specs",
    "current_frame",
    "has_pending",
    "initialize_distributed",
    "is_slices",
    "is_sparse",
    "join_spec",
    "joined",
    "loss_of",
    "merge_metrics",
    "merge_parts",
    "merge_stacked_reports",
    "names_missing_in",
    "open_frame",
    "rates_of",
    "reinitialized",
    "run_model_fn",
    "select",
    "split_spec",
    "train_op_of",
    "update_if",
    "with_shape",
]
