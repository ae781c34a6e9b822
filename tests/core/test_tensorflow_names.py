"""Names that TensorFlow had, and this library has otherwise."""

import pytest

import estimator as est
from estimator.core import _tensorflow_names


@pytest.mark.parametrize("name", _tensorflow_names.NAMES)
def test_names_of_tensorflow_are_errors_that_say_what_is_there_instead(name):
    with pytest.raises(AttributeError, match=f"module 'estimator' has no attribute '{name}'; here it is .*\\."):
        getattr(est, name)


def test_other_names_are_missing_as_ever():
    with pytest.raises(AttributeError, match=r"module 'estimator' has no attribute 'nonsense'\."):
        est.nonsense  # noqa: B018
    assert not hasattr(est, "nonsense")
