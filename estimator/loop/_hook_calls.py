"""Hooks around a run: which are due when, and their calls in order."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import logging

from estimator.core._hook import Hook, RunValues
from estimator.core._record import Report
from estimator.core._train_op import StepReport
from estimator.core._typing import PyTree
from estimator.loop._context import RunContext


@contextlib.contextmanager
def around(hooks: Sequence[Hook], context: RunContext) -> Iterator[None]:
    """Calls `begin` of all hooks before the block. After it, whatever happened, calls `end` of those whose `begin` was
    called."""
    begun: list[Hook] = []
    try:
        for hook in hooks:
            # Before its `begin`: a hook that fails in there gets its `end` too, and can undo what it has done.
            begun.append(hook)
            _call(hook, "begin")
        yield
    except BaseException as error:
        if isinstance(error, GeneratorExit):  # which closes the results of `predict`, and is not an error
            context.stop("closed")
        else:
            from estimator.multihost._supervisor import SUPERVISOR

            context.error = SUPERVISOR.explain(error)
            context.stop("error")
            if context.error is not error:
                raise context.error from error
        raise
    finally:
        try:
            _end(begun, context)
        finally:
            # After the last `end`, in which hooks may still write events.
            context.close()


def _end(hooks: Sequence[Hook], context: RunContext) -> None:
    """The first error of a hook is raised once all have ended, unless the run has one already."""
    context.phase = "end"
    raised: BaseException | None = None
    for hook in hooks:
        try:
            _call(hook, "end", context)
        except BaseException as error:
            if context.is_asked_by(error):  # raised again when all have ended
                continue
            if context.error is None:
                raised = context.error = error
            else:
                logging.exception("%r failed in its `end`, after the error that ended the run.", hook)
    if raised is not None:
        raise raised


def states(hooks: Sequence[Hook]) -> dict[str, Any]:
    """The states of hooks, by their class and their number among the hooks of this class."""
    by_name = {name: hook.get_state() for name, hook in _name_hooks(hooks).items()}
    return {name: state for name, state in by_name.items() if state is not None}


def set_states(hooks: Sequence[Hook], saved: dict[str, Any]) -> None:
    for name, hook in _name_hooks(hooks).items():
        if name in saved:
            hook.set_state(saved[name])


def _name_hooks(hooks: Sequence[Hook]) -> dict[str, Hook]:
    seen: Counter[str] = Counter()
    named = {}
    for hook in hooks:
        # Numbered within its class, so that a new hook of another class does not shift the states that a run resumes.
        name = type(hook).__name__
        seen[name] += 1
        named[f"{name}/{seen[name]}"] = hook
    return named


def before(due: Sequence[Hook], context: RunContext) -> list[PyTree]:
    """The names of the values that each hook requests.

    Raises:
      TypeError: one is not a name.
    """
    if not due:
        return []
    requests: list[PyTree] = [None] * len(due)
    asking = [i for i, hook in enumerate(due) if getattr(hook.before_run, "__func__", None) is not Hook.before_run]
    for i in asking:
        with context.in_phase("hook"):
            requests[i] = _unless_preempted(due[i], "before_run", context)
        for name in _leaves(requests[i]):
            if not isinstance(name, str):
                raise TypeError(
                    f"{due[i]!r}.before_run requested {name!r}, but values are requested by their names: report it by "
                    "`est.record(name, value)` in the model_fn, and return the name."
                )
    return requests


def after(
    due: Sequence[Hook],
    context: RunContext,
    requests: Sequence[PyTree],
    losses: jax.Array | None,
    steps: int,
    reported: dict[str, Report],
    report: StepReport | None = None,
) -> None:
    """Passes to each hook its values of the last of some steps."""
    if not due:
        return
    before, context.phase = context.phase, "hook"  # at every step maybe: `in_phase` takes twice as long
    try:
        for hook, names in zip(due, requests, strict=True):
            values = RunValues(losses, steps, reported, names, report, context.reported)
            _unless_preempted(hook, "after_run", context, values)
        # A round of all processes, which have the same hooks due at the same steps (`next_chunk`).
        context.agree_to_stop()
    finally:
        context.phase = before


def requests_values(requests: Sequence[PyTree], context: RunContext) -> bool:
    """Returns whether any hook requests more than the loss; of several processes, a hook of the chief."""
    # A step that reports is another program, and all processes have to start the same one.
    return bool(requests) and context.agreed(
        lambda: any(name != "loss" for names in requests for name in _leaves(names))
    )


def _leaves(names: PyTree) -> list[Any]:
    return [] if names is None else jax.tree.leaves(names)  # most hooks request nothing, at every step maybe


def create_state(hooks: Sequence[Hook], context: RunContext) -> None:
    """Calls `after_create_state` of all hooks."""
    for hook in hooks:
        _call(hook, "after_create_state", context)
    if hooks:
        context.agree_to_stop()


def _unless_preempted(hook: Hook, method: str, context: RunContext, *args: Any) -> Any:
    try:
        return _call(hook, method, context, *args)
    except (SystemExit, KeyboardInterrupt) as error:  # out of an evaluation in a hook; this run stops as well
        if not context.is_asked_by(error):
            raise
    return None


def _call(hook: Hook, method: str, *args: Any) -> Any:
    """A StopIteration, which would pass for the end of an input, becomes an error as any other."""
    try:
        return getattr(hook, method)(*args)
    except StopIteration as error:
        raise RuntimeError(
            f"{hook!r}.{method} raised StopIteration, perhaps by `next` of an iterator that has ended. To end the run, "
            "call `context.request_stop()`."
        ) from error
