"""Classifies tumours as malignant or benign: a DNNClassifier over feature columns, on any number of towers.

    python examples/feature_columns.py               # two towers: two CPU devices, or all GPUs
    python examples/feature_columns.py --towers=3    # three CPU devices: same batches, losses and accuracy

No model_fn is needed: the columns define how each feature is used, the classifier does the rest. Its model_fn is
replicated like any other, so its optimizer is a `TowerOptimizer`. The data (569 tumours, 30 measurements of the nuclei
of their cells) come with scikit-learn.
"""

import logging

import jax
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_breast_cancer

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

FLAGS = flags.FLAGS
flags.DEFINE_integer("towers", 2, "How many CPU devices to use; GPUs are all used.", lower_bound=1)
flags.DEFINE_integer("steps", 400, "How many steps to train.", lower_bound=1)
flags.DEFINE_integer("batch_size", 48, "Tumours per step, split among the towers.", lower_bound=1)
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")
flags.DEFINE_integer("seed", 0, "Of the initial values and of the order of the tumours.")

NUM_TEST = 169
SIZES = ["small", "medium", "large"]
CLASSES = ["malignant", "benign"]


def load():
    """Features by name and labels, for training and for testing, always the same."""
    data = load_breast_cancer()
    order = np.random.default_rng(1).permutation(len(data.target))
    features = {
        str(name).replace(" ", "_"): column.astype(np.float32)
        for name, column in zip(data.feature_names, data.data[order].T, strict=True)
    }
    # as a pathologist would note it: strings, and nothing for every tenth tumour
    size = np.array(SIZES)[np.digitize(features["mean_radius"], [12, 16])]
    features["size"] = np.where(np.arange(len(size)) % 10 == 0, "", size)
    labels = est.feature_column.encode_labels(np.array(CLASSES)[data.target[order]], CLASSES)
    split = [slice(NUM_TEST, None), slice(NUM_TEST)]
    return [({name: column[rows] for name, column in features.items()}, labels[rows]) for rows in split]


def make_columns(features):
    """Numbers scaled by the training data, words as vectors, and two numbers bucketed and crossed."""
    fc = est.feature_column
    columns = []
    for name, column in features.items():
        if name.startswith("worst_"):
            mean, deviation = float(column.mean()), float(column.std())
            columns.append(fc.numeric_column(name, normalizer_fn=lambda x, m=mean, d=deviation: (x - m) / d))
    size = fc.categorical_column_with_vocabulary_list("size", SIZES)
    cut = {name: np.quantile(features[name], [0.25, 0.5, 0.75]).tolist() for name in ("mean_texture", "mean_concavity")}
    parts = [fc.bucketized_column(fc.numeric_column(name), boundaries) for name, boundaries in cut.items()]
    crossed = fc.crossed_column(parts, hash_bucket_size=64)
    return [*columns, *parts, fc.embedding_column(size, 2), fc.embedding_column(crossed, 4)]


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    towers = f"{jax.device_count()} x {jax.default_backend()}"
    train, test = load()
    columns = make_columns(train[0])
    # A compiled program has no strings: they become integers here.
    train_x, test_x = (est.feature_column.encode(features, columns) for features, _ in (train, test))
    train_input_fn = est.inputs.numpy_input_fn(
        train_x, train[1], FLAGS.batch_size, num_epochs=None, shuffle=True, seed=FLAGS.seed
    )
    test_input_fn = est.inputs.numpy_input_fn(test_x, test[1], shuffle=False)

    dnn = est.DNNClassifier(
        hidden_units=[16, 8],
        feature_columns=columns,
        model_dir=FLAGS.model_dir,
        label_vocabulary=CLASSES,
        optimizer=TowerOptimizer(optax.adagrad(0.05)),
        config=est.RunConfig(seed=FLAGS.seed),
    )
    classifier = est.Estimator(replicate_model_fn(dnn.model_fn), config=dnn.config)
    classifier.train(train_input_fn, steps=FLAGS.steps)
    result = classifier.evaluate(test_input_fn)
    print(f"\nAfter {result['global_step']} steps on {towers}:", end=" ")
    print(f"test accuracy {result['accuracy']:.2%}; always saying the same has {result['accuracy_baseline']:.2%}.")
    print(f"Area under the ROC curve {result['auc']:.4f}, recall of benign {result['recall']:.2%}.\n")

    probabilities = np.array([p["probabilities"] for p in classifier.predict(test_input_fn, "probabilities")])
    print("The test tumours that it is least sure of:\n")
    for i in probabilities.max(axis=1).argsort()[:6]:
        said = probabilities[i].argmax()
        mark = "" if said == test[1][i] else "   wrong"
        size = test[0]["size"][i] or "unknown"
        print(
            f"  {size:8} texture {test[0]['mean_texture'][i]:5.1f}   concavity {test[0]['mean_concavity'][i]:.3f}   "
            f"{CLASSES[said]} ({probabilities[i, said]:.0%}), is {CLASSES[test[1][i]]}{mark}"
        )
    sizes = classifier.get_variable_value("dnn/input_from_feature_columns/input_layer/size_embedding/embedding_weights")
    print("\nThe trained vectors of the words:", end=" ")
    print(", ".join(f"{word} ({x:+.2f} {y:+.2f})" for word, (x, y) in zip(SIZES, sizes, strict=True)))


if __name__ == "__main__":
    app.run(main)
