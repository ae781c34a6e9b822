"""Tests that start processes are marked by what they name, directly or in fixtures and helpers (`conftest.py`)."""

import subprocess

import jax
import pytest
from testing.cluster import shared_cluster


@pytest.fixture
def fixture():
    return subprocess.run


def helper():
    return shared_cluster


def markers(request):
    return {marker.name for marker in request.node.iter_markers()} - {"usefixtures"}


def test_by_a_fixture(request, fixture):
    assert markers(request) == {"subprocess"}


@pytest.mark.usefixtures("fixture")
def test_by_a_fixture_that_it_uses(request):
    assert markers(request) == {"subprocess"}


def test_by_a_helper_of_a_helper(request):
    def nested():
        return helper()

    assert nested() is shared_cluster
    assert markers(request) == {"multiprocess"}


def test_what_starts_nothing_has_no_marker(request):
    assert markers(request) == set()


@pytest.mark.gpu
def test_what_needs_a_gpu_is_run_where_there_is_one():
    assert jax.default_backend() == "gpu"
