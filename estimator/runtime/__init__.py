"""What a run needs of Python and jax around it: signals, forks, streams, threads, memory, transformations."""
