"""What every test and doctest runs under: several CPU devices, strict dtype promotion, programs compiled in a hurry.

Most of the time of the tests is XLA's: it compiles thousands of programs, each of which runs for microseconds. So here
it makes their machine code quickly and badly. The programs themselves, with their collectives and their memory, stay
as they are; what XLA fuses and the last bits of numbers do not. So a test that compares bits of several programs, or
looks at fusions, asks for the fixture `users_compiler`. Where XLA_FLAGS is set, be it to nothing, it rules all tests.
"""

import os

import jaxlib

USERS_FLAGS = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}
if jaxlib.__version__.startswith("0.10."):  # XLA ends the process at a flag that it does not know
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
        "--xla_cpu_parallel_codegen_split_count=1",
    )

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def users_compiler():
    """Programs are compiled as XLA does it without flags, in processes that are started now too."""
    jax.devices()  # XLA has read its flags
    if not os.environ.get("XLA_FLAGS"):
        yield
        return
    from jax._src import compiler

    get_options = compiler.get_compile_options

    def users_options(*args, env_options_overrides=None, **kwargs):
        overrides = USERS_FLAGS | (env_options_overrides or {})
        return get_options(*args, env_options_overrides=overrides, **kwargs)

    with pytest.MonkeyPatch.context() as patch:  # one that no test undoes
        patch.setenv("XLA_FLAGS", "")
        patch.setattr(compiler, "get_compile_options", users_options)
        yield
