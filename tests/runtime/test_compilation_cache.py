import jax
import pytest
from testing.cluster import shared_cluster

import estimator as est


def hits(directory):
    (ended,) = shared_cluster().run("testing.scenarios.lives.count_cache_hits", directory, processes=1)
    assert ended.code == 0, ended.lines
    return int(ended.lines[-1])


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
