"""Event files and history.jsonl: what is written can be read back, once for a step, whatever broke before."""

import glob
import io
import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest
from testing.summaries import read_events, scalars, shown, steps_of, write

import estimator as est
from estimator.core._record import Histogram, bucket_limits
from estimator.summary._event_writer import EventWriter, as_uint8, shown_metrics
from estimator.summary._history import cut_history


def history(directory):
    return {row["step"]: row for row in est.read_history(directory)}


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_numbers_are_in_both_files_with_their_step_and_time(tmp_path):
    write(tmp_path / "new" / "one", {1: {"loss": 0.1, "hits": 3}, 101: {"loss": 0.05}})
    assert est.read_history(tmp_path / "new" / "one") == [
        {"step": 1, "time": 1001.0, "loss": 0.1, "hits": 3},
        {"step": 101, "time": 1101.0, "loss": 0.05},
    ]
    events = [event for event in read_events(tmp_path / "new" / "one") if event.HasField("summary")]
    assert [(event.step, event.wall_time) for event in events] == [(1, 1001.0), (101, 1101.0)]
    assert scalars(tmp_path / "new" / "one") == {
        "loss": [(1, np.float32(0.1)), (101, np.float32(0.05))],
        "hits": [(1, 3.0)],
    }


def test_nan_and_infinities_are_valid_json(tmp_path):
    write(tmp_path, {1: {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5}})
    line = (tmp_path / "history.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse_constant) == {
        "step": 1, "time": 1001.0, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5,
    }  # fmt: skip
    (row,) = est.read_history(tmp_path)
    assert math.isnan(row["a"]) and (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, 1.5)


def test_a_text_is_in_the_event_file_alone(tmp_path):
    write(tmp_path, {5: {"checkpoint_path": "/somewhere/ckpt-5", "loss": 1.0}})
    ((step, value),) = shown(tmp_path)["checkpoint_path/text_summary"]
    assert step == 5 and list(value.tensor.string_val) == [b"/somewhere/ckpt-5"]
    assert est.read_history(tmp_path) == [{"step": 5, "time": 1005.0, "loss": 1.0}]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_can_be_looked_at(tmp_path, channels):
    imread = pytest.importorskip("matplotlib.image").imread
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, channels)).astype(np.uint8)
    floats = np.array(pixels / 255, np.float32)
    floats[0, 0, 0] = [np.nan, np.inf, -np.inf, 0.5][:channels]
    write(tmp_path, {1: {"whole": pixels, "real": floats}})
    for i in range(2):
        for tag, given in (("whole", pixels[i]), ("real", np.nan_to_num(floats[i], posinf=1, neginf=0) * 255)):
            ((step, value),) = shown(tmp_path)[f"{tag}/image/{i}"]
            image = value.image
            assert (step, image.height, image.width, image.colorspace) == (1, 5, 7, max(channels, 3))
            seen = imread(io.BytesIO(image.encoded_image_string))  # grey comes as three equal colours
            np.testing.assert_array_equal(np.round(seen * 255), np.broadcast_to(np.round(given), seen.shape))


def test_images_of_other_values_are_scaled_each_by_itself_as_in_tensorflow():
    images = np.array([[-2, 0, 1, 2], [0, 50, 100, 200], [-1, -1, -1, -1], [0, 0, 0, 1]], np.float32)
    pixels = as_uint8(images.reshape(4, 2, 2, 1)).reshape(4, 4)
    assert pixels.tolist() == [[1, 128, 192, 255], [0, 64, 128, 255], [1, 1, 1, 1], [0, 0, 0, 255]]


def test_a_histogram_has_all_values_and_joins_empty_buckets(tmp_path):
    values = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    write(tmp_path, {1: {"h": Histogram.of(jnp.asarray(values)), **shown_metrics({"m": values})}})
    for tag in ("h", "m"):  # of a model_fn, and of a metric
        histogram = shown(tmp_path)[tag][0][1].histo
        assert (histogram.num, histogram.min, histogram.max) == (values.size, values.min(), values.max())
        np.testing.assert_allclose([histogram.sum, histogram.sum_squares], [values.sum(), (values**2).sum()], rtol=1e-4)
        limits, counts = np.array(histogram.bucket_limit), np.array(histogram.bucket)
        assert counts.sum() == values.size and (np.diff(limits) > 0).all()
        assert len(counts) < len(bucket_limits()) / 4
        assert not ((counts[1:] == 0) & (counts[:-1] == 0)).any()
        # Up to each limit there are as many values as TensorBoard thinks.
        np.testing.assert_array_equal(np.cumsum(counts), [(values <= limit).sum() for limit in limits])


@pytest.mark.parametrize("processes, files", [(1, 1), (2, 2)])
def test_a_run_replaces_the_steps_it_repeats(tmp_path, monkeypatch, processes, files):
    write(tmp_path, {step: {"loss": 1.0, "old": 0.0} for step in (1, 51, 101, 151, 201)})
    if processes == 2:
        monkeypatch.setattr("estimator.summary._event_writer._PROCESS", "another")
    write(tmp_path, {step: {"loss": 2.0} for step in (101, 201)}, first=101)
    want = [(1, 1.0), (51, 1.0), (101, 2.0), (201, 2.0)]
    assert [(row["step"], row["loss"]) for row in est.read_history(tmp_path)] == want
    assert scalars(tmp_path) == {"loss": want, "old": [(1, 0.0), (51, 0.0)]}
    assert len(glob.glob(f"{tmp_path}/*tfevents*")) == files


def test_after_the_file_of_another_process_a_new_one_begins(tmp_path, monkeypatch):
    """TensorBoard has left the older file. The clock may be set back meanwhile."""
    for step, process in enumerate(("a", "a", "b", "a", "a"), start=1):
        monkeypatch.setattr("estimator.summary._event_writer._PROCESS", process)
        monkeypatch.setattr("time.time_ns", lambda step=step: (2000 - 100 * step) * 10**9)
        write(tmp_path, {step: {"accuracy": float(step)}}, first=step, last=step)
    files = sorted(glob.glob(f"{tmp_path}/*tfevents*"))
    assert [name.split(".")[-2] for name in files] == ["a", "b", "a"]
    assert scalars(tmp_path) == {"accuracy": [(step, float(step)) for step in range(1, 6)]}


def test_an_evaluation_replaces_its_step_and_keeps_the_later_ones(tmp_path):
    for step, value in ((5, 1.0), (10, 2.0), (15, 3.0), (10, 4.0), (10, 5.0), (7, 6.0), (20, 7.0)):
        write(tmp_path, {step: {"accuracy": value}}, first=step, last=step)
    want = [(5, 1.0), (7, 6.0), (10, 5.0), (15, 3.0), (20, 7.0)]
    assert scalars(tmp_path) == {"accuracy": want}
    assert est.read_eval_metrics(tmp_path) == {step: {"accuracy": value} for step, value in want}
    assert list(est.read_eval_metrics(tmp_path)) == [5, 7, 10, 15, 20]


@pytest.mark.parametrize("torn", [b"{", b'{"step": 201, "ti', b'{"step": 201, "time": 1.0, "loss": 1.0}'])
def test_a_torn_last_line_is_skipped_and_removed(tmp_path, torn):
    write(tmp_path, {1: {"loss": 1.0}, 101: {"loss": 2.0}})
    with open(tmp_path / "history.jsonl", "ab") as file:
        file.write(torn)
    assert [row["step"] for row in est.read_history(tmp_path)] == [1, 101]
    write(tmp_path, {301: {"loss": 3.0}}, first=202)
    assert [row["step"] for row in est.read_history(tmp_path)] == [1, 101, 301]
    assert len((tmp_path / "history.jsonl").read_bytes().splitlines()) == 3


@pytest.mark.parametrize("missing", [1, 5, 20])
def test_a_torn_event_does_not_hide_events_of_later_runs(tmp_path, missing, monkeypatch):
    write(tmp_path, {1: {"loss": 1.0}, 101: {"loss": 2.0}})
    (path,) = glob.glob(f"{tmp_path}/*tfevents*")
    os.truncate(path, os.path.getsize(path) - missing)
    monkeypatch.setattr("estimator.summary._event_writer._PROCESS", "after the kill")
    write(tmp_path, {201: {"loss": 3.0}}, first=201)
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (201, 3.0)]}


@pytest.mark.parametrize("line", ["[3]", "{", '{"step": 2}', '{"step": 2, "time": 1, "loss": [1]}', "\x00\x00"])
def test_a_damaged_line_is_named_in_the_log_and_left_out(tmp_path, line, errors):
    good = ['{"step": 1, "time": 1.0, "loss": 1.0}', '{"step": 3, "time": 3.0, "loss": 3.0}']
    (tmp_path / "history.jsonl").write_text("\n".join([good[0], line, good[1], ""]))
    assert [row["step"] for row in est.read_history(tmp_path)] == [1, 3]
    (error,) = errors()
    assert error.startswith(f"{tmp_path}/history.jsonl is damaged: line 2 is left out, {line.encode()!r} (")
    write(tmp_path, {3: {"loss": 4.0}, 4: {"loss": 5.0}}, first=3)
    assert [(row["step"], row["loss"]) for row in est.read_history(tmp_path)] == [(1, 1.0), (3, 4.0), (4, 5.0)]


def test_lines_of_one_step_are_one_row(tmp_path):
    write(tmp_path, {1: {"loss": 1.0}})
    write(tmp_path, {1: {"rate": 2.0}}, first=2)
    assert est.read_history(tmp_path) == [{"step": 1, "time": 1001.0, "loss": 1.0, "rate": 2.0}]


def test_where_there_is_no_history(tmp_path):
    assert est.read_eval_metrics(tmp_path / "eval") == {}
    with pytest.raises(FileNotFoundError, match="There is no history.jsonl in .*/eval'. `train` writes it into"):
        est.read_history(tmp_path / "eval")


def test_a_summary_named_as_a_column_is_left_out_of_the_history_with_a_warning(tmp_path, messages):
    write(tmp_path, {1: {"time": 5.0, "loss": 1.0}, 2: {"time": 6.0}})
    assert est.read_history(tmp_path) == [{"step": 1, "time": 1001.0, "loss": 1.0}]
    assert scalars(tmp_path)["time"] == [(1, 5.0), (2, 6.0)]
    assert messages() == ["The summary 'time' is not in history.jsonl, which has a column 'time'. Rename it."]


def test_files_of_others_are_left_alone(tmp_path):
    other = tmp_path / "events.out.tfevents.99999999999.host"
    other.write_bytes(b"theirs, half writ")
    write(tmp_path, {1: {"loss": 1.0}})
    write(tmp_path, {2: {"loss": 1.0}}, first=2)
    assert other.read_bytes() == b"theirs, half writ"
    assert sorted(history(tmp_path)) == [1, 2]


def test_what_comes_within_a_second_is_written_together(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("estimator.summary._event_writer.time.monotonic", lambda: now[0])
    writer = EventWriter(str(tmp_path), 1)
    seen = []
    for step, seconds in enumerate([0.0, 0.3, 0.6, 0.2, 0.5], start=1):
        now[0] += seconds
        writer.write(step, 0.0, {"loss": 1.0})
        seen.append(max(history(tmp_path)))
    assert seen == [1, 1, 1, 4, 4]
    writer.flush()
    assert sorted(history(tmp_path)) == [1, 2, 3, 4, 5] == steps_of(scalars(tmp_path)["loss"])
    writer.close()


@pytest.mark.parametrize("steps", [[1], [7], [1, 5, 5, 9], [5, 5], range(300)])
@pytest.mark.parametrize("torn", ["", '{"step": 9, "ti'])
def test_cutting_the_end_of_a_history_is_cutting_it_all(tmp_path, steps, torn):
    lines = [json.dumps({"step": step, "time": 0.5, f"loss{i % 2}": 0.25 + i}) for i, step in enumerate(steps)]
    read = []
    for name in ("whole", "end"):
        path = tmp_path / name
        path.write_text("\n".join([*lines, torn]))
        rows = cut_history(str(path), 5, in_order=name == "end")
        read.append((rows, path.read_text() if path.exists() else ""))
    assert read[0] == read[1]


def test_an_evaluation_of_the_same_step_does_not_write_the_history_again(tmp_path):
    path = tmp_path / "history.jsonl"
    write(tmp_path, {1: {"loss": 1.0}, 2: {"loss": 2.0}})
    file = path.stat().st_ino
    write(tmp_path, {2: {"loss": 3.0}}, first=2, last=2)
    assert [row["loss"] for row in est.read_history(tmp_path)] == [1.0, 3.0]
    assert path.stat().st_ino == file


def test_a_history_of_a_single_evaluation_is_never_cut_to_nothing(tmp_path, monkeypatch):
    cut = []
    monkeypatch.setattr("estimator.summary._history.os.truncate", lambda path, size: cut.append(size))
    for loss in (1.0, 2.0, 3.0):
        write(tmp_path, {2: {"loss": loss}}, first=2, last=2)
        assert [row["loss"] for row in est.read_history(tmp_path)] == [loss]
    assert cut == []
