"""`tfrecord_input_fn`: every record once in each epoch, in place after a kill, and errors that name file and byte."""

import itertools
import re

import numpy as np
import optax
import pytest
from testing.estimators import values
from testing.model_fns import regressing
from testing.towers import bits

import estimator as est
from estimator.io import FixedLenFeature, VarLenFeature
from replicate import MirroredStrategy

FEATURES = {"id": FixedLenFeature([], np.int64), "x": FixedLenFeature([2], np.float32), "words": VarLenFeature(str)}


def example(i):
    made = est.io.Example()
    made.features.feature["id"].int64_list.value.append(i)
    made.features.feature["x"].float_list.value.extend([i, 0.5])
    made.features.feature["words"].bytes_list.value.extend([b"red", b"green", b"blue"][: i % 4])
    return made.SerializeToString()


def write(folder, files=3, rows=7, compression=None):
    """Files of different lengths; the ids of their rows count up."""
    ids = itertools.count()
    for i in range(files):
        with est.io.TFRecordWriter(folder / f"part-{i}", compression) as writer:
            for _ in range(rows + i):
                writer.write(example(next(ids)))
    return str(folder / "part-*")


def make(pattern, batch_size=4, features=FEATURES, **options):
    return est.inputs.tfrecord_input_fn(pattern, features, batch_size, **options)


def ids(batches):
    return [batch["id"].tolist() for batch in batches]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_records_come_in_order_and_batches_span_files_and_epochs(tmp_path, compression):
    pattern = write(tmp_path, compression=compression)
    got = ids(make(pattern, 5, shuffle=False, num_epochs=2, compression=compression)())
    assert flat(got) == [*range(24)] * 2
    assert [len(each) for each in got] == [5] * 9 + [3]
    dropped = make(pattern, 5, shuffle=False, num_epochs=2, compression=compression, drop_remainder=True)()
    assert ids(dropped) == got[:9]


@pytest.mark.parametrize("buffer_size, cycle_length", [(1, 2), (5, 1), (5, 9), (100, 2)])
def test_a_shuffled_epoch_has_each_record_once_in_another_order(tmp_path, buffer_size, cycle_length):
    options = {"shuffle_buffer_size": buffer_size, "cycle_length": cycle_length, "num_epochs": 3}
    pattern = write(tmp_path)
    got = flat(ids(make(pattern, seed=1, **options)()))
    epochs = [got[i : i + 24] for i in (0, 24, 48)]
    assert all(sorted(epoch) == [*range(24)] for epoch in epochs)
    assert flat(ids(make(pattern, seed=1, **options)())) == got
    if buffer_size > 1:
        assert len({*map(tuple, epochs)}) == 3
        assert flat(ids(make(pattern, seed=2, **options)())) != got


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_input_continues_at_any_position(tmp_path, shuffle):
    pattern = write(tmp_path)
    options = {"shuffle": shuffle, "num_epochs": 2, "shuffle_buffer_size": 6}
    first = make(pattern, **options)()
    states, batches = [first.get_state()], []
    for batch in first:
        batches.append(batch)
        states.append(first.get_state())
    for i, state in enumerate(states):
        other = make(pattern, **options)()
        next(other)  # which has begun already
        other.set_state(state)
        assert ids(other) == ids(batches[i:])
        other.close()


def test_a_position_of_other_files_is_an_error(tmp_path):
    pattern = write(tmp_path)
    state = make(pattern)().get_state()
    for other in (make(pattern, shuffle=False), make(str(tmp_path / "part-0"))):
        with pytest.raises(ValueError, match="is not one of this input, whose position is now"):
            other().set_state(state)
    shorter = make(pattern)()
    shorter.set_state(state | {"offset": 25})
    with pytest.raises(ValueError, match="after record 25 of its epoch, but the files have fewer"):
        next(shorter)


def test_lists_are_filled_up_to_a_power_of_two(tmp_path):
    [batch] = make(write(tmp_path, 1, 7), 7, shuffle=False)()
    assert batch["words"].shape == (7, 4)
    assert batch["words"][2].tolist() == [b"red", b"green", b"", b""]


def test_columns_and_a_vocabulary_turn_strings_into_integers(tmp_path):
    column = est.feature_column.categorical_column_with_vocabulary_list("words", ["green", "red", "blue"])
    columns = [est.feature_column.numeric_column("x", shape=2), est.feature_column.indicator_column(column)]
    features = est.feature_column.make_parse_example_spec(columns)
    for row in make(write(tmp_path, 1, 4), 4, features, shuffle=False, columns=columns)():
        assert row["words"].astype(np.int32).tolist() == [[-1] * 4, [1, -1, -1, -1], [1, 0, -1, -1], [1, 0, 2, -1]]
        assert est.feature_column.input_layer(row, columns).tolist() == [
            *([0, 0, 0, 0, 0.5], [0, 1, 0, 1, 0.5]),
            *([1, 1, 0, 2, 0.5], [1, 1, 1, 3, 0.5]),
        ]
    named = {"words": FixedLenFeature([1], str)}
    pattern = str(tmp_path / "named")
    with est.io.TFRecordWriter(pattern) as writer:
        writer.write(example(1))
    [(_, labels)] = make(pattern, 1, named, label_key="words", label_vocabulary=["blue", "red"])()
    assert labels.tolist() == [[1]]


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        (ValueError, {"file_pattern": "nowhere-*"}, "found no files for 'nowhere-*'"),
        (ValueError, {"label_key": "y"}, "label_key='y', which is not among the features ['id', 'x', 'words']"),
        (TypeError, {"features": {"x": np.float32}}, "needs a FixedLenFeature or VarLenFeature or"),
        (ValueError, {"compression": "zip"}, "knows the compressions"),
        (ValueError, {"shuffle_buffer_size": 0}, "shuffle_buffer_size must be an int >= 1; got 0."),
        (ValueError, {"cycle_length": True}, "cycle_length must be an int >= 1; got True."),
        (ValueError, {"batch_size": 0}, "batch_size must be an int >= 1; got 0."),
        (ValueError, {"shuffle": None}, "shuffle must be provided and explicitly set as boolean"),
    ],
)
def test_mistakes_are_told_at_once(error, change, message):
    with pytest.raises(error, match=re.escape(message)):
        est.inputs.tfrecord_input_fn(**{"file_pattern": "file", "features": FEATURES, **change})


def test_errors_while_reading_name_the_file_and_the_byte(tmp_path):
    pattern = write(tmp_path)
    second = len(example(0)) + 16
    with est.io.TFRecordWriter(tmp_path / "part-0") as writer:
        writer.write(example(0)), writer.write(b"")
    with pytest.raises(ValueError, match=rf"Feature: id .* This is the record at byte {second} of '{tmp_path}/part-0'"):
        list(make(pattern, shuffle=False)())
    (tmp_path / "part-0").write_bytes(b"damage")
    with pytest.raises(ValueError, match=rf"{tmp_path}/part-0' is damaged at byte 0"):
        list(make(pattern)())
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="found no records in"):
        next(make(str(tmp_path / "empty"), num_epochs=None)())
    with pytest.raises(FileNotFoundError, match="nowhere"):
        next(make(str(tmp_path / "nowhere"))())


model_fn = regressing(lambda features: est.layers.dense(features["x"], 1)[:, 0], optax.adam(0.1))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, MirroredStrategy(2)])
def test_a_training_that_stopped_ends_as_one_that_did_not(tmp_path, strategy):
    features = {key: FEATURES[key] for key in ("x", "id")}
    input_fn = make(write(tmp_path), 4, features, label_key="id", num_epochs=3, shuffle_buffer_size=9, seed=7)

    def train(name, *steps):
        config = est.RunConfig(str(tmp_path / name), train_distribute=strategy)
        for max_steps in steps:
            est.Estimator(model_fn, config=config).train(input_fn, max_steps=max_steps)
        return values(est.Estimator(model_fn, config=config))

    whole, parts = train("whole", 18), train("parts", 11, 18)
    assert whole["global_step"] == 18 and bits(whole) == bits(parts)


def test_stores_are_read_by_a_pattern():
    for i in range(2):
        with est.io.TFRecordWriter(f"memory://tfrecords/part-{i}") as writer:
            writer.write(example(i))
    assert ids(make("memory://tfrecords/part-*", 1, shuffle=False)()) == [[0], [1]]
