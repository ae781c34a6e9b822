"""Strategies for `RunConfig(train_distribute=...)`: towers by configuration, with TensorFlow's names."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from estimator import EstimatorSpec, Reduction
from estimator.replication import Frame, ModelRun, reductions
from estimator.typing import Features, Labels, ModelFn
from replicate._replicate_model_fn import replicate_model_fn
from replicate.cross_tower_ops import CrossTowerOps
from replicate.placement._distribution import VariableDistribution
from replicate.towers._devices import find_devices, in_towers_of

_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(replicate_model_fn).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "cross_tower_ops"
}
# Of TensorFlow's strategies, and what to write instead.
_METHODS = {
    "num_towers": "write `num_replicas_in_sync`",
    "num_replicas": "write `num_replicas_in_sync`",
    "worker_devices": "`replicate.explain` names the devices",
    "distribute_dataset": "an input_fn gives whole batches, which are split over the towers",
    "experimental_distribute_dataset": "an input_fn gives whole batches, which are split over the towers",
    "make_input_fn_iterator": "an input_fn gives whole batches, which are split over the towers",
    "call_for_each_tower": "the Estimator runs the model_fn in each tower",
    "call_for_each_replica": "the Estimator runs the model_fn in each tower",
    "experimental_run_v2": "the Estimator runs the model_fn in each tower",
    "run": "the Estimator runs the model_fn in each tower",
    "reduce": "write `cross_tower_sum` or `cross_tower_mean` in the model_fn",
    "extended": "the Estimator places variables and sums gradients",
}


class MirroredStrategy:
    """The settings of towers for `est.RunConfig(train_distribute=...)`: a copy of the variables on each of the devices.

    An Estimator with it runs its model_fn as `replicate_model_fn` would, with the same numbers to the bit; optimizers
    need no `TowerOptimizer`, and canned Estimators run in towers too. In TensorFlow each tower took a batch of the
    input_fn to itself. Here the towers split each batch: multiply the batch size by `num_replicas_in_sync` to keep the
    rows of a tower.

    >>> import estimator as est, numpy as np, optax, tempfile
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (1, 1))
    ...     loss = est.losses.mean_squared_error(labels, features @ w)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> strategy = MirroredStrategy(num_gpus=2)
    >>> strategy.num_replicas_in_sync
    2
    >>> config = est.RunConfig(model_dir=tempfile.mkdtemp(), train_distribute=strategy)
    >>> x = np.array([[1.0], [2.0]], np.float32)
    >>> estimator = est.Estimator(model_fn, config=config).train(lambda: [(x, 3 * x)] * 50)
    >>> print(estimator.get_variable_value("w"))
    [[3.]]

    Args:
      num_gpus: the number of towers in each process, on its first GPUs or TPU cores or, if there are none, CPU devices.
        0 is one tower on the CPU. All if None.
      devices: one per tower, instead of `num_gpus`; as for `replicate_model_fn`.
      cross_tower_ops: as for `replicate_model_fn`.
      num_gpus_per_worker, cross_device_ops: TensorFlow's other names of `num_gpus` and `cross_tower_ops`.
      loss_reduction: as for `replicate_model_fn`. If None, a mean; a loss that `est.losses` or a head returns with
        `Reduction.SUM` is then an error.
      **options: the others of `replicate_model_fn`, such as `check` and `devices_per_tower`.

    Raises:
      TypeError: an argument is unknown, given under both names, or of another kind.
      ValueError: there are fewer devices than `num_gpus` says, or the devices are not of all processes, as soon as an
        Estimator is made.
    """

    _defaults: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        num_gpus: int | None = None,
        devices: Sequence[jax.Device | str] | None = None,
        cross_tower_ops: CrossTowerOps | None = None,
        *,
        num_gpus_per_worker: int | None = None,
        cross_device_ops: CrossTowerOps | None = None,
        loss_reduction: str | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        for option in options:
            if option not in _OPTIONS:
                raise TypeError(
                    f"{name} got an unknown argument {option}={options[option]!r}. It takes num_gpus, devices, "
                    f"loss_reduction, cross_tower_ops, {', '.join(_OPTIONS)}."
                )
        number = _one_of(name, num_gpus=num_gpus, num_gpus_per_worker=num_gpus_per_worker)
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            raise TypeError(
                f"{name} needs a number of devices as `num_gpus`; got {number!r}. Name devices by "
                f'{name}(devices=["/gpu:0", "/gpu:1"]).'
            )
        self._number, self._devices = number, devices
        _one_of(name, num_gpus=number, devices=devices)
        ops = _one_of(name, cross_tower_ops=cross_tower_ops, cross_device_ops=cross_device_ops)
        self._reduction = None if loss_reduction is None else Reduction(loss_reduction)
        self._options = {**self._defaults, "cross_tower_ops": ops, **options}

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of towers, of all processes."""
        size = self._options.get("devices_per_tower", 1)
        return len(in_towers_of(size, find_devices(self._find_devices(), repeated=True)))

    def replicate(self, model_fn: ModelFn) -> ModelFn:
        """The model_fn in towers; an Estimator calls this."""
        self._check_processes()
        reduction = Reduction.SUM_BY_NONZERO_WEIGHTS if self._reduction is None else self._reduction

        def model_fn_of_towers(
            features: Features, labels: Labels, mode: str, params: Any = None, config: Any = None
        ) -> EstimatorSpec:
            run = ModelRun.begin(type(self).__name__, model_fn, features, labels, mode, params, config)
            spec = run.call(run.batch)
            if self._reduction is None:
                self._check_reductions(run.frame)
            # Whoever asks for towers by name means every optimizer.
            for update in spec.train_op.updates if spec.train_op else ():
                update.optimizer.sums_over_towers = True
            return spec

        return replicate_model_fn(model_fn_of_towers, reduction, self._find_devices(), **self._options)

    def scope(self) -> None:
        """An error: nothing has to be created within a scope here."""
        raise RuntimeError(
            f"{type(self).__name__}.scope() is not needed: an Estimator runs its model_fn in the towers by itself. "
            "Leave out the `with`, and give the strategy to `est.RunConfig(train_distribute=...)`."
        )

    def __repr__(self) -> str:
        given = {"num_gpus": self._number, "devices": self._devices, "loss_reduction": self._reduction, **self._options}
        usual = _OPTIONS | self._defaults
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != usual.get(name))
        return f"{type(self).__name__}({shown})"

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            hint = f": {_METHODS[name]}" if name in _METHODS else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}.")

    def _check_processes(self) -> None:
        processes = {device.process_index for device in find_devices(self._find_devices(), repeated=True)}
        shared = self._options.get("variable_distribution", "").startswith("shared")
        if jax.process_count() > 1 and (shared or len(processes) < jax.process_count()):
            what = "variables" if shared else "towers"
            raise ValueError(
                f"jax runs on {jax.process_count()} processes, but {self!r} has its {what} on devices of one process. "
                "Write `replicate.CollectiveAllReduceStrategy()`, whose towers are on the devices of all processes, or "
                "`(num_gpus_per_worker=n)` for n of each."
            )

    def _check_reductions(self, frame: Frame) -> None:
        name = type(self).__name__
        if any(reduction == Reduction.SUM for _, reduction in reductions(frame)):
            raise ValueError(
                f"The model_fn, or its head, takes a loss with Reduction.SUM, and {name} has no loss_reduction: is "
                f"the loss a sum over the examples, or a mean? Write {name}(loss_reduction=est.Reduction.SUM), which "
                f"adds up the losses of the towers, or {name}(loss_reduction=est.Reduction.MEAN), for their mean."
            )

    def _find_devices(self) -> Sequence[jax.Device | str] | None:
        if self._number is None:
            return self._devices
        if self._number == 0:
            return ["/cpu:0"]
        by_process = [list(each) for _, each in itertools.groupby(find_devices(None), lambda x: x.process_index)]
        there = min(by_process, key=len)
        if len(there) < self._number:
            raise ValueError(
                f"{self!r} needs {self._number} devices; the process has {', '.join(map(str, there))}. Give fewer, or "
                "leave num_gpus out for all. To try towers without GPUs, make CPU devices, first of all: "
                f'`jax.config.update("jax_num_cpu_devices", {self._number})`.'
            )
        return [device for devices in by_process for device in devices[: self._number]]


class CollectiveAllReduceStrategy(MirroredStrategy):
    """`MirroredStrategy` by its name for several workers: the towers are on the devices of all processes that
    `replicate.initialize_distributed` has joined. It takes the same arguments."""


class ParameterServerStrategy(MirroredStrategy):
    """The settings of towers in one process whose variables are on one device, which sums the gradients: the CPU, or,
    with one tower, the tower's device. It takes the arguments of `MirroredStrategy`."""

    _defaults = {"variable_distribution": VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER}


class OneDeviceStrategy(MirroredStrategy):
    """The settings of one tower on a device.

    Args:
      device: a `jax.Device`, or a name such as "/gpu:0".
      **options: as for `MirroredStrategy`.
    """

    def __init__(self, device: jax.Device | str, **options: Any) -> None:
        super().__init__(devices=[device], **options)


def _one_of(caller: str, **given: Any) -> Any:
    """The one value of two that is given; None if neither is."""
    (name, value), (other, second) = given.items()
    if value is not None and second is not None:
        raise TypeError(f"{caller} got both {name}={value!r} and {other}={second!r}. Give one of them.")
    return second if value is None else value
