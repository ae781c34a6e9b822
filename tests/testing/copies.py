"""Copies of arrays on several devices, one of which is changed."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from estimator.loop._train import Training

CPUS = jax.devices("cpu")
GRID = Mesh(np.array(CPUS).reshape(2, 4), ("cut", "copied"))


def everywhere(devices=CPUS):
    return NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec())


def with_copy(array, i, change):
    """The array with its i-th shard replaced by `change(shard)`."""
    shards = [shard.data for shard in array.addressable_shards]
    shards[i] = jax.device_put(change(np.array(shards[i])), shards[i].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def one_bit(i=0):
    """Flips the lowest bit of the i-th byte."""

    def change(x):
        bits = x.reshape(-1).view(np.uint8)
        bits[i] ^= 1
        return x

    return change


def corrupt(monkeypatch, at_step, which):
    """Changes one bit of a copy on cpu:1 after the program in which `at_step` lies."""
    start = Training._start

    def corrupting(training, run, reporting):
        before = training.global_step
        outcome = start(training, run, reporting)
        if before < at_step <= training.global_step:
            training._carry = which(training._carry, lambda array: with_copy(array, 1, one_bit()))
        return outcome

    monkeypatch.setattr(Training, "_start", corrupting)


def a_variable(carry, change):
    return carry._replace(variables=carry.variables | {"v": change(carry.variables["v"])})


def a_slot(carry, change):
    (state, *rest) = carry.slots["optimizer"]
    mu = state.mu | {"hidden/w": change(state.mu["hidden/w"])}
    return carry._replace(slots={"optimizer": (state._replace(mu=mu), *rest)})
