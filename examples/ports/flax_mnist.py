"""Port of Flax's MNIST example: its network as it is, and a model_fn in place of its TrainState and its functions.

    python examples/ports/flax_mnist.py --towers 4

The original is `examples/mnist/train.py` of google/flax, in Linen; the images are scikit-learn's digits. Its
`create_train_state` has no counterpart: the state is made of what the model_fn uses.
"""

import argparse

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

PARAMS = {"learning_rate": 0.1, "momentum": 0.9, "batch_size": 128}


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=32, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(features=64, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=256)(x))
        return nn.Dense(features=10)(x)


def model_fn(features, labels, mode, params):
    logits = est.flax_module(CNN(), "cnn")(features)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=logits.argmax(-1))
    one_hot = jax.nn.one_hot(labels, 10)
    loss = optax.softmax_cross_entropy(logits=logits, labels=one_hot).mean()
    metrics = {"accuracy": est.metrics.accuracy(labels, logits.argmax(-1))}
    tx = TowerOptimizer(optax.sgd(params["learning_rate"], params["momentum"]))
    return est.EstimatorSpec(mode, loss=loss, train_op=tx.minimize(loss), eval_metric_ops=metrics)


def load_data():
    images, labels = load_digits(return_X_y=True)
    images, labels = np.float32(images / 16).reshape(-1, 8, 8, 1), np.int32(labels)
    return (images[:-400], labels[:-400]), (images[-400:], labels[-400:])


def main(towers=4, steps=200, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    classifier = est.Estimator(replicate_model_fn(model_fn, devices=jax.devices()[:towers]), model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    test_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    metrics = classifier.train(train_input_fn, steps=steps).evaluate(test_input_fn)
    predictions = list(classifier.predict(test_input_fn))
    served = est.load_exported(classifier.export_model(f"{classifier.model_dir}/export", test_x))(test_x)
    return classifier, metrics, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
