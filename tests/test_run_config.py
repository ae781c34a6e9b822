import dataclasses
import pathlib

import pytest

from estimator._run_config import RunConfig


def saving(config):
    return config.save_checkpoints_steps, config.save_checkpoints_secs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, 600)),
        ({"save_checkpoints_steps": 10}, (10, None)),
        ({"save_checkpoints_secs": 30}, (None, 30)),
        ({"save_checkpoints_secs": 0.5}, (None, 0.5)),
        ({"save_checkpoints_steps": None}, (None, None)),
        ({"save_checkpoints_steps": 0}, (None, None)),
        ({"save_checkpoints_steps": None, "save_checkpoints_secs": None}, (None, None)),
        ({"save_checkpoints_steps": 10, "save_checkpoints_secs": None}, (10, None)),
    ],
)
def test_giving_one_way_of_saving_turns_the_other_off(given, expected):
    assert saving(RunConfig(**given)) == expected


def test_other_defaults():
    config = RunConfig()
    assert (config.model_dir, config.seed, config.keep_checkpoint_max) == (None, 0, 5)
    assert (config.log_step_count_steps, config.steps_per_loop, config.check_replicas_every) == (100, "auto", None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"save_checkpoints_steps": 1, "save_checkpoints_secs": 2},
            "`save_checkpoints_steps` and `save_checkpoints_secs` cannot be both set. .*1 and 2",
        ),
        ({"save_checkpoints_steps": -1}, "`save_checkpoints_steps` should be an int >= 0.*got -1"),
        ({"save_checkpoints_steps": 1.5}, "`save_checkpoints_steps` should be an int.*got 1.5"),
        ({"save_checkpoints_secs": -2}, "`save_checkpoints_secs` should be a number >= 0.*got -2"),
        ({"save_checkpoints_secs": "9"}, "`save_checkpoints_secs` should be a number.*got '9'"),
        ({"keep_checkpoint_max": -1}, "`keep_checkpoint_max` should be an int >= 0.*got -1"),
        ({"log_step_count_steps": 0}, "`log_step_count_steps` should be an int >= 1.*got 0"),
        ({"steps_per_loop": 0}, "`steps_per_loop` should be an int >= 1, a time such as.*; got 0"),
        ({"steps_per_loop": "0s"}, "`steps_per_loop` should be an int >= 1, a time such as.*; got '0s'"),
        ({"steps_per_loop": "fast"}, "`steps_per_loop` should be an int.*; got 'fast'"),
        ({"steps_per_loop": None}, "`steps_per_loop` should be an int >= 1, a time such as.*; got None"),
        ({"check_replicas_every": 0}, "`check_replicas_every` should be an int >= 1, or None never to check; got 0"),
        ({"check_replicas_every": True}, "`check_replicas_every` should be an int.*got True"),
        ({"seed": 1.0}, r"`seed` should be an int.*got 1\.0"),
        ({"seed": None}, "`seed` should be an int.*got None"),
        ({"seed": True}, "`seed` should be an int.*got True"),
        ({"model_dir": ""}, "`model_dir` should be a non-empty path.*got ''"),
        ({"model_dir": 3}, "`model_dir` should be a non-empty path.*got 3"),
    ],
)
def test_a_bad_value_is_an_error_that_names_field_and_value(given, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**given)
    with pytest.raises(ValueError, match=message):
        RunConfig().replace(**given)


@pytest.mark.parametrize(
    "field",
    ["keep_checkpoint_max", "log_step_count_steps", "save_checkpoints_secs", "model_dir", "check_replicas_every"],
)
def test_none_turns_a_field_off(field):
    assert getattr(RunConfig(**{field: None}), field) is None


def test_model_dir_may_be_a_path_object():
    assert RunConfig(model_dir=pathlib.Path("/a") / "b").model_dir == "/a/b"


def test_replace_switches_between_steps_and_secs():
    config = RunConfig(save_checkpoints_steps=10)
    assert saving(config.replace(seed=3)) == (10, None)
    assert saving(config.replace(save_checkpoints_secs=5)) == (None, 5)
    assert saving(RunConfig().replace(save_checkpoints_steps=5)) == (5, None)
    assert saving(RunConfig().replace(save_checkpoints_steps=None)) == (None, None)


def test_replace_leaves_the_original_and_the_subclass_alone():
    @dataclasses.dataclass(frozen=True)
    class Mine(RunConfig):
        extra: int = 1

    config = Mine(extra=2)
    replaced = config.replace(seed=4)
    assert (config.seed, replaced) == (0, Mine(seed=4, extra=2))


def test_replace_of_an_unknown_field_lists_the_fields():
    with pytest.raises(ValueError, match=r"Replacing `sede` is not supported. .*'seed'.*sede=1"):
        RunConfig().replace(sede=1)


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1
