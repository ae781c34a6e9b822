"""What `partition`, `spread` and `devices_per_tower` refuse."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.model_fns import predicting
from testing.towers import replicate, started
from testing.wide import batches, wide, wide_mlp

import estimator as est
from replicate.cross_tower_ops import AllReduce
from replicate.towers._devices import in_towers_of


def initialized(body, *tower):
    """Runs `body(features)` in a model_fn, plain or in towers."""

    model_fn = predicting(lambda x: body(x))
    made = wide(*tower, model_fn) if tower else model_fn
    return est.transform(made).init(jax.random.key(0), np.ones((2, 6), np.float32), mode="infer")


ENTRY = "Each entry is None or 'part', and only one"


@pytest.mark.parametrize(
    ("tower", "partition", "error", "message"),
    [
        (
            (2, 4),
            "part",
            TypeError,
            r"`est.get_variable\('w'\)` needs a partition with None or 'part' for each dimension, such ",
        ),
        ((), (None, "tower"), ValueError, rf"got partition=\(None, 'tower'\). {ENTRY}"),
        ((1, 1), ("part", "part"), ValueError, rf"got partition=\('part', 'part'\). {ENTRY}"),
        (
            (2, 4),
            (None, None, "part"),
            ValueError,
            r"of 3 dimensions, for an array of shape \(6, 5\). Give one entry for each",
        ),
        ((), lambda x: "part", TypeError, "needs a partition with None or 'part' for each dimension"),
    ],
)
def test_a_partition_is_checked_with_and_without_towers(tower, partition, error, message):
    with pytest.raises(error, match=message):
        initialized(lambda x: x @ est.get_variable("w", (6, 5), partition=partition), *tower)


def test_a_pytree_needs_a_function():
    with pytest.raises(
        ValueError, match=r"got partition=\('part',\) for a pytree of arrays. Give a function of an array"
    ):
        initialized(lambda x: x + est.get_variable("net", lambda key: {"a": jnp.ones(6)}, partition=("part",))["a"])


def test_a_dimension_must_divide_by_the_devices_of_a_tower():
    message = (
        r"`est.get_variable\('w'\)` cuts dimension 1 of an array of shape \(6, 10\) over the 4 devices of a tower, by "
        "which 10 does not divide. Make it a multiple of 4, cut another dimension, or choose another"
    )
    with pytest.raises(ValueError, match=message):
        initialized(lambda x: x @ est.get_variable("w", (6, 10), partition=(None, "part")), 2, 4)


def test_where_towers_are_narrow_any_dimension_will_do():
    for tower in ((), (1, 1), (2, 1)):
        initialized(lambda x: est.spread(x @ est.get_variable("w", (6, 7), partition=(None, "part")), 1), *tower)


@pytest.mark.parametrize(
    ("tower", "axis", "error", "message"),
    [
        ((), 2, ValueError, r"got axis=2 for an array of shape \(2, 6\), which has the dimensions 0 to 1."),
        ((1, 4), -3, ValueError, r"`est.spread` got axis=-3 for an array of shape \(2, 6\)"),
        ((), "part", TypeError, "`est.spread` needs an integer as `axis`; got 'part'."),
        ((1, 4), True, TypeError, "`est.spread` needs an integer as `axis`; got True."),
    ],
)
def test_spread_checks_the_axis_with_and_without_towers(tower, axis, error, message):
    with pytest.raises(error, match=message):
        initialized(lambda x: est.spread(x, axis), *tower)


def test_spread_needs_a_dimension_and_a_model_fn():
    with pytest.raises(ValueError, match="`est.spread` got a scalar, which has no dimension to cut; axis=0."):
        initialized(lambda x: x + est.spread(jnp.float32(1), 0))
    with pytest.raises(RuntimeError, match="`est.spread` must be called inside a model_fn"):
        est.spread(jnp.ones(2), 0)


def test_without_towers_spread_returns_what_it_got():
    def body(x):
        assert est.spread(x, -1) is x
        return x

    initialized(body)


DISTRIBUTION, WITH = "variable_distribution=", "was given with devices_per_tower"
SUMS = "with devices_per_tower=4. Towers of several devices sum"


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        (3, {}, "devices_per_tower=3 does not divide the 8 devices into towers. Choose a"),
        (0, {}, "devices_per_tower=0 does not divide the 8 devices into towers"),
        (16, {}, "devices_per_tower=16 does not divide the 8 devices into towers"),
        (2.0, {}, "devices_per_tower must be an integer; got 2.0."),
        (4, {"variable_distribution": "sharded"}, f"{DISTRIBUTION}'sharded' {WITH}=4. Towers of several devices have"),
        (8, {"variable_distribution": "shared_round_robin"}, f"{DISTRIBUTION}'shared_round_robin' {WITH}=8"),
        (4, {"variable_device": "cpu:0"}, f"_device='cpu:0' was given with {DISTRIBUTION}'mirrored', which has none"),
        (4, {"cross_tower_ops": AllReduce("ring")}, f"cross_tower_ops was given, an AllReduce, {SUMS}"),
    ],
)
def test_replicate_model_fn_refuses_at_the_door(devices, options, message):
    with pytest.raises(TypeError if isinstance(devices, float) else ValueError, match=message):
        replicate(wide_mlp(), 8, devices_per_tower=devices, **options)


def test_towers_of_several_devices_match_one_process():
    there = collections.namedtuple("Device", "id process_index")
    with pytest.raises(ValueError, match="devices_per_tower=2 was given with devices of several processes. Towers of"):
        in_towers_of(2, (there(0, 0), there(1, 0), there(2, 1), there(3, 1)))


@pytest.mark.slow
def test_the_batch_must_divide_by_the_towers_not_by_the_devices():
    x, y = (array[0] for array in batches(2))
    model, state = started(wide(2, 4, wide_mlp()), x, y)
    model.train_step(state, x, y)
    with pytest.raises(ValueError, match="Batch size 1 needs to be divisible by the number of towers, which is 2."):
        model.train_step(state, x[:1], y[:1])


def test_wide_towers_are_compiled():
    x, y = (array[0] for array in batches(2))
    model, state = started(wide(2, 4, wide_mlp()), x, y)
    message = r"Towers of 4 devices \(`devices_per_tower`\) run in compiled programs only"
    with jax.disable_jit(), pytest.raises(ValueError, match=message):
        model.train_step(state, x, y)
