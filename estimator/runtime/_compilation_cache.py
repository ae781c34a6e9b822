"""jax's compilation cache, as a RunConfig asks for it."""

from __future__ import annotations

import jax


def use_compilation_cache(directory: str) -> None:
    """Lets jax keep compiled programs in a directory, from now to the end of the process."""
    present = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if present not in (None, directory):
        raise ValueError(
            f"`RunConfig(compilation_cache_dir={directory!r})`: this process keeps compiled programs in {present!r} "
            "already, and jax has one such directory for a process. Give that one, or leave it out."
        )
    jax.config.update("jax_compilation_cache_dir", directory)
