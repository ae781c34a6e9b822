"""The Estimator: a model_fn, a directory, and the three verbs train, evaluate and predict."""

from __future__ import annotations

import contextlib
import copy
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from estimator._arguments import chosen_dir, needs_params, writer_of
from estimator._runs import InputFn, Runs, check_eval_dir, eval_dir
from estimator._strategy import replicate_by
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._model_dir import training_in
from estimator.core._argument_checks import check_steps
from estimator.core._estimator_spec import checked_hooks
from estimator.core._hook import Hook
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn, bind, with_params
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.core._typing import PyTree
from estimator.hooks._checkpoint_saver import CheckpointSaverListener, checked_listeners
from estimator.inputs._input_fn import call_input_fn
from estimator.loop._predict import checked_keys, single_examples
from estimator.multihost._collective_call import collective_call, run_on_chief
from estimator.multihost._preemption import ends_by_signals
from estimator.multihost._process_group import SingleProcess
from estimator.optim._learning_rate import find_saved_rates
from estimator.porting._missing_names import check_tpu_arguments, missing_attribute
from estimator.runtime._compilation_cache import use_compilation_cache
from estimator.runtime._fork import check_not_forked
from estimator.runtime._jax_settings import each_without_mesh_and_guard, without_mesh_and_guard
from estimator.runtime._log_lines import show_log_lines
from estimator.runtime._standard_streams import keep_standard_streams_open
from estimator.runtime._table import ShownAsTable, Table

if TYPE_CHECKING:
    from estimator.checkpoint._warm_start import WarmStartReport, WarmStartSettings
    from estimator.export._serving import ReceiverFn


class Estimator(ShownAsTable):
    """Trains, evaluates and predicts with a model_fn; everything it knows is in its `model_dir`.

    A second Estimator on the same directory continues with the same model. Compiled programs, and the variables of the
    newest checkpoint, stay alive between calls: ten evaluations compile once and read the checkpoint once.

    An `input_fn` is a function of any of `mode, params, config`. It returns an iterable of batches, each
    `(features, labels)` or only features (a list, a generator, a data loader), or a single batch.

    Several processes (`replicate.initialize_distributed`) make the same calls in the same order, on a model_dir that
    they share. Each `input_fn` gives its own rows of every batch; see `est.input_context`. Training ends with the first
    input that does, evaluation goes through all, with the same results in all processes; each predicts for itself.
    Only process 0 logs, and writes summaries and exports. An error in one of them is an error in all.

    >>> import estimator as est, numpy as np, optax, tempfile
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (1, 1))
    ...     predictions = features @ w
    ...     if mode == est.ModeKeys.PREDICT:
    ...         return est.EstimatorSpec(mode, predictions=predictions)
    ...     loss = est.losses.mean_squared_error(labels, predictions)
    ...     train_op = est.Optimizer(optax.sgd(0.1)).minimize(loss)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> x = np.array([[1.0], [2.0]], np.float32)
    >>> input_fn = est.inputs.numpy_input_fn(x, 3 * x, batch_size=2, num_epochs=None, shuffle=False)
    >>> estimator = est.Estimator(model_fn, model_dir=tempfile.mkdtemp())
    >>> estimator = estimator.train(input_fn, steps=50)
    >>> print(f"{estimator.evaluate(input_fn, steps=1)['loss']:.3f}")
    0.000
    >>> [f"{row[0]:.3f}" for row in estimator.predict(lambda: x)]
    ['3.000', '6.000']

    Args:
      model_fn: function of `features` and any of `labels, mode, params, config` that returns an `EstimatorSpec`.
      model_dir: the directory of the checkpoints, or the URL of one in a store, such as "s3://bucket/run"; default: the
        config's, else a new temporary one. A relative path, or one with "~", becomes absolute here.
      config: a `RunConfig`.
      params: passed on to model_fn and input_fn; copied.
      warm_start_from: the source of the first values of variables, as long as the model_dir has no checkpoint: a
        `WarmStartSettings`, or, for all trainable variables, a model_dir, or the path of a checkpoint or of an
        exported model.

    Raises:
      ValueError: no model_fn, one with other arguments, two different model_dirs, or a config or warm_start_from of
        another kind; a URL that nothing knows.
      ImportError: the package that knows the store is not installed.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Estimator:  # a class of the user's own may have arguments of these names
            check_tpu_arguments("Estimator", kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        model_fn: ModelFn,
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Any = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
    ) -> None:
        if model_fn is None:
            raise ValueError("model_fn must be provided to Estimator; got None.")
        if config is not None and not isinstance(config, RunConfig):
            raise ValueError(f"config must be an instance of `RunConfig`; got {config!r}.")
        config = config or RunConfig()
        self._config = config.replace(model_dir=chosen_dir(model_dir, config))
        if self._config.verbose:
            show_log_lines()
        # A copy, as in TensorFlow: what the caller changes later must not reach a model_fn that is traced once more.
        self._params = copy.deepcopy({} if params is None else params)
        self._given_model_fn = model_fn
        self._model_fn = replicate_by(self._config, model_fn, self._params)
        self._public_model_fn = with_params(model_fn, self._params)
        settings = None
        if warm_start_from is not None:
            from estimator.checkpoint._warm_start import as_settings

            settings = as_settings(warm_start_from)
        if self._config.compilation_cache_dir is not None:
            use_compilation_cache(self._config.compilation_cache_dir)
        self._runs = Runs(self._model_fn, self._params, self._config, settings)
        if params is None and needs_params(model_fn):
            logging.warning("The model_fn has a params argument, but params are not passed to Estimator.")
        logging.info("Using config: %s", self._config)

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, "Estimator", name)

    def _table(self) -> Table:
        path = self.latest_checkpoint()
        default, config = (vars(each) for each in (RunConfig(model_dir=self.model_dir), self._config))
        rows = [
            ("model_fn", getattr(self._given_model_fn, "__name__", type(self._given_model_fn).__name__)),
            ("model_dir", self.model_dir),
            ("newest checkpoint", "none yet" if path is None else f"step {Checkpoint(path).step}"),
            ("params", reprlib.repr(self._params)),
            *((f"config.{name}", reprlib.repr(value)) for name, value in config.items() if value != default[name]),
        ]
        return Table([(type(self).__name__, ""), *rows], "<<")

    @property
    def model_dir(self) -> str:
        return str(self._config.model_dir)

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def params(self) -> Any:
        """A copy: changing it changes nothing here."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> ModelFn:
        """As in TensorFlow a function of `(features, labels, mode, config)` that has this Estimator's params already:
        what another Estimator, `replicate_model_fn` or a model_fn of your own can build on."""
        return self._public_model_fn

    @property
    def warm_start_from(self) -> WarmStartSettings | None:
        """The source of the first values of variables, as long as the model_dir has no checkpoint."""
        return self._runs.states.settings

    @property
    def warm_start_report(self) -> WarmStartReport | None:
        """The report of the last warm start of this Estimator; None if it made none."""
        return self._runs.states.warm_start_report

    @without_mesh_and_guard()
    def train(
        self,
        input_fn: InputFn,
        hooks: Iterable[Hook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Iterable[CheckpointSaverListener] | None = None,
    ) -> Estimator:
        """Trains from the newest checkpoint, or from initial values; returns the Estimator itself.

        Saves a checkpoint of the initial values, then as the config says, and one at the end. Hooks are called in this
        order: the one that saves checkpoints, the EstimatorSpec's `training_chief_hooks`, the one that writes
        summaries, the `hooks` passed here, its `training_hooks`; those with a state to save (`Hook.get_state`) first.

        Args:
          input_fn: gives the training batches. Training ends with them, if nothing ends it before. A thread reads them
            ahead, and takes the values of each as it comes: all may be in the same memory.
          hooks: `est.Hook`s, called around the steps. A `CheckpointSaverHook` replaces the config's.
          steps: how many steps to train in this call.
          max_steps: at which global step to stop. Nothing is done (nor is input_fn called) if it is reached already.
          saving_listeners: `est.CheckpointSaverListener`s, called around every checkpoint.

        Raises:
          TypeError: `steps` or `max_steps` is not an int; a hook or listener is not one.
          RuntimeError: another training run uses the model_dir; this process was forked from one that had a run.
          OSError: the model_dir cannot be made or written.
          ValueError: both `steps` and `max_steps` are given, or one is not positive; listeners are given, but nothing
            saves checkpoints; the model_dir holds checkpoints of TensorFlow; a checkpoint that does not fit the
            model_fn; a batch that the model_fn cannot take.
          NanLossDuringTrainingError: the loss became NaN. Nothing of that is saved.
          NonFiniteGradientError: a gradient was inf or NaN, with on_nan="raise". Nothing of that is saved.
          RuntimeError: a checkpoint could not be written; the newest one stays.
          ReplicaMismatchError: copies of a variable differ, where `RunConfig(check_replicas_every=...)` looks for it.
          KeyboardInterrupt: at Ctrl-C, once the steps that have begun are saved; at a second one, at once.
          Preempted: at SIGTERM, or after `est.request_stop()`, in the same way.
        """
        if steps is not None and max_steps is not None:
            raise ValueError(
                f"Can not provide both steps and max_steps; got steps={steps} and max_steps={max_steps}. "
                "`steps` counts from now on, `max_steps` from the first step of all."
            )
        check_steps("Estimator.train", steps=steps, max_steps=max_steps)
        own_hooks, listeners = checked_hooks("hooks", hooks), checked_listeners(saving_listeners)
        check_not_forked("train")
        keep_standard_streams_open()
        # Signals are handled before the lock is taken, that is within the collective call: where process 0 does not get
        # it, all processes raise.
        with (
            ends_by_signals() as running,
            collective_call(f"train(steps={steps}, max_steps={max_steps})", self._config.limits) as group,
            training_in(self.model_dir, self._config.is_chief),
        ):
            self._runs.train(input_fn, own_hooks, listeners, steps, max_steps, group, running)
        return self

    @without_mesh_and_guard()
    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Iterable[Hook] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """The metrics of the model_fn over all batches of an input_fn.

        Args:
          input_fn: gives the batches; of any size, the last one too.
          steps: how many batches to take at most; all if None.
          hooks: `est.Hook`s, called around the batches, before the EstimatorSpec's `evaluation_hooks`.
          checkpoint_path: which checkpoint to evaluate; default: the newest. If there is none, the initial values are
            evaluated, as in TensorFlow, with a warning; with "latest" this is an error.
          name: of this evaluation, for the log and for `eval_dir(name)`, where the metrics are written for
            TensorBoard and `est.read_history`, instead of an earlier evaluation of the same step.

        Returns:
          By name: the metrics (floats, or arrays), "loss" (the mean of the batches' losses, or of the examples', as
          `RunConfig(eval_loss_over=...)` says) and "global_step".

        Raises:
          TypeError: `steps` is not an int; a hook is not one.
          ValueError: the input_fn gives no batch, `steps` is not positive, the path is not a checkpoint, or
            the checkpoint does not fit the model_fn.
        """
        check_steps("Estimator.evaluate", steps=steps)
        own_hooks = checked_hooks("hooks", hooks)
        check_not_forked("evaluate")
        check_eval_dir(self.model_dir, name)
        keep_standard_streams_open()
        call = f"evaluate(steps={steps}, checkpoint_path={checkpoint_path!r}, name={name!r})"
        with (
            ends_by_signals() as running,
            collective_call(call, self._config.limits) as group,
            contextlib.ExitStack() as stack,
        ):
            stack.enter_context(self._runs.stopwatch.part("evaluation"))
            path = self._runs.states.find(checkpoint_path, group)
            if group.count > 1 and path is not None:  # which all of them read
                stack.enter_context(Checkpoint(path).hold())
            return self._runs.evaluate(path, checkpoint_path, input_fn, steps, own_hooks, name, group, running)

    @without_mesh_and_guard()
    def evaluate_state(
        self,
        state: State,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Iterable[Hook] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a state in memory, such as `context.state` in a hook, instead of a checkpoint."""
        check_steps("Estimator.evaluate_state", steps=steps)
        check_not_forked("evaluate_state")
        check_eval_dir(self.model_dir, name)
        own_hooks = checked_hooks("hooks", hooks)
        with (
            ends_by_signals() as running,
            collective_call(f"evaluate_state(steps={steps}, name={name!r})", self._config.limits) as group,
            self._runs.stopwatch.part("evaluation"),
        ):
            return self._runs.evaluate(state, None, input_fn, steps, own_hooks, name, group, running)

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: str | Sequence[str] | None = None,
        hooks: Iterable[Hook] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[PyTree]:
        """Yields the predictions for an input_fn, pytrees of numpy arrays, in its order.

        Arguments are checked at once; batches are read and computed as the predictions are taken.

        Args:
          input_fn: gives the batches; of any size. Labels are left out.
          predict_keys: which of a dict of predictions to yield; default: all.
          hooks: `est.Hook`s, called around the batches, before the EstimatorSpec's `prediction_hooks`. They end when
            the predictions do, or when the iterator is closed.
          checkpoint_path: which checkpoint to use; default: the newest, else initial values; "latest":
            the newest, or an error.
          yield_single_examples: whether to yield one example at a time, or whole batches.

        Raises:
          TypeError: a hook is not one.
          ValueError: `predict_keys` names an unknown prediction, the path is not a checkpoint, or the
            checkpoint does not fit the model_fn.
        """
        if not callable(input_fn):
            call_input_fn(input_fn, ModeKeys.PREDICT, None, None)  # raises
        # Here and not in the generator below, whose body runs only when the first prediction is taken.
        keys, own_hooks = checked_keys(predict_keys), checked_hooks("hooks", hooks)
        check_not_forked("predict")
        # Each process predicts for itself, and agrees with no other on the checkpoint.
        path = self._runs.states.find(checkpoint_path, SingleProcess())
        predictions = each_without_mesh_and_guard(self._runs.predict(input_fn, keys, own_hooks, path, checkpoint_path))
        return single_examples(predictions) if yield_single_examples else predictions

    @without_mesh_and_guard()
    def export_model(
        self,
        export_dir_base: str | os.PathLike[str],
        example_features: PyTree,
        *,
        checkpoint_path: str | None = None,
        assets_extra: Mapping[str, str | os.PathLike[str]] | None = None,
        batch_size: int | None = None,
        platforms: Sequence[str] = ("cpu", "cuda"),
        outputs: str | Sequence[str] | None = None,
        format: str | None = None,
    ) -> str:
        """Writes what `predict` computes to a new folder; `est.load_exported` runs it without this model_fn.

        As in TensorFlow, the folder is called by the time in seconds, and appears under this name when it is whole.
        It holds a program for each entry of `export_outputs`, made by `jax.export` for one device and batches of any
        size, the weights, a `metadata.json`, checksums, which `est.load_exported` looks at, and a `README.md` with the
        few lines that load it by only jax and numpy. jax reads programs for at least six months after they were
        exported; keep the checkpoint too. Of several processes all call it, process 0 writes, and all get the path.
        Random keys are as in `predict`, the same ones for every batch.

        Args:
          export_dir_base: where to make the folder.
          example_features: of a batch, as the model_fn takes them, in dicts, lists and tuples: arrays, or
            `jax.ShapeDtypeStruct`s. Only shapes and dtypes count. Or a serving_input_receiver_fn, which `est.export`
            builds, as for `export_saved_model`.
          checkpoint_path: which one to export; default: the newest, or, without any, what a warm start begins with.
          assets_extra: files to copy into the folder's `assets.extra/`, by their path in there.
          batch_size: the only batch size to export for, if the model_fn has to know the number of examples.
          platforms: which of "cpu", "cuda", "rocm" and "tpu" to export for. None needs to be here.
          outputs: names of predictions and `est.record`ed values to export instead of `export_outputs`, with only the
            operations, weights and features they need. Batch-major; a scalar is one number for the whole batch.
          format: "jax", or "saved_model": then the folder is a SavedModel of TensorFlow, too, with the same signatures,
            for `tf.saved_model.load` and TensorFlow Serving. Needs TensorFlow, of the extra `saved_model`. If None,
            "saved_model" for a serving_input_receiver_fn, else "jax".

        Returns:
          The path of the folder.

        Raises:
          ValueError: there is no checkpoint, or it lacks a variable; the arguments or the outputs cannot be exported,
            or not for batches of any size. Nothing is left behind.
          TypeError: the features are not arrays of numbers, or in another container.
          ImportError: TensorFlow is not installed, and the format is "saved_model".
        """
        check_not_forked("export_model")
        # In every process, so that what is wrong with the arguments is the same error in all.
        from estimator.export._export_model import check_arguments, write_export

        options = check_arguments(example_features, assets_extra, batch_size, platforms, outputs)
        write_more = writer_of(format, has_receiver=options.receiver is not None)

        def export() -> str:
            # A group of one: only process 0 is here, and would wait for the others for ever.
            alone, states = SingleProcess(), self._runs.states
            path = self.latest_checkpoint() if checkpoint_path is None else states.find(checkpoint_path, alone)
            if path is None and states.settings is None:
                raise ValueError(f"Couldn't find trained model at {self.model_dir}. Call `train` first.")
            state = self._runs.read_for_export(options.features, path, checkpoint_path)
            call = bind(self._model_fn, self.params, self._config)
            return write_export(export_dir_base, call, state, options, write_more)

        return run_on_chief("export_model", export)

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: ReceiverFn,
        assets_extra: Mapping[str, str | os.PathLike[str]] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
    ) -> str:
        """Writes a SavedModel of TensorFlow to a new folder, for the clients of TensorFlow Serving.

        It is `export_model(..., format="saved_model")`. Where clients send `tf.Example`s, signatures are as
        TensorFlow's Estimator made them: a `ClassificationOutput` answers a Classify request ("inputs") by "scores"
        and "classes", a `RegressionOutput` a Regress request ("inputs") by "outputs", and a `PredictOutput` a Predict
        request ("examples") by its outputs, strings included. Vocabulary files are in `assets/`.

        Args:
          export_dir_base: where to make the folder.
          serving_input_receiver_fn: what `est.export.build_parsing_serving_input_receiver_fn` or
            `build_raw_serving_input_receiver_fn` returns.
          assets_extra, checkpoint_path: as for `export_model`.
          as_text: must be False.

        Returns:
          The path of the folder.

        Raises:
          ValueError: the receiver is missing, `as_text` is True, or as for `export_model`.
          TypeError: the receiver is another function.
          ImportError: TensorFlow is not installed.
        """
        if serving_input_receiver_fn is None:
            raise ValueError("An input_receiver_fn must be defined.")
        if as_text:
            raise ValueError("`export_saved_model` writes no text; got as_text=True. Leave it out.")
        from estimator.export._serving import as_receiver

        receiver = as_receiver("export_saved_model", serving_input_receiver_fn)
        return self.export_model(
            export_dir_base, receiver, assets_extra=assets_extra, checkpoint_path=checkpoint_path, format="saved_model"
        )

    def latest_checkpoint(self) -> str | None:
        """The path of the newest complete checkpoint, or None."""
        return self._runs.checkpoints.latest()

    def get_variable_names(self) -> list[str]:
        """The names of everything in the newest checkpoint: variables, slots, global_step.

        Raises:
          ValueError: there is no checkpoint.
        """
        return self._runs.states.read_newest(Checkpoint.names)

    def get_variable_value(self, name: str | Sequence[str]) -> np.ndarray | dict[str, np.ndarray]:
        """The value of a variable, or slot, in the newest checkpoint; or several of them.

        Args:
          name: a name, as `get_variable_names` lists it; or a glob such as "dense/*", or a list of names and globs.
            "*" stands for any characters, "/" too.

        Returns:
          The array for a name; a dict of arrays by name for a glob or a list.

        Raises:
          ValueError: there is no checkpoint, or nothing in it has such a name.
        """
        values = self._runs.states.read_newest(
            lambda newest: newest.read_all([name] if isinstance(name, str) else name)
        )
        return values[name] if isinstance(name, str) and name in values else values

    def get_learning_rates(self) -> dict[str, float]:
        """`est.learning_rates` of the state of the newest checkpoint; a ValueError if there is no checkpoint. An
        optimizer's own name is taken to have no "/"."""

        def read(newest: Checkpoint) -> dict[str, float]:
            arrays = find_saved_rates(newest.shapes().keys() - newest.shapes(slots=False).keys())
            values = newest.read_all(list(arrays.values()))
            return {name: float(np.ravel(values[array])[0]) for name, array in arrays.items()}

        return self._runs.states.read_newest(read)

    def eval_dir(self, name: str | None = None) -> str:
        """The directory of the evaluation `name`: `<model_dir>/eval_<name>`, or `<model_dir>/eval` without a name."""
        return eval_dir(self.model_dir, name)
