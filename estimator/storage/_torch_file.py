"""Files of PyTorch: what `torch.save(model.state_dict(), path)` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from estimator.storage._array_files import Kind, Reader


class TorchFile(Reader):
    """The tensors of a file by name; those in dicts within it, such as "state_dict", have names joined by "."."""

    def __init__(self, caller: str, path: str) -> None:
        try:
            import torch
        except ImportError as error:
            raise ImportError(
                f"`{caller}` needs PyTorch to read {path!r}. Install it: pip install 'replicate-model-fn[torch]'. Or "
                "save the weights as a .safetensors file, which is read without it."
            ) from error
        self.path = path
        try:
            # Tensors alone: another pickle may run code when it is read.
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # parsing bytes raises many kinds
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"`{caller}` cannot read {path!r} as weights of PyTorch: {type(error).__name__}: {reason} Write it by "
                "`torch.save(model.state_dict(), path)`."
            ) from error
        self._arrays = {name: _as_array(torch, x) for name, x in _tensors(torch, saved)}
        self.shapes = {name: Kind(x.shape, x.dtype) for name, x in self._arrays.items()}

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self._arrays[name] for name in names}


def _tensors(torch: Any, saved: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors of nested dicts; a checkpoint of a trainer has numbers and texts beside them."""
    if isinstance(saved, torch.Tensor):
        yield prefix, saved
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            yield from _tensors(torch, value, f"{prefix}.{key}" if prefix else str(key))


def _as_array(torch: Any, tensor: Any) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    # numpy has no bfloat16 of its own, which torch would need; the bytes are the same.
    return tensor.view(torch.int16).numpy().view(jnp.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
