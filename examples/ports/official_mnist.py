"""Port of the official MNIST model: two convolutions, two dense layers, dropout; its images are scikit-learn's digits.

    python examples/ports/official_mnist.py --towers 4

The original is `official/mnist/mnist.py` of tensorflow/models, June 2018, which calls `replicate_model_fn` itself.
"""

import argparse

import jax
import numpy as np
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

LEARNING_RATE = 1e-4
PARAMS = {"batch_size": 100, "filters": 32, "dropout": 0.4}


def create_model(image, training, params):
    l = est.layers  # noqa: E741
    x = image.reshape(-1, 8, 8, 1)
    x = l.conv2d(x, params["filters"], 5, padding="same", activation=jax.nn.relu)
    x = l.max_pooling2d(x, (2, 2), (2, 2), padding="same")
    x = l.conv2d(x, 2 * params["filters"], 5, padding="same", activation=jax.nn.relu)
    x = l.max_pooling2d(x, (2, 2), (2, 2), padding="same")
    x = l.dense(l.flatten(x), 32 * params["filters"], activation=jax.nn.relu)
    x = l.dropout(x, params["dropout"], training=training)
    return l.dense(x, 10)


def model_fn(features, labels, mode, params):
    image = features["image"] if isinstance(features, dict) else features
    if mode == est.ModeKeys.PREDICT:
        logits = create_model(image, False, params)
        predictions = {"classes": logits.argmax(1), "probabilities": jax.nn.softmax(logits)}
        export_outputs = {"classify": est.export.PredictOutput(predictions)}
        return est.EstimatorSpec(mode, predictions=predictions, export_outputs=export_outputs)
    if mode == est.ModeKeys.TRAIN:
        optimizer = TowerOptimizer(est.train.AdamOptimizer(learning_rate=LEARNING_RATE))
        logits = create_model(image, True, params)
        loss = est.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
        accuracy = est.metrics.accuracy(labels=labels, predictions=logits.argmax(1))
        est.record("learning_rate", LEARNING_RATE)
        est.record("cross_entropy", loss)
        est.record("train_accuracy", accuracy[1])
        est.summary.scalar("train_accuracy", accuracy[1])
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, est.global_step()))
    if mode == est.ModeKeys.EVAL:
        logits = create_model(image, False, params)
        loss = est.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
        accuracy = est.metrics.accuracy(labels=labels, predictions=logits.argmax(1))
        return est.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": accuracy})


def load_data():
    images, labels = load_digits(return_X_y=True)
    images, labels = np.float32(images / 16), np.int32(labels)
    return (images[:-400], labels[:-400]), (images[-400:], labels[-400:])


def main(towers=4, steps=1000, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    model_function = replicate_model_fn(model_fn, devices=jax.devices()[:towers])
    mnist_classifier = est.Estimator(model_function, model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    tensors_to_log = ["learning_rate", "cross_entropy", "train_accuracy"]
    mnist_classifier.train(train_input_fn, [est.LoggingTensorHook(tensors_to_log, every_n_iter=100)], steps)
    eval_results = mnist_classifier.evaluate(eval_input_fn)
    predictions = list(mnist_classifier.predict(eval_input_fn))
    export_dir = mnist_classifier.export_model(f"{mnist_classifier.model_dir}/export", test_x)
    return mnist_classifier, eval_results, predictions, est.load_exported(export_dir)(test_x, "classify")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
