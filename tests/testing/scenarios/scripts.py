"""A process that has imported what most scripts import, which takes seconds; its copies run scripts."""

import os
import runpy
import sys

import jax
import optax  # noqa: F401
import sklearn.datasets  # noqa: F401

import estimator  # noqa: F401
import replicate  # noqa: F401


def run(out, err, folder, environment, path, *args):
    """As `python path *args` in a folder; what it writes goes to two files."""
    for file, number in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    os.chdir(folder)
    jax.config.update("jax_compilation_cache_dir", None)  # that of the tests
    jax.config.update("jax_num_cpu_devices", -1)
    sys.argv, sys.path[0] = [path, *args], os.path.dirname(path)
    runpy.run_path(path, run_name="__main__")
