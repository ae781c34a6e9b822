"""Shows the checkpoints in a model_dir, the variables in one, what changed between two, which are damaged, or how the
training has spent its time.

    python -m estimator.inspect MODEL_DIR
    python -m estimator.inspect MODEL_DIR --variables
    python -m estimator.inspect MODEL_DIR --diff 1000 2000
    python -m estimator.inspect MODEL_DIR --verify
    python -m estimator.inspect MODEL_DIR --time

It only reads, on the CPU: training may run in the directory.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from estimator._goodput import NoTimesError, goodput
from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError
from estimator.checkpoint._model_dir import CheckpointInfo, checkpoints
from estimator.checkpoint._named_arrays import ShapeDtype, describe
from estimator.checkpoint._newest import newest_readable
from estimator.runtime._table import align, show_bytes
from estimator.storage._files import expand, normalize
from estimator.storage._sealed_folder import DamagedError

_BYTES_AT_A_TIME = 2**28


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, or the given arguments, and prints what it asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m estimator.inspect", description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("model_dir", help="the model_dir of an Estimator, or the path of a checkpoint")
    shows = parser.add_mutually_exclusive_group()
    shows.add_argument(
        "--variables",
        action="store_true",
        help="the names, shapes, dtypes and norms of variables and optimizer slots in the newest checkpoint",
    )
    shows.add_argument(
        "--diff", nargs=2, type=int, metavar="STEP", help="what differs between the checkpoints of two steps"
    )
    shows.add_argument(
        "--verify",
        action="store_true",
        help="compare the checksums of all files in all checkpoints; the exit status is 1 if one is damaged",
    )
    shows.add_argument(
        "--time",
        action="store_true",
        help="the shares of the time since the training began: input, host, device, checkpoint, evaluation ...",
    )
    args = parser.parse_args(arguments)
    # Training may run at the same time and use the memory of the GPU.
    jax.config.update("jax_platforms", "cpu")
    try:
        path = normalize(expand(args.model_dir))
        model_dir, one = (path, None) if not Checkpoint(path).exists() else (os.path.dirname(path) or ".", path)
        infos = checkpoints(model_dir)
        if not infos:
            raise FileNotFoundError(f"There is no checkpoint in {args.model_dir!r}.")
        if args.verify:
            _verify([each for each in infos if one in (None, each.path)])
        elif args.diff:
            _print_lines(_diff(*(_find_step(infos, step) for step in args.diff)))
        elif args.time:
            print(goodput(args.model_dir))
        elif args.variables or one:
            checkpoint = Checkpoint(one) if one else newest_readable(model_dir, Checkpoint.check_sound)
            assert checkpoint is not None
            _print_lines(_variables(checkpoint))
        else:
            print(infos)
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head`, which has read enough: nothing more is written, not at the exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (FileNotFoundError, NotACheckpointError, DamagedError, NoTimesError) as error:
        raise SystemExit(str(error)) from None


def _print_lines(lines: Iterator[str]) -> None:
    for line in lines:
        print(line)


def _find_step(infos: Sequence[CheckpointInfo], step: int) -> Checkpoint:
    for each in infos:
        if each.step == step:
            return Checkpoint(each.path)
    steps = ", ".join(str(each.step) for each in infos)
    raise FileNotFoundError(f"There is no checkpoint of step {step}; there are checkpoints of steps {steps}.")


def _verify(infos: Sequence[CheckpointInfo]) -> None:
    damages = []
    for each in infos:
        try:
            has_sums = Checkpoint(each.path).is_sealed()
            Checkpoint(each.path).verify().names()
        except NotACheckpointError:  # it was removed meanwhile
            continue
        except DamagedError as error:
            damages.append(each.path)
            print(f"{each.path}: damaged: {error.reason}")
        else:
            print(f"{each.path}: {'sound' if has_sums else 'cannot be verified, it has no checksums'}")
    if damages:
        raise SystemExit(1)


def _variables(checkpoint: Checkpoint) -> Iterator[str]:
    with checkpoint.hold():
        shapes, variables = checkpoint.shapes(), checkpoint.shapes(slots=False)
        norms = {name: _norm(array) for name, array in _arrays(checkpoint, shapes)}
    # Not held while lines are printed, which may take long in a pipe.
    yield checkpoint.path
    for title, names in (("variable", [*variables]), ("optimizer slot", [x for x in shapes if x not in variables])):
        if names:
            rows = [(name, *_kind(shapes[name]), f"{norms[name]:.6g}") for name in sorted(names)]
            yield ""
            yield from align([(title, "shape", "dtype", "norm"), *rows], "<<<>")
            numbers = sum(math.prod(shapes[name].shape) for name in names)
            size = sum(math.prod(shapes[name].shape) * np.dtype(shapes[name].dtype).itemsize for name in names)
            yield f"{numbers:,} numbers, {show_bytes(size)}"


def _diff(first: Checkpoint, second: Checkpoint) -> Iterator[str]:
    # Both at once: a training run in the directory could remove one while the other is read.
    with first.hold(), second.hold():
        before, after = first.shapes(), second.shapes()
        same_kind = {name: x for name, x in before.items() if name in after and _kind(x) == _kind(after[name])}
        rows, unchanged = [], []
        # Bytes are compared, so that NaN equals NaN.
        for (name, old), (_, new) in zip(_arrays(first, same_kind), _arrays(second, same_kind), strict=True):
            if old.tobytes() == new.tobytes():
                unchanged.append(name)
            else:
                change = _norm(_numbers(new) - _numbers(old))
                rows.append((name, *_kind(before[name]), f"{_norm(old):.6g}", f"{_norm(new):.6g}", f"{change:.6g}"))
    yield f"{first.path} and {second.path}"
    if rows:
        yield ""
        titles = ("changed", "shape", "dtype", f"norm at {first.step}", f"norm at {second.step}", "of change")
        yield from align([titles, *sorted(rows)], "<<<>>>")
    for name in sorted(before.keys() & after.keys() - same_kind.keys()):
        yield f"other shape or dtype: {name}, {describe(before[name])}, then {describe(after[name])}"
    for checkpoint, names in ((first, before.keys() - after.keys()), (second, after.keys() - before.keys())):
        for name in sorted(names):
            yield f"only at step {checkpoint.step}: {name}, {describe((before | after)[name])}"
    if unchanged:
        yield f"unchanged: {', '.join(sorted(unchanged))}"


def _arrays(checkpoint: Checkpoint, shapes: Mapping[str, ShapeDtype]) -> Iterator[tuple[str, np.ndarray]]:
    """Reads the arrays of these names; yields them by name."""
    # A few at a time: a checkpoint may be larger than the memory.
    names: list[str] = []
    size = 0
    for name, each in shapes.items():
        names.append(name)
        size += math.prod(each.shape) * np.dtype(each.dtype).itemsize
        if size >= _BYTES_AT_A_TIME:
            yield from checkpoint.read_all(names).items()
            names, size = [], 0
    yield from checkpoint.read_all(names).items()


def _numbers(array: np.ndarray) -> np.ndarray:
    # In double precision: squares overflow in half precision, and differences of integers wrap around.
    is_complex = np.issubdtype(array.dtype, np.complexfloating)
    return array.astype(np.complex128 if is_complex else np.float64)


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(_numbers(array).reshape(-1)))


def _kind(array: ShapeDtype) -> tuple[str, str]:
    return str([*array.shape]), np.dtype(array.dtype).name


if __name__ == "__main__":
    main()
