"""`RunConfig`: where an Estimator saves, how often, and from which seed it starts."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax

from estimator.porting._missing_names import missing_attribute
from estimator.runtime._limits import Limits


@runtime_checkable
class Strategy(Protocol):
    """The towers of an Estimator."""

    def replicate(self, model_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the model_fn that runs the given one in towers."""
        ...


class _Unset:
    """The default of a field that differs from None, which means "never"."""

    def __repr__(self) -> str:
        return "<unset>"


_UNSET: Any = _Unset()


class _Default(int):
    """The default of a field whose number, where it is given, has a meaning of its own."""

    def __repr__(self) -> str:
        return "<unset>"

    __str__ = int.__repr__


_SAVING = ("save_checkpoints_steps", "save_checkpoints_secs")
_STRATEGIES = ("train_distribute", "eval_distribute")
_DEFAULT_SAVE_SECS = 600
_TOWERS = "wrap the model_fn in `replicate_model_fn`, which takes devices"
_TOGETHER = "leave it out: all processes run the same steps, joined by `replicate.initialize_distributed`"
# What TensorFlow's RunConfig takes, and what does the same here.
_REPLACED = {
    "tf_random_seed": "write `seed`",
    "session_config": "set XLA's flags by `jax.config` or the environment variable XLA_FLAGS",
    "experimental_distribute": "write `train_distribute` and `eval_distribute`",
    "device_fn": _TOWERS,
    "protocol": _TOGETHER,
    "experimental_max_worker_delay_secs": _TOGETHER,
    "session_creation_timeout_secs": "call `replicate.initialize_distributed(timeout_secs=...)`",
    "tpu_config": "write `steps_per_loop` for its iterations_per_loop; replicate_model_fn takes devices for num_shards",
    "checkpoint_save_graph_def": "leave it out: a checkpoint holds only arrays",
}


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_tracker(value: object) -> bool:
    return callable(getattr(value, "open", None)) and not isinstance(value, type)


def is_default(value: object) -> bool:
    """Returns whether the value of a field is its default, and nobody has given it, be it as the same number."""
    return isinstance(value, _Default)


def seconds(value: object) -> float | None:
    """The number of seconds that a text such as "0.2s", "1m" or "1h" means; None for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([smh])", value) if isinstance(value, str) else None
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else None


def _check_int(field: str, value: object, minimum: int, advice: str) -> None:
    if not _is_number(value, int) or value < minimum:  # type: ignore[operator]
        raise ValueError(f"`{field}` should be an int >= {minimum}{advice}; got {value!r}.")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of a run: checked when made, immutable, the same for every call of an Estimator.

    As in TensorFlow, a checkpoint is saved every 600 seconds by default, and giving one
    of `save_checkpoints_steps` and `save_checkpoints_secs` turns the other off. Unlike there,
    `seed` has a fixed default, so that a run can be repeated without asking for it.

    >>> RunConfig().save_checkpoints_secs
    600
    >>> config = RunConfig(save_checkpoints_steps=100)
    >>> config.save_checkpoints_secs is None
    True
    >>> config.replace(seed=1)
    RunConfig(model_dir=None, seed=1, save_summary_steps=100, save_checkpoints_steps=100,
              save_checkpoints_secs=None, save_checkpoints_async=True, keep_checkpoint_max=5,
              keep_checkpoint_every_n_hours=None, log_step_count_steps=<unset>, steps_per_loop='auto',
              check_replicas_every=None, resume_input='position', eval_loss_over='batches', compilation_cache_dir=None,
              limits=Limits(begin=1800.0, input=1800.0, compile=1800.0, step=1800.0, hook=1800.0, checkpoint=1800.0,
                            end=1800.0, action='end'),
              verbose=True, trackers=(), train_distribute=None, eval_distribute=None)

    Args:
      model_dir: the directory of checkpoints and event files, a string or a path object, or a URL; None
        leaves it to the Estimator.
      seed: what initial values and all other randomness follow from.
      save_summary_steps: write summaries of the steps 1, 1 + N, 1 + 2 N ..., wherever a run begins; None or 0: never.
      save_checkpoints_steps: save every N steps. None or 0: not by steps.
      save_checkpoints_secs: save every N seconds. None or 0: not by time. With both None only
        hooks save checkpoints, by `context.save()`.
      save_checkpoints_async: whether training continues while a checkpoint is written, from a copy of the state in the
        host's memory. The next save and the end of the run wait for it, and raise what went wrong; so do the
        calls of the same Estimator that read the newest checkpoint, which wait.
      keep_checkpoint_max: how many of the newest checkpoints stay on disk; None or 0 keeps all.
      keep_checkpoint_every_n_hours: of the checkpoints that `keep_checkpoint_max` would remove, keep the first, and
        one every N hours after the last one kept. None keeps none.
      log_step_count_steps: log loss, steps per second and learning rates (of optimizers under
        `optax.inject_hyperparams`) after the first step of a run, and after each N of its steps: with 200, a run that
        begins at step 0 logs the steps 1, 200, 400 ...; never if None. Where it is not given, lines come by time: the
        first ones soon, then one at least every ten seconds, if a step takes no longer, and never two in a second.
      steps_per_loop: how many train steps make one compiled program, at most: an int, a time such as "0.2s", or
        "auto": many small steps, few large ones, and batches of 64 MB at most. Small steps gain from it; convolutions
        on a CPU lose, since XLA runs them on one thread within a loop. No program passes a step at which a hook, a
        checkpoint or a summary is due, or takes much longer than a second, as measured, unless a longer time is given;
        results are the same as with one step at a time.
      check_replicas_every: every N steps, compare the copies that variables and optimizer slots have on
        several devices, bit by bit, and raise `ReplicaMismatchError` where they differ. Never if None. It waits for the
        steps before it, and reads all copies once.

      resume_input: where `train` begins its input if it resumes from a checkpoint of an earlier process, or of a
        `train` that failed. "position": at the position in the checkpoint, if the input's iterator has `get_state` and
        `set_state`, as the iterators of `est.inputs` and grain have; any other starts from its beginning. "count": any
        other input skips as many batches as were taken. If None, every input starts from its beginning, as in
        TensorFlow, and as it always does after a run that came to the end of its input, and in a further `train` of the
        same Estimator unless the one before failed after a save.

      eval_loss_over: "batches": the "loss" that `evaluate` returns is the mean of the losses of batches, as in
        TensorFlow, where an example of a small last batch counts for more; "examples": the mean over all examples.

      compilation_cache_dir: where jax keeps compiled programs, so that the next process starts its first step without
        compiling them again: those that take XLA a second or longer, unless
        `jax_persistent_cache_min_compile_time_secs` says otherwise. It holds for the whole process. None leaves it to
        jax's own setting.

      limits: the seconds that several processes may stay in a phase of a run before all of them end, for what has
        started them to start them again: an `est.Limits`. If None, they may wait for ever. One process has no limit.

      verbose: whether a program in which nobody has set a level of logging, by `logging`, `absl.logging` or `app.run`,
        shows the log on stderr from INFO on, and whether a terminal or a notebook shows progress bars.

      trackers: get what is written for TensorBoard, too, with these settings and the params: a list of
        `est.trackers.CsvTracker`, `MLflowTracker`, `WandbTracker`, or your own. Of several processes the chief's do.

      train_distribute, eval_distribute: strategies, such as `replicate.MirroredStrategy(num_gpus=4)`: an Estimator runs
        its model_fn in their towers, as `replicate_model_fn` does, and optimizers need no `TowerOptimizer`. The first
        is for training and predictions, and for evaluation too if the second is None. If both are None, the model_fn
        runs as it is.

    Raises:
      ValueError: a field has a value that it cannot have, or `save_checkpoints_steps` and
        `save_checkpoints_secs` are both given and not None.
      TypeError: a field is one of TensorFlow's that has another name, or another form, here.
    """

    model_dir: str | None = None
    seed: int = 0
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = _UNSET
    save_checkpoints_secs: float | None = _UNSET
    save_checkpoints_async: bool = True
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float | None = None
    log_step_count_steps: int | None = _Default(100)
    steps_per_loop: int | str = "auto"
    check_replicas_every: int | None = None
    resume_input: str | None = "position"
    eval_loss_over: str = "batches"
    compilation_cache_dir: str | None = None
    limits: Limits | None = Limits()
    verbose: bool = True
    trackers: Sequence[Any] = ()
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Before `__init__`, whose TypeError for an unknown field could not say what to write.
        for name in kwargs.keys() - {field.name for field in dataclasses.fields(cls)} & _REPLACED.keys():
            raise TypeError(f"RunConfig has no `{name}`, as TensorFlow's has: {_REPLACED[name]}; got {kwargs[name]!r}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_path("model_dir", "to leave it to the Estimator")
        self._check_path("compilation_cache_dir", "to leave it to jax")
        self._check_saving()
        if not _is_number(self.seed, int):
            raise ValueError(f"`seed` should be an int, say `RunConfig(seed=0)`; got {self.seed!r}.")
        if self.keep_checkpoint_max is not None:
            _check_int("keep_checkpoint_max", self.keep_checkpoint_max, 0, ", or None to keep all")
        hours = self.keep_checkpoint_every_n_hours
        if hours is not None and not (_is_number(hours, (int, float)) and hours > 0):
            raise ValueError(
                f"`keep_checkpoint_every_n_hours` should be a number > 0, or None to keep none longer; got {hours!r}."
            )
        if self.save_summary_steps is not None:
            _check_int("save_summary_steps", self.save_summary_steps, 0, ", or None never to write summaries")
        object.__setattr__(self, "save_summary_steps", self.save_summary_steps or None)
        if self.log_step_count_steps is not None:
            _check_int("log_step_count_steps", self.log_step_count_steps, 1, ", or None not to log")
        # `seconds` returns 0.0 for a time of zero, which is refused here like any other text.
        if self.steps_per_loop != "auto" and not seconds(self.steps_per_loop):
            _check_int("steps_per_loop", self.steps_per_loop, 1, ', a time such as "0.2s", or "auto"')
        if self.eval_loss_over not in ("batches", "examples"):
            raise ValueError(f'`eval_loss_over` should be "batches" or "examples"; got {self.eval_loss_over!r}.')
        for field in ("save_checkpoints_async", "verbose"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"`{field}` should be True or False; got {getattr(self, field)!r}.")
        if self.resume_input not in ("position", "count", None):
            raise ValueError(f'`resume_input` should be "position", "count" or None; got {self.resume_input!r}.')
        if self.limits is not None and not isinstance(self.limits, Limits):
            raise ValueError(
                f"`limits` should be an `est.Limits`, say `RunConfig(limits=est.Limits(step=600))`, or None; got "
                f"{self.limits!r}."
            )
        if self.check_replicas_every is not None:
            _check_int("check_replicas_every", self.check_replicas_every, 1, ", or None never to check")
        for field in _STRATEGIES:
            given = getattr(self, field)
            if given is not None and (isinstance(given, type) or not isinstance(given, Strategy)):
                raise ValueError(
                    f"`{field}` should be a strategy, say `replicate.MirroredStrategy()`, or None; got {given!r}."
                )
        given = self.trackers
        if not isinstance(given, list | tuple) or not all(_is_tracker(each) for each in given):
            raise ValueError(
                f"`trackers` should be a list of trackers, say `[est.trackers.CsvTracker()]`; got {given!r}."
            )
        object.__setattr__(self, "trackers", tuple(given))

    def _check_path(self, field: str, without: str) -> None:
        given = path = getattr(self, field)
        if isinstance(path, os.PathLike):
            path = os.fspath(path)
        if isinstance(path, str):
            path = path.removeprefix("file://")  # a local path, with locks
        if path is not None and (not isinstance(path, str) or not path):
            raise ValueError(f"`{field}` should be a non-empty path, or None {without}; got {given!r}.")
        object.__setattr__(self, field, path)

    def _check_saving(self) -> None:
        steps, secs = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is _UNSET and secs is _UNSET:
            secs = _DEFAULT_SAVE_SECS
        steps = None if steps is _UNSET else steps
        secs = None if secs is _UNSET else secs
        if steps is not None and secs is not None:
            raise ValueError(
                "`save_checkpoints_steps` and `save_checkpoints_secs` cannot be both set. "
                f"Give one of them, or None for the other; got {steps!r} and {secs!r}."
            )
        if steps is not None:
            _check_int("save_checkpoints_steps", steps, 0, ", or None not to save by steps")
        if secs is not None and not (_is_number(secs, (int, float)) and secs >= 0):
            raise ValueError(
                f"`save_checkpoints_secs` should be a number >= 0, or None not to save by time; got {secs!r}."
            )
        # 0 means never, as None does: whoever reads the fields has one case to look at.
        object.__setattr__(self, "save_checkpoints_steps", steps or None)
        object.__setattr__(self, "save_checkpoints_secs", secs or None)

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, "RunConfig", name)

    @property
    def is_chief(self) -> bool:
        """True in the one process, of those that run together, that writes."""
        return self.process_index == 0

    @property
    def process_index(self) -> int:
        # Asked only here: it starts jax's backends, which must not happen before `initialize_distributed`.
        return jax.process_index()

    @property
    def process_count(self) -> int:
        return jax.process_count()

    def replace(self, **kwargs: Any) -> RunConfig:
        """Returns a copy with other values for the named fields, checked like any new one.

        As in TensorFlow, a new value of one of `save_checkpoints_steps` and `save_checkpoints_secs` turns the other
        off; None does not.

        >>> config = RunConfig().replace(save_checkpoints_steps=10)
        >>> config.save_checkpoints_steps, config.save_checkpoints_secs
        (10, None)

        Args:
          **kwargs: fields of `RunConfig` and their new values.

        Raises:
          ValueError: a name is not a field, or a value is not one that the field can have.
        """
        allowed = [field.name for field in dataclasses.fields(self) if field.init]
        for name in kwargs:
            if name not in allowed:
                instead = f" As in RunConfig(...): {_REPLACED[name]}." if name in _REPLACED else ""
                raise ValueError(
                    f"Replacing `{name}` is not supported. Allowed fields are {allowed}; got {name}={kwargs[name]!r}."
                    f"{instead}"
                )
        for name, other in (_SAVING, _SAVING[::-1]):
            if kwargs.get(name) is not None:
                kwargs.setdefault(other, None)
        return dataclasses.replace(self, **kwargs)
