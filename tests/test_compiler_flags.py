"""The tests' own way of compiling, by flags of XLA that come and go from one jaxlib to the next (`conftest.py`)."""

import os

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture
def conftest(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(pytestconfig.rootpath / "conftest.py"))


@pytest.mark.slow
def test_xla_knows_the_flags_of_the_versions_that_were_tried(conftest):
    assert not conftest.xla_knows("--xla_no_such_flag=1")
    assert conftest.xla_knows(conftest.HURRY) or conftest.JAXLIB > conftest.TRIED


def test_the_header_says_which_jax_it_is_and_how_programs_are_compiled(conftest, monkeypatch):
    assert jax.__version__ in conftest.pytest_report_header()
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    assert "with XLA_FLAGS=--a=1" in conftest.pytest_report_header()
    monkeypatch.setenv("XLA_FLAGS", "")
    assert "as for users, which takes longer" in conftest.pytest_report_header()


def test_the_users_compiler_has_flags_of_its_own(users_compiler):
    assert os.environ["XLA_FLAGS"] == ""
    jax.jit(lambda x: x + 1)(jnp.ones(3))
    users_compiler["xla_no_such_flag"] = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_flag"):
        jax.jit(lambda x: x + 2)(jnp.ones(3))
