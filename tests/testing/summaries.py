"""Models that show something, and what TensorBoard would show of them."""

import itertools
import math
import os
import struct

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

import estimator as est
from estimator.summary._event_writer import EventWriter
from testing.estimators import Linear, X, Y
from testing.hooks import When, raising


def write(directory, rows, first=1, last=math.inf):
    """Writes the values of each step, one second apart, as a run from step `first` does."""
    writer = EventWriter(str(directory), first, last)
    for step, values in rows.items():
        writer.write(step, 1000.0 + step, values)
    writer.close()


def read_events(directory):
    """All events of a directory's event files, as TensorBoard reads them: of each file up to a torn record."""
    events = []
    for name in sorted(n for n in os.listdir(directory) if ".tfevents." in n):
        with open(os.path.join(directory, name), "rb") as file:
            while len(header := file.read(12)) == 12:
                size, crc = struct.unpack("<QI", header)
                assert crc == masked_crc32c(header[:8])
                record = file.read(size + 4)
                if len(record) < size + 4:
                    break
                assert struct.unpack("<I", record[size:]) == (masked_crc32c(record[:size]),)
                events.append(Event.FromString(record[:size]))
    return events


def shown(directory):
    """What TensorBoard shows: pairs of step and `Summary.Value` by tag, without the steps that a START drops."""
    by_tag = {}
    events = read_events(directory)
    assert events[0].file_version == "brain.Event:2"
    for event in events:
        if event.session_log.status == SessionLog.START:
            for tag, points in by_tag.items():
                by_tag[tag] = [(step, value) for step, value in points if step < event.step]
        for value in event.summary.value:
            by_tag.setdefault(value.tag, []).append((event.step, value))
    return {tag: points for tag, points in by_tag.items() if points}


def scalars(directory):
    """Pairs of step and number by tag."""
    return {
        tag: [(step, value.simple_value) for step, value in points]
        for tag, points in shown(directory).items()
        if points[0][1].HasField("simple_value")
    }


def steps_of(points):
    return [step for step, _ in points]


class Losses(est.Hook):
    """The loss of every step."""

    def begin(self):
        self.of = {}

    def after_run(self, context, values):
        self.of[context.global_step] = values.loss


class Fails(When):
    def __init__(self, step):
        super().__init__(step, after_run=raising(RuntimeError("it fails here")))


def changing():
    """Batches that differ, so that each step has a loss of its own."""
    return ((X * (1 + i % 7 / 7), Y) for i in itertools.count())


def showing(features, labels, mode):
    """A model_fn that shows one summary of each kind."""
    spec = Linear()(features, labels, mode)
    est.summary.scalar("brightness", features.mean())
    est.record("quiet", features.max())
    with est.variable_scope("input"):
        est.summary.histogram("values", features)
        est.summary.image("rows", features.reshape(-1, 1, 2, 1) / 20, max_outputs=2)
    return spec


def read(directory, tag="loss"):
    return {row["step"]: row[tag] for row in est.read_history(directory) if tag in row}
