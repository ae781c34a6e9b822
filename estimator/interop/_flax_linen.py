"""Flax's Linen modules. Imports Flax, so only `flax_module` imports this file."""

from __future__ import annotations

import contextlib
from typing import Any

import flax.errors
import flax.linen as nn
import jax

from estimator.core._rng import loop_around, next_key
from estimator.interop._flax_base import FlaxModule, repeated_keys
from estimator.variables._variables import list_names


def is_module(module: Any) -> bool:
    return isinstance(module, nn.Module)


class LinenModule(FlaxModule):
    """A Linen module in one run of a model_fn."""

    _collections: list[str] | None = None  # known after the first call

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None) -> Any:
        self._follow_policy(getattr(self.module, "dtype", None), is_first=self._collections is None)
        args, kwargs = self._cast_inputs((args, kwargs))
        with nn.intercept_methods(self._set_dtype) if self._policy else contextlib.nullcontext():
            return self._run_cast(args, kwargs, method)

    def _set_dtype(self, call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """Lets a layer that says no dtype compute in the policy's, when a method of it is called."""
        assert self._policy is not None
        if getattr(context.module, "dtype", self._policy) is None:
            # Modules are frozen. This one is a copy, which Flax made for the run.
            object.__setattr__(context.module, "dtype", self._policy.compute_dtype)
        return call(*args, **kwargs)

    def _run_cast(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None) -> Any:
        loop = loop_around(self._frame)
        # Within a loop no key is drawn: it would be the same in each iteration, which is an error below.
        keys = {stream: next_key(self._frame, f"{self._name}/{stream}") for stream in self._rngs if loop is None}
        if self._collections is None:
            if self._frame.initializing:
                keys["params"] = self._initial_key()
                output, initial = self.module.init_with_output(keys, *args, method=method, **kwargs)
                # A collection without arrays cannot be a variable.
                self._collections = [name for name, value in initial.items() if jax.tree.leaves(value)]
                for name in self._collections:
                    self._get(name, initial[name])
                if self._policy is None:
                    return output
                # It was computed from parameters in float32: once more, of those that are cast.
            else:
                self._collections = self._saved_collections()
        values = {name: self._get(name) for name in self._collections}
        mutable = [name for name in values if name != "params"] if self._trains else []
        try:
            output, changed = self.module.apply(values, *args, rngs=keys, mutable=mutable, method=method, **kwargs)
        except flax.errors.InvalidRngError as e:
            if loop is None:
                raise
            raise ValueError(repeated_keys(self._name, loop)) from e
        except flax.errors.FlaxError as e:
            if values:
                raise
            raise ValueError(
                f"The variables of the module {self._name!r} are not in the state, which has "
                f"{list_names(self._frame.variables)}. A model_fn must call its modules in the mode that the state was "
                "initialized in."
            ) from e
        for name, value in changed.items():
            self._keep(name, values[name], value)
        return output

    def _saved_collections(self) -> list[str]:
        """The collections in the state: before a call the module does not know its own."""
        within = f"{self._name}/"
        names = [name.removeprefix(within) for name in self._frame.variables if name.startswith(within)]
        others = [n for n in names if "/" not in n and self._variable(n) not in self._frame.declared.trainable]
        return [*(["params"] if self._name in self._frame.variables else []), *others]
