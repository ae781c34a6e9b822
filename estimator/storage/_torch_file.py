"""Files of PyTorch: what `torch.save(model.state_dict(), path)` wrote."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from estimator.runtime._extras import import_extra
from estimator.storage._array_files import Kind, Reader

_MOST_VALUES = 1_000_000


class TorchFile(Reader):
    """The tensors of a file by name; those in dicts within it, such as "state_dict", have names joined by "."."""

    def __init__(self, caller: str, path: str) -> None:
        otherwise = f" Or save the weights of {path!r} as a .safetensors file, which is read without it."
        torch = import_extra(caller, "torch", "torch", otherwise)
        self.path = path
        try:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as file:
                    if any(member.compress_type for member in file.infolist()):
                        raise ValueError("it is compressed, as torch writes no file.")
            # Only tensors: another pickle may run code when it is read.
            saved = torch.load(path, map_location="cpu", weights_only=True)
            self._tensors = _tensors(torch, saved)
            self.shapes = {name: Kind(tuple(x.shape), _dtype(x)) for name, x in self._tensors.items()}
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # parsing bytes raises many kinds
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"`{caller}` cannot read {path!r} as weights of PyTorch: {type(error).__name__}: {reason} Write it by "
                "`torch.save(model.state_dict(), path)`."
            ) from error

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        # Not before: a tensor may repeat the bytes that it has in the file without end.
        return {name: _as_array(self._tensors[name]) for name in names}


def _tensors(torch: Any, saved: Any) -> dict[str, Any]:
    """The tensors of nested dicts; a checkpoint of a trainer has numbers and texts beside them."""
    tensors = {}
    for count, (name, value) in enumerate(_values(saved)):
        if count == _MOST_VALUES:  # of a few dicts that are in each other again and again
            raise ValueError(f"it has more than {_MOST_VALUES} values.")
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_meta:
                raise ValueError(f"its tensor {name!r} is sparse, or has no values.")
            tensors[name] = value
    return tensors


def _values(saved: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields a value, and of a dict all that is in it."""
    yield prefix, saved
    if isinstance(saved, Mapping):
        for key, value in saved.items():
            yield from _values(value, f"{prefix}.{key}" if prefix else str(key))


def _dtype(tensor: Any) -> Any:
    return jnp.dtype(str(tensor.dtype).removeprefix("torch."))


def _as_array(tensor: Any) -> np.ndarray:
    import torch

    tensor, dtype = tensor.detach().contiguous(), _dtype(tensor)
    # numpy has no bfloat16 and no float8 of its own, which torch would need; the bytes are the same.
    if not dtype.name.startswith(("bfloat", "float8")):
        return tensor.numpy()
    return tensor.view(torch.int16 if dtype.name == "bfloat16" else torch.uint8).numpy().view(dtype)
