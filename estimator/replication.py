"""Names for packages that map a model_fn over devices, as `replicate` does.

Everything else with an underscore in `estimator` is private. What is here serves four purposes:

- **Run the model_fn on parts of a batch.** A model_fn that maps another one begins a `ModelRun` (its docstring has an
  example), which runs the other one on any rows, in a `Frame` that says which part it is; that returns a `RunResult`.
- **Merge what the parts return.** `RunResult.split` gives the fields of a spec that a sum merges, and a `PerPart` of
  those that need the value of each part; its `gradients` are summed, too. `concatenate_specs` puts parts of several
  sizes together. `ModelRun.leave` hands gradients and written variables to the run around.
- **Say where things live.** A `Placement` goes into the frame and returns shardings. An `OffTowerPlacement` makes
  several programs of a step, which it gets in `Halves`, if the variables are on other devices than the model_fn.
- **Agree with the rest of the library**: `NonFinitePolicy` marks gradients for `on_nan`, `is_sparse` finds the sparse
  leaves of a batch, `update_if` is a choice that is fast on CPUs, a `Program` is compiled where Ctrl-C does no harm,
  `names_missing_in` makes a module's errors for TensorFlow's names, `reductions` tells how a run has reduced its
  losses, and `initialize_distributed` is handed on.

It changes with the library: a package that uses it depends on a version.
"""

from estimator.core._bcoo import is_sparse
from estimator.core._frame import Frame
from estimator.core._placement import Halves, OffTowerPlacement, Placement
from estimator.losses._collected import reductions
from estimator.multihost._initialize import initialize_distributed
from estimator.optim._finite import update_if
from estimator.optim._non_finite import NonFinitePolicy
from estimator.porting._missing_names import names_missing_in
from estimator.runtime._program import Program
from estimator.steps._merge_specs import PerPart, concatenate_specs
from estimator.steps._model_run import ModelRun
from estimator.steps._run_result import RunResult

__all__ = [
    "Frame",
    "Halves",
    "ModelRun",
    "NonFinitePolicy",
    "OffTowerPlacement",
    "PerPart",
    "Placement",
    "Program",
    "RunResult",
    "concatenate_specs",
    "initialize_distributed",
    "is_sparse",
    "names_missing_in",
    "reductions",
    "update_if",
]
