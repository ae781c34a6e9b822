"""Runs in Weights & Biases, offline: what its files have, read as `wandb sync` reads them."""

import json
import struct

import numpy as np
import pytest
from testing.estimators import X, endless, make, times
from testing.summaries import read, showing

import estimator as est

wandb = pytest.importorskip("wandb")

from integrations.test_trackers import ODD, kill, train_with_odd_names  # noqa: E402

SETTINGS = "project='digits', mode='offline'"
TRACKER = f"est.trackers.WandbTracker({SETTINGS})"


def records(path):
    """The records of a file of W&B: LevelDB's log format, in blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def history(path):
    """The values of each `log`; of a dict among them as "tag:key"."""
    rows = [each.history for each in records(path) if each.WhichOneof("record_type") == "history"]
    return [{item.key or ":".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def files(model_dir, id):
    """The files of a run: wandb numbers the folders of one id in one second."""
    return sorted(model_dir.glob(f"wandb/offline-run-*-{id}*/run-{id}.wandb"))


@pytest.mark.slow
def test_a_killed_run_resumes_its_wandb_run_with_evaluations_within(tmp_path):
    id = kill(tmp_path, TRACKER)
    estimator = make(tmp_path, showing, save_summary_steps=10, trackers=[eval(TRACKER)])
    hook = est.InMemoryEvaluatorHook(estimator, times(1), every_n_iter=30)
    estimator.train(endless, steps=60, hooks=[hook])
    _, resumed = files(tmp_path, id)  # one id; wandb writes every 15 seconds, after the kill of this short run
    rows = history(resumed)
    losses = {row["global_step"]: row["loss"] for row in rows if "loss" in row}
    assert losses == {step: loss for step, loss in read(tmp_path).items() if step > 100}
    evaluations = {row["global_step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    assert evaluations == {step: row["loss"] for step, row in est.read_eval_metrics(estimator.eval_dir()).items()}
    assert list(evaluations) == [100, 130, 160]
    row = next(row for row in rows if row["global_step"] == 111)
    assert row["brightness"] == X.mean()
    assert sum(row["input/values:values"]) == X.size and len(row["input/values:bins"]) == 65
    assert row["input/rows:_type"] == "images/separated" and row["input/rows:count"] == 2
    assert len(list(resumed.parent.glob("files/media/images/input/rows_*.png"))) == 2 * 6
    runs = [each.run for each in records(resumed) if each.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["config/save_summary_steps"] == 10 and runs[0].run_id == id and runs[0].project == "digits"
    (end,) = [each.exit for each in records(resumed) if each.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 0


def test_the_id_and_the_config_are_not_the_users():
    with pytest.raises(TypeError, match=r"WandbTracker sets \['id'\] of `wandb.init` itself: .*; got {'id': 'x', "):
        est.trackers.WandbTracker(id="x", project="digits")


def test_histograms_with_many_buckets_are_taken(tmp_path):
    values = np.concatenate([-np.geomspace(1e-6, 1e6, 2000), np.geomspace(1e-6, 1e6, 2000)]).astype(np.float32)
    counts, edges = est.trackers.Histogram.of(values).rebin(64)
    assert wandb.Histogram(np_histogram=(counts, edges)).histogram == counts.tolist()


@pytest.mark.slow
def test_names_and_values_of_any_kind_are_in_the_wandb_run(tmp_path, errors):
    train_with_odd_names(tmp_path, eval(TRACKER))
    id = (tmp_path / "run_id.txt").read_text()
    logged = [row for path in files(tmp_path, id) for row in history(path)]
    for name in ODD:
        assert [row["global_step"] for row in logged if name in row] == [1, 2]
        assert {row["global_step"] for row in logged if f"eval/{name}" in row} == {0, 1, 2}
    assert not errors()
