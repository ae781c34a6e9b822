"""Python and jax around a run: signals, forks, streams, threads, memory, transformations."""
