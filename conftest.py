"""What every test and doctest runs under: several CPU devices, strict dtype promotion, programs compiled in a hurry.

Most of the time of the tests is XLA's: it compiles thousands of programs, each of which runs for microseconds. So here
it makes their machine code quickly and badly. The programs themselves, with their collectives and their memory, stay
as they are; what XLA fuses and the last bits of numbers do not. So a test that compares bits of several programs, or
looks at fusions, asks for the fixture `users_compiler`. Where XLA_FLAGS is set, be it to nothing, it rules all tests.
The head of pytest's output says what holds.

Many tests compile the same program again, since each makes a model_fn of its own. jax's compilation cache spares some
of that, for all processes of a run of pytest together, and most of it for the next runs: it is kept in
`.pytest_cache/compiled`. Compilations are counted as without it.

Collections of garbage are rare, and look at nothing twice: what one leaves, of what was imported and of the programs of
tests, is left out of all later ones. Late in a run of all tests, one that looks at everything takes seconds.
"""

import gc
import importlib.util
import os
import pathlib
import pkgutil
import subprocess
import sys

import jaxlib

gc.disable()  # until tests are collected

JAXLIB = tuple(map(int, jaxlib.__version__.split(".")[:2]))
TRIED = (0, 12)  # the newest jaxlib that is known to have all of these flags
USERS_FLAGS = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_parallel_codegen_split_count": 32,
}
HURRY = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if JAXLIB < (0, 11):  # later ones have only one way of making code for fusions
    USERS_FLAGS["xla_cpu_use_fusion_emitters"] = True
    HURRY += " --xla_cpu_use_fusion_emitters=false"


def xla_knows(flags: str) -> bool:
    """XLA ends the process at a flag that it does not know."""
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=env, capture_output=True)
    return done.returncode == 0


if "XLA_FLAGS" not in os.environ:  # else this is a worker, which has those of its parent, or the user has set them
    os.environ["XLA_FLAGS"] = HURRY if JAXLIB <= TRIED or xla_knows(HURRY) else ""

import jax  # noqa: E402
import pytest  # noqa: E402

pytest.register_assert_rewrite("testing")

from testing import compiled  # noqa: E402

pytest_plugins = ["testing.runs.selection", "testing.runs.seconds"]

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

NEEDED_BY_DOCTESTS = {  # by module, a library that the extra `test` leaves out
    "estimator/inputs/_csv.py": "pandas",
    "estimator/inputs/_pandas.py": "pandas",
    "estimator/integrations/_mlflow.py": "mlflow",
    "estimator/integrations/_optuna.py": "optuna",
    "estimator/integrations/_wandb.py": "wandb",
    "estimator/interop/_flax.py": "flax",
    "estimator/interop/_flax_linen.py": "flax",
    "estimator/interop/_flax_nnx.py": "flax",
    "tests/testing/scenarios/ray_driver.py": "ray",
    "tests/testing/scenarios/scripts.py": "sklearn",
}
collect_ignore = [path for path, library in NEEDED_BY_DOCTESTS.items() if not importlib.util.find_spec(library)]

compiled.make_folder(pathlib.Path(__file__).parent / ".pytest_cache" / "compiled")
compiled.use_folder()


def collect_garbage() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    collect_garbage()
    gc.set_threshold(200_000)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if gc.get_count()[1]:  # collections of the youngest objects since the last one here
        collect_garbage()


def pytest_report_header() -> str:
    flags = os.environ["XLA_FLAGS"]
    how = f"with XLA_FLAGS={flags}" if flags else "as for users, which takes longer: XLA_FLAGS is empty"
    return f"jax {jax.__version__}, jaxlib {jaxlib.__version__}; programs are compiled {how}"


@pytest.fixture
def users_compiler():
    """Programs are compiled as XLA does it without flags, in processes that are started now too. Gives what it sets."""
    from estimator.runtime._shared_programs import forget_programs

    jax.devices()  # XLA has read its flags, as it does once in a process
    flags = dict(USERS_FLAGS) if os.environ.get("XLA_FLAGS") else {}
    # Private, since jax has no other place where options for all programs can be set later: only for one, in jax.jit.
    place = "jax._src.compiler.get_compile_options"
    get_options = pkgutil.resolve_name(place)

    def users_options(*args, env_options_overrides=None, **kwargs):
        overrides = flags | (env_options_overrides or {})
        return get_options(*args, env_options_overrides=overrides, **kwargs)

    with pytest.MonkeyPatch.context() as patch:  # one that no test undoes
        patch.setenv("XLA_FLAGS", "")
        patch.setattr(place, users_options)
        forget_programs()  # of the other compiler; they are kept by what XLA compiles, not by how
        yield flags
        forget_programs()
