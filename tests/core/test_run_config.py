import copy
import dataclasses
import pathlib
import pickle

import pytest

from estimator.core._run_config import RunConfig, is_default


def saving(config):
    return config.save_checkpoints_steps, config.save_checkpoints_secs


@pytest.mark.covers("3 model_dir")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, 600)),
        ({"save_checkpoints_steps": 10}, (10, None)),
        ({"save_checkpoints_secs": 0.5}, (None, 0.5)),
        ({"save_checkpoints_steps": None}, (None, None)),
        ({"save_checkpoints_steps": 0}, (None, None)),
        ({"save_checkpoints_steps": None, "save_checkpoints_secs": None}, (None, None)),
        ({"save_checkpoints_steps": 10, "save_checkpoints_secs": None}, (10, None)),
    ],
)
def test_giving_one_way_of_saving_turns_the_other_off(given, expected):
    assert saving(RunConfig(**given)) == expected


def test_a_number_that_is_given_differs_from_the_same_default():
    config = RunConfig()
    kept = [config, config.replace(seed=1), copy.deepcopy(config), pickle.loads(pickle.dumps(config))]
    assert [is_default(each.log_step_count_steps) for each in kept] == [True] * 4
    assert not is_default(config.replace(log_step_count_steps=100).log_step_count_steps)
    assert "log_step_count_steps=<unset>" in repr(config) and f"{config.log_step_count_steps}" == "100"


def test_other_defaults():
    config = RunConfig()
    assert (config.model_dir, config.seed, config.keep_checkpoint_max) == (None, 0, 5)
    assert (config.log_step_count_steps, config.steps_per_loop, config.check_replicas_every) == (100, "auto", None)
    assert (config.save_summary_steps, config.keep_checkpoint_every_n_hours) == (100, None)
    assert config.resume_input == "position"


@pytest.mark.covers("3 read-only")
def test_one_process_is_the_chief(monkeypatch):
    config = RunConfig()
    assert (config.is_chief, config.process_index, config.process_count) == (True, 0, 1)
    monkeypatch.setattr("jax.process_index", lambda: 2)
    monkeypatch.setattr("jax.process_count", lambda: 4)
    assert (config.is_chief, config.process_index, config.process_count) == (False, 2, 4)


def test_a_model_dir_is_a_path_or_a_url_and_that_of_a_file_a_path():
    assert RunConfig(model_dir="file:///tmp/run").model_dir == "/tmp/run"
    assert RunConfig(model_dir="s3://bucket/run").model_dir == "s3://bucket/run"
    assert RunConfig(model_dir=pathlib.Path("/a") / "b").model_dir == "/a/b"


@pytest.mark.covers("3 model_dir")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"save_checkpoints_steps": 1, "save_checkpoints_secs": 2},
            "`save_checkpoints_steps` and `save_checkpoints_secs` cannot be both set. .*1 and 2",
        ),
        ({"save_checkpoints_steps": -1}, "`save_checkpoints_steps` should be an int >= 0.*got -1"),
        ({"save_checkpoints_secs": -2}, "`save_checkpoints_secs` should be a number >= 0.*got -2"),
        ({"keep_checkpoint_max": -1}, "`keep_checkpoint_max` should be an int >= 0.*got -1"),
        ({"save_summary_steps": 1.5}, "`save_summary_steps` should be an int >= 0, or None never.*got 1.5"),
        ({"keep_checkpoint_every_n_hours": 0}, "`keep_checkpoint_every_n_hours` should be a number > 0, or.*got 0"),
        ({"keep_checkpoint_every_n_hours": "1"}, "`keep_checkpoint_every_n_hours` should be a number.*got '1'"),
        ({"log_step_count_steps": 0}, "`log_step_count_steps` should be an int >= 1.*got 0"),
        ({"steps_per_loop": 0}, "`steps_per_loop` should be an int >= 1, a time such as.*; got 0"),
        ({"steps_per_loop": "0s"}, "`steps_per_loop` should be an int >= 1, a time such as.*; got '0s'"),
        ({"steps_per_loop": "fast"}, "`steps_per_loop` should be an int.*; got 'fast'"),
        ({"steps_per_loop": None}, "`steps_per_loop` should be an int >= 1, a time such as.*; got None"),
        ({"check_replicas_every": 0}, "`check_replicas_every` should be an int >= 1, or None never to check; got 0"),
        ({"check_replicas_every": True}, "`check_replicas_every` should be an int.*got True"),
        ({"resume_input": "yes"}, """`resume_input` should be "position", "count" or None; got 'yes'"""),
        ({"eval_loss_over": "rows"}, """`eval_loss_over` should be "batches" or "examples"; got 'rows'"""),
        ({"seed": 1.0}, r"`seed` should be an int.*got 1\.0"),
        ({"verbose": 1}, "`verbose` should be True or False; got 1"),
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


@pytest.mark.covers("3 model_dir")
def test_none_turns_a_field_off():
    fields = "keep_checkpoint_max keep_checkpoint_every_n_hours log_step_count_steps save_summary_steps model_dir"
    for field in (*fields.split(), "save_checkpoints_secs", "check_replicas_every"):
        assert getattr(RunConfig(**{field: None}), field) is None
    assert RunConfig(save_summary_steps=0).save_summary_steps is None


@pytest.mark.covers("3 replace")
def test_replace_switches_between_steps_and_secs():
    config = RunConfig(save_checkpoints_steps=10)
    assert saving(config.replace(seed=3)) == (10, None)
    assert saving(config.replace(save_checkpoints_secs=5)) == (None, 5)
    assert saving(RunConfig().replace(save_checkpoints_steps=5)) == (5, None)
    assert saving(RunConfig().replace(save_checkpoints_steps=None)) == (None, 600)
    assert saving(RunConfig().replace(save_checkpoints_secs=None)) == (None, None)
    hours = RunConfig().replace(save_checkpoints_secs=7200)
    assert saving(hours.replace(save_checkpoints_steps=None)) == (None, 7200)
    assert saving(hours.replace(save_checkpoints_secs=None, save_checkpoints_steps=4)) == (4, None)
    assert saving(config.replace(save_checkpoints_secs=None, save_checkpoints_steps=None)) == (None, None)
    assert saving(config.replace(save_checkpoints_steps=0)) == (None, None)


@pytest.mark.covers("3 replace")
def test_replace_leaves_the_original_and_the_subclass_alone():
    @dataclasses.dataclass(frozen=True)
    class Mine(RunConfig):
        extra: int = 1
        protocol: str = "grpc"

    config = Mine(extra=2)
    assert (config.seed, config.replace(seed=4)) == (0, Mine(seed=4, extra=2))
    assert config.protocol == "grpc"  # one that TensorFlow has


@pytest.mark.covers("3 replace")
def test_replace_of_an_unknown_field_lists_the_fields():
    with pytest.raises(ValueError, match=r"Replacing `sede` is not supported. .*'seed'.*sede=1"):
        RunConfig().replace(sede=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sede'"):
        RunConfig(sede=1)


@pytest.mark.covers("3 session_config")
@pytest.mark.parametrize(
    ("field", "advice"),
    [
        ("tf_random_seed", "write `seed`"),
        ("session_config", "set XLA's flags by `jax.config`"),
        ("experimental_distribute", "write `train_distribute` and `eval_distribute`"),
        ("device_fn", "wrap the model_fn in `replicate_model_fn`, which takes devices"),
        ("protocol", "leave it out: all processes run the same steps"),
        ("experimental_max_worker_delay_secs", "leave it out: all processes run the same steps"),
        ("session_creation_timeout_secs", r"call `replicate.initialize_distributed\(timeout_secs=...\)`"),
        ("checkpoint_save_graph_def", "leave it out: a checkpoint holds only arrays"),
    ],
)
def test_fields_of_tensorflow_alone_name_what_does_the_same(field, advice):
    with pytest.raises(TypeError, match=f"RunConfig has no `{field}`, as TensorFlow's has: {advice}.*; got 3"):
        RunConfig(**{field: 3})
    with pytest.raises(ValueError, match=f"Replacing `{field}` is not supported.*{field}=3. .*{advice}"):
        RunConfig().replace(**{field: 3})


@pytest.mark.covers("3 read-only")
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("task_type", "here it is `is_chief`"),
        ("num_worker_replicas", "here it is `process_count`"),
        ("master", "there is nothing like it here: there are no sessions"),
    ],
)
def test_what_can_be_read_in_tensorflow_alone_names_what_tells_the_same(name, advice):
    with pytest.raises(AttributeError, match=f"'RunConfig' object has no attribute '{name}'; {advice}"):
        getattr(RunConfig(), name)
    with pytest.raises(AttributeError, match="'RunConfig' object has no attribute 'sede'"):
        RunConfig().sede  # noqa: B018


def test_copies_are_equal_and_nothing_of_them_can_be_set():
    config = RunConfig(seed=3, keep_checkpoint_every_n_hours=0.5)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
