"""Tells happy reviews from angry ones: an LSTM over columns of sequences, with strings as words and as labels.

    python examples/sequences.py               # two towers: two CPU devices, or all GPUs
    python examples/sequences.py --towers=4    # four CPU devices

A review is a sequence of words, and of numbers, how loud each word is. It is generated: what it says depends on its
words, which "not" turns into their opposite, and a loud word counts. Reviews differ in length.
"""

import logging

import jax
import numpy as np
import optax
from absl import app, flags

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

FLAGS = flags.FLAGS
flags.DEFINE_integer("towers", 2, "How many CPU devices to use; GPUs are all used.", lower_bound=1)
flags.DEFINE_integer("steps", 300, "How many steps to train.", lower_bound=1)
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")

FEELINGS = {"great": 1, "good": 1, "nice": 1, "bad": -1, "poor": -1, "awful": -1}
WORDS = [*FEELINGS, "not", "the", "film", "was"]
LABELS = ["angry", "happy"]

fc = est.feature_column
COLUMNS = [
    fc.embedding_column(fc.sequence_categorical_column_with_vocabulary_list("words", WORDS), 8),
    fc.sequence_numeric_column("loudness"),
]


def reviews(number, seed):
    """Lists of words and of numbers, and labels."""
    random = np.random.default_rng(seed)
    words = [random.choice([*WORDS, "er"], random.integers(3, 13)).tolist() for _ in range(number)]
    loudness = [random.integers(1, 4, len(row)).astype(np.float32).tolist() for row in words]
    labels = []
    for row, loud in zip(words, loudness, strict=True):
        before = ["", *row]
        signs = [-1 if word == "not" else 1 for word in before]
        total = sum(s * n * FEELINGS.get(word, 0) for s, n, word in zip(signs, loud, row, strict=False))
        labels.append("happy" if total > 0 else "angry")
    return {"words": words, "loudness": loudness}, labels


def input_fn(features, labels):
    """Sequences filled up to 12 steps, and strings turned into integers: a compiled program has none."""
    padding = {"words": "", "loudness": np.nan}
    padded, _ = est.inputs.pad_batches((features, np.zeros(len(labels))), values=padding, pad_to=12)
    return fc.encode(padded, COLUMNS), fc.encode_labels(labels, LABELS)


def model_fn(features, labels, mode, params):
    inputs, lengths = fc.sequence_input_layer(features, COLUMNS)
    _, state = est.layers.lstm(inputs, 16, sequence_length=lengths)
    logits = est.layers.dense(state.h, 1)
    head = est.BinaryClassHead(label_vocabulary=LABELS)
    optimizer = TowerOptimizer(optax.adam(params["learning_rate"]))
    return head.create_estimator_spec(features, mode, logits, labels, optimizer)


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    towers = f"{jax.device_count()} x {jax.default_backend()}"
    train_x, train_y = input_fn(*reviews(4096, seed=0))
    texts, names = reviews(500, seed=1)
    test_x, test_y = input_fn(texts, names)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, 128, num_epochs=None, shuffle=True, seed=0)
    test_input_fn = est.inputs.numpy_input_fn(test_x, test_y, shuffle=False)
    classifier = est.Estimator(replicate_model_fn(model_fn), FLAGS.model_dir, params={"learning_rate": 0.02})
    classifier.train(train_input_fn, steps=FLAGS.steps)
    result = classifier.evaluate(test_input_fn)
    print(f"\nAfter {result['global_step']} steps on {towers}: test accuracy {result['accuracy']:.2%}.\n")
    for i, prediction in zip(range(5), classifier.predict(test_input_fn), strict=False):
        print(f"  {' '.join(texts['words'][i])}: {prediction['classes'][0]}, is {names[i]}")


if __name__ == "__main__":
    app.run(main)
