"""Exporters, which choose the evaluated models to export."""

from __future__ import annotations

import abc
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from absl import logging
from jax.typing import ArrayLike

from estimator.core._typing import PyTree
from estimator.export._retention import remove_old
from estimator.export._serving import ReceiverFn, as_receiver, is_receiver
from estimator.storage._files import is_dir, is_inside, write
from estimator.storage._small_files import read_or_set_aside

_RECORD = "exported.json"
_COMPARED = ("best_eval_result", "current_eval_result")
_Files = Mapping[str, str | os.PathLike[str]]

EvalResult = dict[str, Any]  # as `evaluate` returns it: numbers and arrays by name


class ExportsModel(Protocol):
    """An Estimator, as exporters use it."""

    def export_model(
        self,
        export_dir_base: str | os.PathLike[str],
        example_features: PyTree,
        assets_extra: _Files | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        platforms: str | Sequence[str] = ...,
        outputs: str | Sequence[str] | None = None,
        format: str | None = None,
    ) -> str: ...


class Exporter(abc.ABC):
    """`train_and_evaluate` calls it after every evaluation; it exports the model or not. Derive your own from it."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The folder for its exports is `<model_dir>/export/<name>`."""

    @abc.abstractmethod
    def export(
        self,
        estimator: ExportsModel,
        export_path: str,
        checkpoint_path: str | None,
        eval_result: EvalResult,
        is_the_final_export: bool,
    ) -> str | None:
        """Exports the model, or decides not to.

        Args:
          estimator: the Estimator.
          export_path: the folder for exports.
          checkpoint_path: the checkpoint that was evaluated; None if no exporter `wants` it.
          eval_result: the result of `evaluate`.
          is_the_final_export: whether training has ended, for whatever reason. If the last evaluation during training
            is also the one at its end, this method is called twice, once without and once with it.

        Returns:
          The path of the export, or None.
        """

    def wants(self, export_path: str, eval_result: EvalResult, is_the_final_export: bool) -> bool:
        """Returns whether `export` will need the checkpoint; if no exporter does, none is saved. By default always."""
        return True


class LatestExporter(Exporter):
    """Exports after every evaluation.

    A result (of the same step, with the same metrics) is exported once: called with it again, as at the end of
    training or in a run that had already ended, `export` returns the path of the existing export.

    >>> import numpy as np
    >>> exporter = LatestExporter("latest", example_features=np.zeros((1, 4), np.float32))

    Args:
      name: the name of the folder.
      example_features: features of a batch as the model_fn takes them, or a serving_input_receiver_fn; see
        `Estimator.export_model`.
      assets_extra: files to copy into the export, by their path in it.
      exports_to_keep: how many of the newest exports to keep in the folder; all if None. Only folders named by
        a time in seconds, of ten digits, that hold an exported model are exports.
      batch_size, platforms, format: as for `Estimator.export_model`; if None, its defaults.
      serving_input_receiver_fn: instead of `example_features`, by TensorFlow's name.

    Raises:
      TypeError: the serving_input_receiver_fn is not one of `est.export`'s.
      ValueError: features and function are both missing or both given, or `exports_to_keep` is not positive.
    """

    def __init__(
        self,
        name: str,
        example_features: PyTree = None,
        assets_extra: _Files | None = None,
        exports_to_keep: int | None = 5,
        batch_size: int | None = None,
        platforms: str | Sequence[str] | None = None,
        format: str | None = None,
        serving_input_receiver_fn: ReceiverFn | None = None,
    ) -> None:
        kind = type(self).__name__
        if (example_features is None) == (serving_input_receiver_fn is None):
            got = "None" if example_features is None else "both"
            raise ValueError(
                f"{kind} needs `example_features`, the features of a batch for the model_fn, or a "
                f"`serving_input_receiver_fn`; got {got}."
            )
        if serving_input_receiver_fn is not None:
            example_features = serving_input_receiver_fn
        if is_receiver(example_features):
            example_features = as_receiver(kind, example_features)
        if exports_to_keep is not None and exports_to_keep <= 0:
            raise ValueError(f"`exports_to_keep`, if provided, must be positive number; got {exports_to_keep!r}.")
        self._name = name
        self._example_features = example_features
        self._keep = exports_to_keep
        options: dict[str, Any] = {
            "assets_extra": assets_extra,
            "batch_size": batch_size,
            "platforms": platforms,
            "format": format,
        }
        # Arguments that are not given have the defaults of `export_model`.
        self._options = {option: value for option, value in options.items() if value is not None}

    @property
    def name(self) -> str:
        return self._name

    def wants(self, export_path: str, eval_result: EvalResult, is_the_final_export: bool) -> bool:
        return self._decide(export_path, eval_result, is_the_final_export)[0]

    def export(
        self,
        estimator: ExportsModel,
        export_path: str,
        checkpoint_path: str | None,
        eval_result: EvalResult,
        is_the_final_export: bool,
    ) -> str | None:
        chosen, path = self._decide(export_path, eval_result, is_the_final_export)
        if chosen:
            path = estimator.export_model(
                export_path, self._example_features, checkpoint_path=checkpoint_path, **self._options
            )
            path = os.fspath(path)
            # After the export: a crash between the two repeats the export; in the other order it would be lost.
            record = {"export": os.path.basename(path), "eval_result": eval_result}
            write(os.path.join(export_path, _RECORD), json.dumps(record, default=_as_json).encode())
            if self._keep is not None:
                remove_old(export_path, self._keep)
        return path

    def _decide(self, export_path: str, result: EvalResult, final: bool) -> tuple[bool, str | None]:
        """Decides whether to export; if not, gives the path of an existing export of this result, too."""
        last = _read_record(export_path)
        # A run that was killed after its export evaluates the same state again when it resumes: the export is there
        # already.
        if last is not None and _text(last["eval_result"]) == _text(result) and (path := _find(export_path, last)):
            return False, path
        try:
            return self._is_chosen(last and last["eval_result"], result), None
        except Exception as error:
            error.add_note(f"The best result so far is in {os.path.join(export_path, _RECORD)}.")
            raise

    def _is_chosen(self, last: EvalResult | None, result: EvalResult) -> bool:
        """Compares with the result of the last export, and says whether to export."""
        return True


class FinalExporter(LatestExporter):
    """Exports once, at the end of training: after `max_steps`, at the end of the input, or when a hook stopped it.

    A run that had already ended keeps its export when started again; a run that continues makes another.

    >>> import numpy as np
    >>> exporter = FinalExporter("final", example_features=np.zeros((1, 4), np.float32))

    Args:
      name, example_features, assets_extra, batch_size, platforms, format, serving_input_receiver_fn: as for
        `LatestExporter`.

    Raises:
      TypeError, ValueError: as for `LatestExporter`.
    """

    def __init__(
        self,
        name: str,
        example_features: PyTree = None,
        assets_extra: _Files | None = None,
        batch_size: int | None = None,
        platforms: str | Sequence[str] | None = None,
        format: str | None = None,
        serving_input_receiver_fn: ReceiverFn | None = None,
    ) -> None:
        super().__init__(
            name, example_features, assets_extra, None, batch_size, platforms, format, serving_input_receiver_fn
        )

    def _decide(self, export_path: str, result: EvalResult, final: bool) -> tuple[bool, str | None]:
        return super()._decide(export_path, result, final) if final else (False, None)


def _loss_smaller(best_eval_result: EvalResult, current_eval_result: EvalResult) -> bool:
    for result in (best_eval_result, current_eval_result):
        if "loss" not in result:
            raise ValueError(f"BestExporter compares losses, but got {result!r} without one. Give it a compare_fn.")
    return bool(current_eval_result["loss"] < best_eval_result["loss"])


class BestExporter(LatestExporter):
    """Exports a model that is better than all that it exported before.

    A file beside the exports has the best result: a restarted training run compares with it, and never exports a worse
    model, as TensorFlow's exporter would. A result with NaN in any metric is never the best. At the end of training
    `export` returns the path of the best export, though the last model was no better; before, None if it makes none.

    >>> import numpy as np
    >>> def more_accurate(best_eval_result, current_eval_result):
    ...     return current_eval_result["accuracy"] > best_eval_result["accuracy"]
    >>> exporter = BestExporter("best", np.zeros((1, 4), np.float32), compare_fn=more_accurate)

    Args:
      name, example_features, assets_extra, exports_to_keep, batch_size, platforms, format,
        serving_input_receiver_fn: as for `LatestExporter`.
      compare_fn: function of `best_eval_result` and `current_eval_result`, both as `evaluate` returns them, that
        returns whether the current one is better. Default: its loss is smaller.

    Raises:
      TypeError: as for `LatestExporter`.
      ValueError: also if `compare_fn` is None or has other arguments; in `export`, if there is no loss to compare.
    """

    def __init__(
        self,
        name: str = "best_exporter",
        example_features: PyTree = None,
        compare_fn: Callable[..., bool] = _loss_smaller,
        assets_extra: _Files | None = None,
        exports_to_keep: int | None = 5,
        batch_size: int | None = None,
        platforms: str | Sequence[str] | None = None,
        format: str | None = None,
        serving_input_receiver_fn: ReceiverFn | None = None,
    ) -> None:
        args = name, example_features, assets_extra, exports_to_keep, batch_size, platforms, format
        super().__init__(*args, serving_input_receiver_fn)
        # As in TensorFlow, it is called with these keywords. Checked now, since the first call may come after days of
        # training.
        if not callable(compare_fn) or sorted(inspect.signature(compare_fn).parameters) != list(_COMPARED):
            raise ValueError(
                f"`compare_fn` of BestExporter must be a function of exactly {' and '.join(_COMPARED)}; "
                f"got {compare_fn!r}. Leave it out to compare losses."
            )
        self._compare_fn = compare_fn

    def _decide(self, export_path: str, result: EvalResult, final: bool) -> tuple[bool, str | None]:
        chosen, path = super()._decide(export_path, result, final)
        # The caller of `train_and_evaluate` gets what is returned at the end, and wants to load the best.
        if final and not chosen and path is None and (last := _read_record(export_path)) is not None:
            path = _find(export_path, last)
        return chosen, path

    def _is_chosen(self, last: EvalResult | None, result: EvalResult) -> bool:
        # The first result is compared with itself, so that a metric that the function lacks is an error at once.
        best = result if last is None else {key: np.asarray(x) if isinstance(x, list) else x for key, x in last.items()}
        is_better = bool(self._compare_fn(best_eval_result=best, current_eval_result=result))
        with_nan = sorted(name for name, value in result.items() if _has_nan(value))
        if with_nan:
            logging.warning("BestExporter %r does not export a model with NaN in %s.", self.name, with_nan)
            return False
        return last is None or is_better


def _read_record(export_path: str) -> dict[str, Any] | None:
    """The name and the evaluation result of the last export in a folder."""
    return read_or_set_aside(
        os.path.join(export_path, _RECORD), _parse_record, "The next model is exported without a comparison."
    )


def _parse_record(text: bytes) -> dict[str, Any]:
    match record := json.loads(text):
        case {"export": str(name), "eval_result": dict()} if is_inside(name) and name == os.path.basename(name):
            return record
    raise ValueError("it is not the record of an export")


def _find(export_path: str, record: dict[str, Any]) -> str | None:
    """The path of the export that a record is of; None if it was removed."""
    path = os.path.join(export_path, record["export"])
    return path if is_dir(path) else None


def _as_json(value: ArrayLike) -> object:
    return np.asarray(value).tolist()


def _text(eval_result: EvalResult) -> str:
    # As in the record, in which arrays and numbers of numpy are Python's numbers and lists.
    return json.dumps(eval_result, sort_keys=True, default=_as_json)


def _has_nan(value: PyTree) -> bool:
    leaves = map(np.asarray, jax.tree.leaves(value))
    return any(bool(np.isnan(x).any()) for x in leaves if np.issubdtype(x.dtype, np.floating))
