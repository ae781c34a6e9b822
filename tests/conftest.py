"""Fixtures for all tests; asserts of the helper modules are explained like those of tests."""

import pytest

pytest.register_assert_rewrite("helpers_estimator", "helpers_replicate")


@pytest.fixture
def messages(caplog):
    caplog.set_level("INFO", logger="absl")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "absl"]
