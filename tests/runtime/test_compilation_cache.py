import os
import subprocess
import sys

import jax
import pytest

import estimator as est

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import optax
import estimator as est

def model_fn(features, labels, mode):
    loss = jnp.mean((features - est.get_variable("w", ())) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jnp.ones(3) + 1  # a program before the Estimator does not matter
config = est.RunConfig(compilation_cache_dir=sys.argv[1], save_checkpoints_secs=None)
est.Estimator(model_fn, config=config).train(lambda: [jnp.ones(4)])
print(sum(hits))
"""


def hits(directory):
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-c", PROGRAM, str(directory)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


@pytest.mark.slow
def test_the_next_process_does_not_compile_again(tmp_path):
    of_itself = hits(tmp_path)  # of programs that it compiles twice
    assert hits(tmp_path) >= of_itself + 2  # initial values, and the step


def test_a_process_has_one_cache(tmp_path):
    present = jax.config.jax_compilation_cache_dir  # the tests' own
    config = est.RunConfig(compilation_cache_dir=tmp_path / "other")
    with pytest.raises(ValueError, match=f"other'\\)`: this process keeps .* in '{present}' already"):
        est.Estimator(lambda features: None, config=config)
    est.Estimator(lambda features: None, config=config.replace(compilation_cache_dir=present))


@pytest.mark.parametrize("path", ["", 3])
def test_the_directory_is_a_path(path):
    with pytest.raises(ValueError, match=f"`compilation_cache_dir` should be a non-empty path.* got {path!r}"):
        est.RunConfig(compilation_cache_dir=path)
