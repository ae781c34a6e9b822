"""Several devices on a machine that has one."""

from __future__ import annotations

import jax


def simulate_devices(n: int) -> None:
    """Makes jax see `n` CPU devices, all of which compute on this machine's cores.

    To be called before jax is used, since jax counts the devices once: at the head of `conftest.py`, or of a script.

    Raises:
      RuntimeError: jax has already started with another number of CPU devices.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"simulate_devices takes a positive int; got {n!r}.")
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError as error:
        raise RuntimeError(
            f"simulate_devices({n}) was called after jax had started with {len(jax.devices('cpu'))} CPU device(s), "
            "which cannot be changed any more. Call it before the first array is made and before `jax.devices()`: at "
            "the head of conftest.py or of the script, and before any import that uses jax."
        ) from error
