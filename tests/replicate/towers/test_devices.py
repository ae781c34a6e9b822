"""The devices of the towers, by name or as they are."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.model_fns import ones, predicting
from testing.refused import raises
from testing.towers import started

import estimator as est
from replicate import num_towers, replicate_model_fn
from replicate.towers._devices import find_devices

pytestmark = pytest.mark.covers("12 devices")

CPUS = jax.devices("cpu")
ROWS = np.arange(8, dtype=np.float32)


where = predicting(lambda x: {"y": ones("w") * x, "towers": jnp.full(x.shape, num_towers(), jnp.int32)})


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (["/cpu:0"], [0]),
        (["/CPU:0"], [0]),
        (["/device:CPU:1"], [1]),
        (["/device:cpu:7"], [7]),
        (["device:CPU:2"], [2]),
        (["cpu:1"], [1]),
        (["CPU:3"], [3]),
        (["cpu"], [0]),
        (["/cpu"], [0]),
        (["/job:localhost/replica:0/task:0/device:CPU:2"], [2]),
        (["/replica:0/task:0/cpu:1"], [1]),
        *((map(name, CPUS[:3]), [0, 1, 2]) for name in (str, repr, lambda device: f"TFRT_CPU_{device.id}")),
        (CPUS[2:4], [2, 3]),
        (["/cpu:3", CPUS[1], "CPU:0"], [3, 1, 0]),
        ((f"cpu:{i}" for i in range(2)), [0, 1]),
    ],
)
def test_a_device_is_given_by_a_name_what_jax_calls_it_or_itself_in_any_iterable(devices, indices):
    assert find_devices(devices) == tuple(CPUS[i] for i in indices)


def test_devices_of_the_second_of_several_processes_have_large_numbers(monkeypatch):
    class Device(types.SimpleNamespace):
        __hash__ = object.__hash__
        __str__ = lambda self: f"cpu:{self.id}"  # noqa: E731
        platform = "cpu"

    everywhere = [Device(id=2048 * process + i) for process in range(2) for i in range(2)]
    monkeypatch.setattr(jax, "devices", lambda *_: everywhere)
    monkeypatch.setattr(jax, "local_devices", lambda backend: everywhere[2:] if backend == "cpu" else [])
    assert find_devices(["cpu:2048", "cpu:2049"]) == find_devices(["cpu:0", "cpu:1"]) == tuple(everywhere[2:])
    with raises(ValueError, "There is no device 'cpu:2050'. The devices of this process are /cpu:0, /cpu:1."):
        find_devices(["cpu:2050"])


def test_without_devices_all_local_ones_are_taken():
    assert find_devices(None) == tuple(jax.local_devices())
    model, state = started(replicate_model_fn(where), ROWS, mode="infer")
    got = model.predict_step(state, ROWS).predictions["towers"]
    np.testing.assert_array_equal(got, [len(jax.local_devices())] * 8)


@pytest.mark.parametrize(
    "name",
    [
        "/cpu:8",
        "/gpu:99",
        "/tpu:99",
        "xpu:0",
        "/job:worker/cpu:0",
        "/job:localhost/replica:0/task:1/device:CPU:0",
        "cpu:-1",
        "",
        "cpu:0 ",
        0,
    ],
)
def test_an_unknown_device_is_an_error_that_names_those_there_are(name):
    message = f"There is no device {name!r}. The devices of this process are "
    with raises(ValueError, message) as caught:
        replicate_model_fn(where, devices=[name])
    names = [f"/cpu:{i}" for i in range(8)]
    assert str(caught.value).endswith(", ".join(names) + ".")


@pytest.mark.parametrize("devices", [["/cpu:0", "/cpu:1", "/cpu:0"], ["cpu", "cpu:1", "/CPU:0"]])
def test_a_device_that_comes_twice_beside_others(devices):
    message = (
        "Each device may come once in devices, unless they are all the same one, on which the towers then run "
        f"together; got {devices}."
    )
    with raises(ValueError, message):
        replicate_model_fn(where, devices=devices)


@pytest.mark.parametrize("distribution", ["sharded", "shared_local_parameter_server"])
def test_a_device_that_is_named_several_times_has_as_many_towers_and_all_variables(distribution):
    devices = ["/cpu:3", "cpu:3", jax.devices("cpu")[3]]
    model = est.transform(replicate_model_fn(where, devices=devices, variable_distribution=distribution))
    state = model.init(jax.random.key(0), ROWS, mode="infer")
    got = model.predict_step(state, ROWS[:6]).predictions
    assert state.variables["w"].devices() == got["y"].devices() == {jax.devices("cpu")[3]}
    np.testing.assert_array_equal(got["y"], ROWS[:6])
    assert got["towers"].tolist() == [3] * 6
    with raises(ValueError, "Batch size 8 needs to be divisible by the number of towers, which is 3."):
        model.init(jax.random.key(0), ROWS)


def test_towers_of_several_devices_need_as_many():
    with raises(ValueError, "devices_per_tower=2 was given with one device named 4 times. A tower of several devices"):
        replicate_model_fn(where, devices=["cpu:0"] * 4, devices_per_tower=2)


def test_a_device_that_comes_twice_as_name_and_object():
    with raises(ValueError, "Each device may come once in devices; got ["):
        find_devices([jax.devices("cpu")[0], "/cpu:0"])


@pytest.mark.gpu
def test_devices_of_several_kinds():
    gpu = jax.devices("gpu")[0]
    with raises(ValueError, "The devices of the towers must be of one kind, since all towers run in one program; got "):
        find_devices([gpu, "/cpu:0"])


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ([], ValueError, "devices must name at least one device; got none. Leave it out"),
        ("/cpu:0", TypeError, "devices must be a list; write devices=['/cpu:0']."),
        (jax.devices()[0], TypeError, "devices must be a list; write devices=["),
    ],
    ids=["none", "a name", "a device"],
)
def test_what_is_no_list_of_devices(devices, error, message):
    with raises(error, message):
        replicate_model_fn(where, devices=devices)


@pytest.mark.parametrize("devices", [["cpu:5"], ["cpu:6", "cpu:3", "cpu:0"]])
def test_the_state_lives_on_the_devices_given(devices):
    model, state = started(replicate_model_fn(where, devices=devices), ROWS, mode="infer")
    want = set(find_devices(devices))
    assert state.variables["w"].devices() == want
    spec = model.predict_step(state, ROWS)
    assert spec.predictions["y"].devices() == want
    np.testing.assert_array_equal(spec.predictions["y"], ROWS)
