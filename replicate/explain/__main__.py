"""Shows what one training step of a model_fn does on several devices, without running it.

    python -m replicate.explain examples.digits:model_fn --params '{"learning_rate": 0.001}' --towers 4 \\
        --features pixels=float32[64,8,8] --labels int32[64] --html step.html
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from estimator.core._mode_keys import ModeKeys
from estimator.inputs._input_fn import batches, call_input_fn
from replicate.block_sync._block_sync import BlockSync
from replicate.explain._explain import explain
from replicate.placement._distribution import VariableDistribution

# The fewest that have to talk to each other.
_CPU_TOWERS = 2
_ARRAY = re.compile(r"(?:([^=\[\]]+)=)?(\w+)\[([\d,\s]*)\]")


class _Usage(Exception):
    """Raised for an error on the command line."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, or the given arguments, and prints the explanation."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        if bool(args.input) == bool(args.features):
            raise _Usage("Give either --input, a function that returns batches, or --features, their shapes.")
        # Before anything starts jax's backends, after which there is no other number of CPU devices.
        jax.config.update("jax_num_cpu_devices", (args.towers or _CPU_TOWERS) * args.devices_per_tower)
        model_fn = _find(args.model_fn, "model_fn")
        input_fn = _find(args.input, "input_fn") if args.input else None
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # those that the module defines have their defaults
        if input_fn is None:
            features, labels = _arrays("--features", args.features), _arrays("--labels", args.labels)
        else:
            features, labels = _first_batch(args.input, input_fn, args.params)
        options = _options(args)
    except _Usage as error:
        parser.error(str(error))
    explanation = explain(
        model_fn,
        features,
        labels,
        params=args.params,
        bandwidth=args.bandwidth,
        latency=args.latency,
        **options,
    )
    if args.html:
        args.html.write_text(explanation.html(), encoding="utf-8")
    print(explanation)
    if args.html:
        print(f"\nWritten as a page: {args.html}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m replicate.explain",
        description=(__doc__ or "").split("\n", 1)[0],
        epilog="Flags that the module itself defines by absl have their defaults.",
    )
    array = "NAME=DTYPE[ROWS,...]"
    parser.add_argument("model_fn", metavar="MODULE:MODEL_FN", help="as in examples.digits:model_fn")
    parser.add_argument("--input", metavar="MODULE:INPUT_FN", help="its first batch shows what a batch looks like")
    parser.add_argument("--features", nargs="+", metavar=array, help="instead of --input; NAME= only if in a dict")
    parser.add_argument("--labels", nargs="+", metavar=array, help="likewise")
    parser.add_argument("--params", type=_params, metavar="JSON", help="params of the model_fn, a JSON object")
    parser.add_argument(
        "--towers", type=_positive, metavar="N", help="how many; by default all accelerators, or two CPU devices"
    )
    parser.add_argument(
        "--distribution", choices=[str(each) for each in VariableDistribution], help="where variables live"
    )
    parser.add_argument(
        "--devices-per-tower", type=_positive, default=1, metavar="K", help="how many devices a tower has"
    )
    parser.add_argument(
        "--block-steps",
        type=_positive,
        metavar="N",
        help="towers train on their own and are averaged every N steps (BMUF)",
    )
    parser.add_argument("--bandwidth", type=float, default=10e9, help="bytes per second between devices (%(default)g)")
    parser.add_argument("--latency", type=float, default=10e-6, help="of a message, in seconds (%(default)g)")
    parser.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write it as a page, with a picture, too")
    return parser


def _find(name: str, what: str) -> Callable[..., Any]:
    """The function that MODULE:NAME names."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise _Usage(f"A {what} is named MODULE:NAME, as in examples.digits:model_fn; got {name!r}.")
    # A path, as the completion of a shell gives it.
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("/", ".")
        raise _Usage(f"MODULE is a name to import, not a file; write {dotted}:{attribute} for {name!r}.")
    sys.path[:0] = [] if "" in sys.path or str(pathlib.Path.cwd()) in sys.path else [""]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module imports
        raise _Usage(
            f"There is no module {error.name!r}, of {name!r}, in {pathlib.Path.cwd()} or among the installed ones. "
            "Run the command where `import` finds it, or set PYTHONPATH."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        # Only what the module defines is suggested, not what it imports.
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        functions = ", ".join(n for n in own if callable(getattr(module, n)) and not n.startswith("_"))
        raise _Usage(f"The module {module_name!r} has no function {attribute!r}; it has {functions or 'none'}.")
    return function


def _first_batch(name: str, input_fn: Callable[..., object], params: object) -> tuple[Any, Any]:
    source = batches(call_input_fn(input_fn, ModeKeys.TRAIN, params, None))
    first = source.peek()
    source.close()
    if first is None:
        raise _Usage(f"{name} gives no batch.")
    return first


def _arrays(option: str, texts: Sequence[str] | None) -> Any:
    if texts is None:
        return None
    arrays = {}
    for text in texts:
        match = _ARRAY.fullmatch(text.strip())
        if not match:
            raise _Usage(f"{option} takes arrays such as x=float32[64,8] or int32[64]; got {text!r}.")
        try:
            # As in batches: without x64, float64 is float32.
            dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(match[2]))
        except TypeError:
            raise _Usage(f"{option} got {text!r}, but there is no dtype {match[2]!r}.") from None
        shape = tuple(int(n) for n in match[3].split(",") if n.strip())
        arrays[match[1]] = jax.ShapeDtypeStruct(shape, dtype)
    if len(arrays) < len(texts) or (None in arrays and len(arrays) > 1):
        raise _Usage(f"{option} takes one array without a name, or several, each with its own; got {texts}.")
    return arrays[None] if None in arrays else arrays


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    devices = sorted(jax.devices(), key=lambda device: device.id)
    count = args.towers and args.towers * args.devices_per_tower
    if count and count > len(devices):
        each = f" of {args.devices_per_tower} devices" if args.devices_per_tower > 1 else ""
        raise _Usage(
            f"--towers={args.towers}{each} are more than the {len(devices)} devices, {devices[0].platform}. "
            "For virtual CPU devices set JAX_PLATFORMS=cpu."
        )
    # No option where all devices are towers: `explain` takes none for a model_fn that is replicated already.
    if count and count < len(devices):
        options["devices"] = devices[:count]
    if args.devices_per_tower > 1:
        options["devices_per_tower"] = args.devices_per_tower
    if args.block_steps:
        options["block_sync"] = BlockSync(args.block_steps)
    if args.distribution:
        options["variable_distribution"] = VariableDistribution(args.distribution)
    return options


def _params(text: str) -> dict[str, Any]:
    try:
        params = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(params, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"learning_rate": 0.1}}')
    return params


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


if __name__ == "__main__":
    main()
