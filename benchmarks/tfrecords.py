"""Speed of reading TFRecord files and of parsing `tf.Example`s, in CPU seconds of this process.

    python benchmarks/tfrecords.py [--records 20000] [--rounds 3]

Records of 10 KB are read, and batches of 200 examples of ten numbers are parsed: ten in one feature, and one in each of
ten. Where TensorFlow is installed, its `tf.data` and `tf.io.parse_example` take turns with ours.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time

import numpy as np

import estimator as est

BATCH = 200
IN_ONE = {"x": est.io.FixedLenFeature([10], np.float32)}
IN_TEN = {f"x{i}": est.io.FixedLenFeature([], np.float32) for i in range(10)}


def write(path, records):
    with est.io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path


def examples(count, features):
    random = np.random.default_rng(0)
    for _ in range(count):
        example = est.io.Example()
        for key, config in features.items():
            example.features.feature[key].float_list.value.extend(random.random(int(np.prod(config.shape))))
        yield example.SerializeToString()


def batches(records):
    records = iter(records)
    while batch := list(itertools.islice(records, BATCH)):
        yield batch


def ours(features):
    return lambda data: [est.io.parse_example(batch, features) for batch in batches(data)]


def tensorflows(features):
    import tensorflow as tf

    configs = {key: tf.io.FixedLenFeature(config.shape, tf.float32) for key, config in features.items()}
    parse = tf.function(lambda batch: tf.io.parse_example(batch, configs))
    return lambda data: [parse(tf.constant(batch)) for batch in batches(data)]


def read_by_tensorflow(path):
    import tensorflow as tf

    return sum(len(record) for record in tf.data.TFRecordDataset(path).as_numpy_iterator())


def cpu_seconds(run, argument):
    start = time.process_time()
    run(argument)
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    try:
        import tensorflow  # noqa: F401
    except ImportError:
        others = None
    else:
        others = {"reading": read_by_tensorflow, "in one": tensorflows(IN_ONE), "in ten": tensorflows(IN_TEN)}
    with tempfile.TemporaryDirectory() as folder:
        path = write(os.path.join(folder, "big"), (os.urandom(10_000) for _ in range(arguments.records)))
        cases = {
            "reading": (
                lambda path: sum(map(len, est.io.tf_record_iterator(path))),
                path,
                arguments.records / 100,
                "MB/s",
            ),
            "in one": (ours(IN_ONE), list(examples(arguments.records, IN_ONE)), arguments.records, "examples/s"),
            "in ten": (ours(IN_TEN), list(examples(arguments.records, IN_TEN)), arguments.records, "examples/s"),
        }
        for name, (run, argument, amount, unit) in cases.items():
            sides = [run] if others is None else [run, others[name]]
            seconds = [[cpu_seconds(side, argument) for side in sides] for _ in range(arguments.rounds)]
            figures = [f"{amount / statistics.median(each):12,.0f} {unit}" for each in zip(*seconds, strict=True)]
            print(f"{name:10}{figures[0]}{'' if others is None else ', TensorFlow' + figures[1]}", flush=True)


if __name__ == "__main__":
    main()
