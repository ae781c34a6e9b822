"""What processes do that work together, as `testing.cluster` starts them."""

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import time

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicate
from estimator.multihost import _initialize
from estimator.multihost._supervisor import SUPERVISOR, ProcessLostError
from testing.signals import wait_until


def say(*what):
    print(*what, flush=True)


def my_index():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def say_error(work, *args, **kwargs):
    """By which error a call ends, and after how many seconds."""
    began = time.monotonic()
    try:
        work(*args, **kwargs)
        say("no error")
    except Exception as e:
        say(f"{time.monotonic() - began:.1f} {type(e).__name__}: {e}")


def summed(numbers, times):
    """The mean over all devices, again and again; it has not been waited for."""
    step, sharding = mean_step()
    x = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])
    for _ in range(times):
        x = step(x)
    return x


@functools.cache
def mean_step():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "device"), PartitionSpec("device"))
    return jax.jit(lambda x: x * 0 + x.mean(), out_shardings=sharding), sharding


# Getting together.


def join():
    """The good case; process 0 ends while its devices still work, and the others later."""
    logging.set_verbosity(logging.INFO)
    replicate.initialize_distributed(timeout_secs=30)
    index = jax.process_index()
    say("process", index, "of", jax.process_count(), "devices", jax.device_count())
    say_error(replicate.initialize_distributed)
    x = summed(np.arange(600_000, dtype=np.float32), times=10)
    if index:
        time.sleep(0.3 * index)
        say("mean", x.addressable_shards[0].data[0])
    say("end")


def too_late_to_join():
    jax.devices()
    say_error(replicate.initialize_distributed, timeout_secs=5)


def refused(ports):
    """Three processes that cannot work together, for one reason after the other."""
    me = my_index()
    addresses = iter([f"127.0.0.1:{port}" for port in ports])

    def case(name, count=3):
        say("case", name)
        say_error(replicate.initialize_distributed, next(addresses), count, me, timeout_secs=20)

    case("count", count=[3, 3, 4][me])

    version, jax.__version__ = jax.__version__, ["0.10.2", "0.10.2", "0.9.9"][me]
    case("version")
    jax.__version__ = version

    host, socket.gethostname = socket.gethostname, lambda: ["a", "a", "b"][me]
    case("loopback")
    socket.gethostname = host

    say("case uncaught")
    replicate.initialize_distributed(next(addresses), [3, 3, 4][me], me, timeout_secs=20)


def different_devices():
    jax.config.update("jax_num_cpu_devices", 1 + my_index())
    replicate.initialize_distributed(timeout_secs=20)


def incomplete(port):
    """Process 2 has another port, where nobody listens; process 1 waits for it."""
    me = my_index()
    say_error(replicate.initialize_distributed, f"127.0.0.1:{port if me < 2 else 1}", 3, me, timeout_secs=2)


def is_taken(port):
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def port_in_use(port):
    """A second process 0."""
    me = my_index()
    if me:
        wait_until(lambda: is_taken(port))
        time.sleep(0.5)  # it is taken for a moment before, to see whether it is free
    say_error(replicate.initialize_distributed, f"127.0.0.1:{port}", 2, 0, timeout_secs=2 + me)


def second_run(port, folder):
    """Processes 0 and 1 are a run; process 2 takes itself for process 1 of it."""
    me, files = my_index(), [os.path.join(folder, str(index)) for index in range(3)]
    if me == 2:
        wait_until(lambda: os.path.exists(files[0]) and os.path.exists(files[1]))
    say_error(replicate.initialize_distributed, f"127.0.0.1:{port}", 2, min(me, 1), timeout_secs=20)
    open(files[me], "w").close()
    if me < 2:
        wait_until(lambda: os.path.exists(files[2]))
        time.sleep(6)
        os._exit(0)


def hangs(where):
    """Process 1 does not connect, or does not take part in the first sum."""
    if my_index() and where == "connection":
        _initialize._connect = lambda *args: time.sleep(60)
    elif my_index():
        _initialize._sum_device_numbers = lambda: (jax.devices(), time.sleep(60))
    replicate.initialize_distributed(timeout_secs=3)


def recipe(environment, arguments):
    """Joins as a scheduler starts it; `{index}` stands for the number of the process."""
    me = my_index()
    del os.environ["TF_CONFIG"]
    os.environ |= {name: value.format(index=me) for name, value in environment.items()}
    logging.set_verbosity(logging.INFO)
    replicate.initialize_distributed(timeout_secs=20, **arguments)
    say("process", jax.process_index(), "of", jax.process_count(), "sum", float(summed(np.ones(8), 1).sum()))


def adopt(address, recoverable, starts_devices):
    """Joins where jax was connected before, as by Ray's JaxTrainer; process 1 ends later."""
    me = my_index()
    del os.environ["TF_CONFIG"]
    jax.config.update("jax_enable_recoverability", recoverable)
    jax.distributed.initialize(address, 2, me)
    if starts_devices:
        jax.devices()
    logging.set_verbosity(logging.INFO)
    say_error(replicate.initialize_distributed, num_processes=3)
    replicate.initialize_distributed(timeout_secs=20)
    say_error(replicate.initialize_distributed)
    watched = bool(SUPERVISOR.peers.names)
    say("process", me, "of", jax.process_count(), "sum", float(summed(np.ones(8), 1).sum()), "watched", watched)
    time.sleep(me)


# Losing one.


def work(victim, way, grace_secs=1.0, heartbeat_secs=2.0):
    """Works together until one process ends in some way; "working" is written when all can be killed."""
    replicate.initialize_distributed(timeout_secs=30, grace_secs=grace_secs, heartbeat_timeout_secs=heartbeat_secs)
    dies = jax.process_index() == victim
    if dies and way == "fork" and not os.fork():
        time.sleep(30)  # a copy that outlives it, as workers of a loader do
        say("the copy ends")
        os._exit(0)
    for step in range(1_000_000):
        try:
            summed(np.ones(24), times=1).block_until_ready()
        except Exception as error:
            raise SUPERVISOR.explain(error) from error
        if step == 20:
            say("working")
            if way == "poll":
                time.sleep(0.5) if dies else poll()
            if dies and way in ("kill", "fork", "poll"):
                os.kill(os.getpid(), signal.SIGKILL)
            if dies and way == "raise":
                atexit.register(time.sleep, 2 * grace_secs)  # it may take its time, and keeps its exit code
                raise ValueError("no such file\nin the folder")


def poll():
    """Sees the loss from Python, and continues."""
    while not SUPERVISOR.loss:
        time.sleep(0.01)
    say("lost:", SUPERVISOR.loss)
    try:
        raise SUPERVISOR.explain(jax.errors.JaxRuntimeError("closed by peer"))
    except ProcessLostError as e:
        SUPERVISOR.note_raise()
        say("caught:", e, "from", repr(e.__cause__))
    time.sleep(2)  # longer than the grace
    raise jax.errors.JaxRuntimeError("closed by peer")
