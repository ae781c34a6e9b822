import pytest
from testing.estimators import make


@pytest.fixture(scope="package")
def unsaved(tmp_path_factory):
    """An Estimator that saves nothing, so that each training is its first; compiled once."""
    return make(tmp_path_factory.mktemp("unsaved"), save_checkpoints_steps=None)
