"""The models of real shapes: their sizes, their data on disk, their initial values. It needs numpy alone.

    python benchmarks/peers/real/data.py FOLDER      # writes the data, with the Estimator's TFRecordWriter

All sides take their batches from here, but for those of wide & deep, which come from TFRecords.
"""

import dataclasses
import itertools
import math
import pathlib
import sys
import zlib

import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

MODELS = {
    "resnet": "ResNet-18, 32x32, batch 64",
    "bert": "BERT, 4 x 256, 128 words, batch 16",
    "wide_deep": "wide & deep, 26 x 100,000 x 16, batch 512",
    "tagger": "BiLSTM-CRF, 50 words, batch 64",
}
# Rows of a batch, steps, and rows that are evaluated: some seconds each on two cores.
SIZES = {"resnet": (64, 14, 320), "bert": (16, 18, 160), "wide_deep": (512, 60, 10_240), "tagger": (64, 35, 1920)}
CLASSES, FILTERS, MOMENTUM, EPSILON = 10, (64, 128, 256, 512), 0.9, 1e-5  # of the ResNet and its norms
WORDS, WIDTH, LENGTH, BLOCKS, HEADS, TINY = 8192, 256, 128, 4, 4, 1e-12  # of the BERT and its norms
COLUMNS, NUMBERS, BUCKETS, ROW, HIDDEN = 26, 13, 100_000, 16, (256, 128)  # of wide & deep
TAGGER_WORDS, TAGGER_WIDTH, UNITS, STEPS, TAGS = 10_000, 100, 128, 50, 9
PEAK, WARM_UP, DECAY = 3e-4, 10, 0.01  # AdamW's
RATES = {"resnet": 0.002, "wide_deep": 0.05, "tagger": 1e-3}


Values = dict[str, tuple[tuple[int, ...], float, float]]  # shape, mean and deviation by name


@dataclasses.dataclass(frozen=True)
class Work:
    """One epoch of `steps` batches of `batch_size` rows, the first `warm` untimed; `rows` others are evaluated.

    The same rows are predicted.
    """

    model: str
    folder: pathlib.Path
    steps: int
    batch_size: int
    rows: int
    warm: int

    @property
    def marks(self) -> tuple[int, int, int]:
        return 1, self.warm, self.steps

    def described(self) -> Values:
        return {"resnet": resnet, "bert": bert, "wide_deep": wide_deep, "tagger": tagger}[self.model]()

    def initial(self) -> dict[str, np.ndarray]:
        """The initial values; 1 is in the LSTMs' bias of the gate f, which TensorFlow adds in each step instead."""
        values = {name: draw(np, name, *described) for name, described in self.described().items()}
        if self.model == "tagger":
            for name in ("forwards", "backwards"):
                values[f"{name}/bias"][2 * UNITS : 3 * UNITS] = 1
        return values

    def batches(self, part: str):
        """Pairs of features and labels; `part` is "train" or "test"."""
        arrays = [np.load(path, mmap_mode="r") for path in sorted(self.folder.glob(f"{self.model}-{part}-*.npy"))]
        random = np.random.default_rng(0)
        for begin in range(0, self.rows if part == "test" else self.steps * self.batch_size, self.batch_size):
            *x, y = (array[begin : begin + self.batch_size] for array in arrays)
            if self.model == "resnet":
                yield augment(x[0], random) if part == "train" else scaled(x[0]), np.array(y)
            else:
                words, lengths = x
                keep = np.arange(words.shape[1]) < lengths[:, None]
                yield (np.where(keep, words, 0), np.array(lengths)), np.array(y)

    def records(self, part: str) -> str:
        """The TFRecords of wide & deep."""
        return str(self.folder / f"wide_deep-{part}.tfrecord")


def work_of(model: str, quick: bool, folder: str) -> Work:
    batch_size, steps, rows = SIZES[model]
    steps, rows = (4, batch_size) if quick else (steps, rows)
    return Work(model, pathlib.Path(folder), steps, batch_size, rows, warm=2 if quick else 4)


def scaled(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / np.float32(128) - 1


def augment(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Crops of images padded by 4, each second one flipped."""
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (32, 32), (1, 2))
    top, left = random.integers(0, 9, (2, len(images)))
    crops = windows[np.arange(len(images)), top, left].transpose(0, 2, 3, 1)
    flip = random.random(len(images)) < 0.5
    return scaled(np.where(flip[:, None, None, None], crops[:, :, ::-1], crops))


def hashed(ids: np.ndarray) -> np.ndarray:
    """The bucket of an integer: the finalizer of MurmurHash3, as hash columns have it."""
    bits = ids.astype(np.uint32)
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return ((bits ^ (bits >> 16)) % np.uint32(BUCKETS)).astype(np.int32)


# Initial values, by name: the layer, "/", and kernel, bias, scale, mean, variance or embedding. They are given by their
# shape, mean and deviation: numbers follow from the name, so that no program has to hold them as constants.


def draw(xp, name: str, shape: tuple[int, ...], mean: float, deviation: float):
    """Uniform numbers, by numpy or jax.numpy."""
    if not deviation:
        return xp.full(shape, mean, xp.float32)
    seed = zlib.crc32(name.replace("backwards", "forwards").encode())
    bits = xp.arange(math.prod(shape), dtype=xp.uint32) * xp.uint32(2654435761) + xp.uint32(seed)
    bits = (bits ^ (bits >> 15)) * xp.uint32(2246822519)
    uniform = ((bits ^ (bits >> 13)) >> 8).astype(xp.float32) * xp.float32(2.0**-24)
    return (xp.float32(mean) + xp.float32(deviation * 12**0.5) * (uniform - xp.float32(0.5))).reshape(shape)


def layers(shapes: dict[str, tuple[int, ...]], bias: bool = True, gain: float = 1.0) -> Values:
    values: Values = {}
    for name, shape in shapes.items():
        values[f"{name}/kernel"] = shape, 0, math.sqrt(gain / math.prod(shape[:-1]))
        if bias:
            values[f"{name}/bias"] = shape[-1:], 0, 0
    return values


def blocks():
    """The blocks of the ResNet: name, inputs, filters, strides."""
    inputs = FILTERS[0]
    for (i, filters), j in itertools.product(enumerate(FILTERS), range(2)):
        yield f"block{i}{j}", inputs, filters, 2 if i and not j else 1
        inputs = filters


def resnet() -> Values:
    convolutions = {"stem": (7, 7, 3, FILTERS[0])}
    for name, inputs, filters, strides in blocks():
        convolutions |= {f"{name}_a": (3, 3, inputs, filters), f"{name}_b": (3, 3, filters, filters)}
        if strides > 1:
            convolutions[f"{name}_short"] = (1, 1, inputs, filters)
    values = layers(convolutions, bias=False, gain=2.0) | layers({"out": (FILTERS[-1], CLASSES)})
    for name, shape in convolutions.items():
        norm = {"scale": 1, "bias": 0, "mean": 0, "variance": 1}
        values |= {f"{name}_norm/{kind}": (shape[-1:], mean, 0) for kind, mean in norm.items()}
    return values


def bert() -> Values:
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "mix": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    values = layers({f"{name}{i}": shape for i in range(BLOCKS) for name, shape in sizes.items()})
    values |= layers({"pool": (WIDTH, WIDTH), "out": (WIDTH, 2)})
    for name in ("norm", *(f"norm{kind}{i}" for i in range(BLOCKS) for kind in "ab")):
        values |= {f"{name}/scale": ((WIDTH,), 1, 0), f"{name}/bias": ((WIDTH,), 0, 0)}
    return values | {"words/embedding": ((WORDS, WIDTH), 0, 0.02), "positions/embedding": ((LENGTH, WIDTH), 0, 0.02)}


def wide_deep() -> Values:
    sizes = (COLUMNS * ROW + NUMBERS, *HIDDEN, 1)
    values = layers({f"deep{i}": sizes[i : i + 2] for i in range(len(sizes) - 1)}, gain=2.0)
    for i in range(COLUMNS):
        values |= {f"c{i:02}/embedding": ((BUCKETS, ROW), 0, 0.25), f"w{i:02}/embedding": ((BUCKETS, 1), 0, 0)}
    return values


def tagger() -> Values:
    """Kernels of the LSTMs, the same in both directions, have the gates i, g, f, o."""
    cell = (TAGGER_WIDTH + UNITS, 4 * UNITS)
    values = layers({"forwards": cell, "backwards": cell, "out": (2 * UNITS, TAGS)})
    values["words/embedding"] = (TAGGER_WORDS, TAGGER_WIDTH), 0, 0.1
    return values | {"crf/transitions": ((TAGS, TAGS), 0, 0.1)}


# The data. Labels follow from features, so that there is something to learn.


def write(folder: pathlib.Path, models: list[str]) -> None:
    """Writes the rows of these models; the same ones whichever these are."""
    for seed, part in enumerate(("train", "test")):
        random = np.random.default_rng(10 + seed)
        rows = {
            model: batch_size * steps if part == "train" else tested
            for model, (batch_size, steps, tested) in SIZES.items()
        }
        y = random.integers(0, CLASSES, rows["resnet"], np.int32)
        means = np.random.default_rng(9).integers(40, 216, (CLASSES, 4, 4, 3)).repeat(8, 1).repeat(8, 2)
        x = np.clip(means[y] + random.normal(0, 40, (len(y), 32, 32, 3)), 0, 255).astype(np.uint8)
        save(folder, f"resnet-{part}", x, y)

        lengths = random.integers(16, LENGTH + 1, rows["bert"], np.int32)
        y = random.integers(0, 2, len(lengths), np.int32)
        words = random.integers(2, WORDS, (len(y), LENGTH), np.int32)
        feeling = random.random(words.shape) < 0.2  # the words that tell
        words = np.where(feeling, 2 + words % 50 + 50 * y[:, None], words).astype(np.int32)
        save(folder, f"bert-{part}", words, lengths, y)

        lengths = random.integers(5, STEPS + 1, rows["tagger"], np.int32)
        words = np.minimum(random.zipf(1.3, (len(lengths), STEPS)), TAGGER_WORDS - 1).astype(np.int32)
        save(folder, f"tagger-{part}", words, lengths, (words + np.roll(words, 1, 1)) % TAGS)

        if "wide_deep" in models:  # the others, which take no time, are drawn before it
            write_records(folder / f"wide_deep-{part}.tfrecord", rows["wide_deep"], random)


def save(folder: pathlib.Path, name: str, *arrays: np.ndarray) -> None:
    for i, array in enumerate(arrays):
        np.save(folder / f"{name}-{i}.npy", array)


def write_records(path: pathlib.Path, rows: int, random: np.random.Generator) -> None:
    import estimator as est

    ids = np.minimum(random.zipf(1.2, (rows, COLUMNS)), 2**30)
    numbers = random.standard_normal((rows, NUMBERS), np.float32)
    scores = numbers[:, :4].sum(1) + (ids % 3 - 1).sum(1) / 2
    labels = (scores + random.standard_normal(rows) > 0).astype(np.float32)
    with est.io.TFRecordWriter(str(path)) as writer:
        for row, others, label in zip(ids.tolist(), numbers.tolist(), labels.tolist(), strict=True):
            example = est.io.Example()
            feature = example.features.feature
            for i, value in enumerate(row):
                feature[f"c{i:02}"].int64_list.value.append(value)
            feature["numbers"].float_list.value.extend(others)
            feature["label"].float_list.value.append(label)
            writer.write(example.SerializeToString())


def records_by_tensorflow(work: Work, part: str):
    """Batches of the TFRecords as users of other libraries read them: ids of `[batch, columns]`, numbers, labels."""
    import tensorflow as tf

    features = {f"c{i:02}": tf.io.FixedLenFeature([], tf.int64) for i in range(COLUMNS)}
    features |= {
        "numbers": tf.io.FixedLenFeature([NUMBERS], tf.float32),
        "label": tf.io.FixedLenFeature([], tf.float32),
    }
    dataset = tf.data.TFRecordDataset(work.records(part)).batch(work.batch_size, drop_remainder=True)
    dataset = dataset.map(lambda batch: tf.io.parse_example(batch, features)).prefetch(2)
    count = work.steps if part == "train" else work.rows // work.batch_size
    for batch in dataset.take(count).as_numpy_iterator():
        ids = np.stack([batch[f"c{i:02}"] for i in range(COLUMNS)], 1)
        yield (hashed(ids), batch["numbers"]), batch["label"][:, None]


def batches(work: Work, part: str):
    return records_by_tensorflow(work, part) if work.model == "wide_deep" else work.batches(part)


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))
    write(pathlib.Path(sys.argv[1]), list(MODELS))
