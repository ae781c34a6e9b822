"""A process that makes copies of itself, since to start one takes seconds: each copy calls a function of a test.

It has imported what those functions need, and has one thread: a copy of a process of several can hang. OpenBLAS, which
NumPy uses, must start none. For each line of its input, JSON, it makes copies with two CPU devices each; several of
them have their places in TF_CONFIG. It answers with their ids, and when all have ended, with how they did.
"""

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time

from testing import compiled

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def start_server(modules=()):
    """The process, which has imported `modules` too."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(TESTS), TESTS]),
    }
    command, pipes = [sys.executable, "-m", __name__, *modules], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=os.environ | environment)


def serve():
    for line in sys.stdin:
        request = json.loads(line)
        began = time.monotonic()
        pids = []
        for index in range(request["processes"]):
            open(os.path.join(request["folder"], str(index)), "w").close()
            pids.append(os.fork())
            if not pids[-1]:
                return call(request, index)
        print(json.dumps(pids), flush=True)
        print(json.dumps(wait(pids, began, request["timeout"])), flush=True)
    return None


def call(request, index):
    """The work of a copy; it ends as every script does, by the end of its main module or by an error that leaves it."""
    output = os.open(os.path.join(request["folder"], str(index)), os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where a shell runs the tests beside it
    faulthandler.dump_traceback_later(request["timeout"] - 5)
    if request["processes"] > 1:
        addresses = [f"127.0.0.1:{request['port']}"] * request["processes"]
        task = {"type": "worker", "index": index}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    os.environ.update({"XLA_FLAGS": ""} | request["env"])
    compiled.use_folder()
    module, _, function = request["function"].rpartition(".")
    getattr(importlib.import_module(module), function)(*request["args"])


def wait(pids, began, timeout):
    """The exit codes, and the seconds after which they came; what runs too long is killed."""
    ended = {}
    while len(ended) < len(pids):
        late = time.monotonic() - began > timeout
        for pid in set(pids) - set(ended):
            if late:
                os.kill(pid, signal.SIGKILL)
            child, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if child:
                ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic() - began
        time.sleep(0.01)
    return [ended[pid][0] for pid in pids], [ended[pid][1] for pid in pids]


if __name__ == "__main__":
    import jax
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import tensorboardX  # noqa: F401

    import estimator  # noqa: F401
    import replicate  # noqa: F401

    for each in sys.argv[1:]:
        importlib.import_module(each)
    jax.config.update("jax_num_cpu_devices", 2)
    serve()
