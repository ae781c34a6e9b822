"""Port of the tutorial `cifar10_estimator`: a ResNet on towers that it makes by hand, its variables on one or all GPUs.

    python examples/ports/cifar10_estimator.py --towers 4 --variable_strategy GPU

The original is `tutorials/image/cifar10_estimator` of tensorflow/models, 2018. Its loop over devices, its device setter
and its averaging of gradients are `replicate_model_fn`; the examples per second are what `StepCounterHook` logs.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn

PARAMS = {
    "num_layers": 8,
    "batch_size": 128,
    "batch_norm_decay": 0.997,
    "batch_norm_epsilon": 1e-5,
    "weight_decay": 2e-4,
    "momentum": 0.9,
    "learning_rate": 0.1,
    "train_size": 1397,
}


def batch_norm(x, params):
    return est.layers.batch_normalization(
        x, momentum=params["batch_norm_decay"], epsilon=params["batch_norm_epsilon"], scale=False, synchronized=True
    )


def conv(x, kernel_size, filters, strides):
    return est.layers.conv2d(x, filters, kernel_size, strides, padding="same", use_bias=False)


def residual_v1(x, in_filter, out_filter, stride, params):
    orig_x = x
    x = jax.nn.relu(batch_norm(conv(x, 3, out_filter, stride), params))
    x = batch_norm(conv(x, 3, out_filter, 1), params)
    if in_filter != out_filter:
        orig_x = est.layers.average_pooling2d(orig_x, stride, stride)
        pad = (out_filter - in_filter) // 2
        orig_x = jnp.pad(orig_x, [(0, 0), (0, 0), (0, 0), (pad, pad)])
    return jax.nn.relu(x + orig_x)


def forward_pass(x, params):
    x = jax.nn.relu(batch_norm(conv(x, 3, 16, 1), params))
    filters = [16, 16, 32, 64]
    for i, stride in enumerate([1, 2, 2]):
        for j in range((params["num_layers"] - 2) // 6):
            x = residual_v1(x, filters[i + (j > 0)], filters[i + 1], stride if j == 0 else 1, params)
    x = est.layers.global_average_pooling2d(x)
    return est.layers.dense(x, 10)


def _tower_fn(feature, label, params):
    with est.variable_scope("resnet"):
        logits = forward_pass(feature, params)
    tower_pred = {"classes": logits.argmax(1), "probabilities": jax.nn.softmax(logits)}
    if label is None:
        return None, tower_pred
    tower_loss = est.losses.sparse_softmax_cross_entropy(logits=logits, labels=label)
    model_params = est.trainable_variables()
    tower_loss += params["weight_decay"] * sum(est.nn.l2_loss(v) for v in model_params.values())
    return tower_loss, tower_pred


def _resnet_model_fn(features, labels, mode, params):
    loss, predictions = _tower_fn(features, labels, params)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=predictions)
    num_batches_per_epoch = params["train_size"] // params["batch_size"]
    boundaries = [num_batches_per_epoch * x for x in (82, 123, 300)]
    staged_lr = [params["learning_rate"] * x for x in (1, 0.1, 0.01, 0.002)]
    learning_rate = est.train.piecewise_constant(est.global_step(), boundaries, staged_lr)
    tensors_to_log = {"learning_rate": learning_rate, "loss": loss}
    train_hooks = [est.LoggingTensorHook(tensors_to_log, every_n_iter=100)]
    optimizer = TowerOptimizer(est.train.MomentumOptimizer(learning_rate, params["momentum"]))
    train_op = optimizer.minimize(loss, global_step=est.global_step())
    metrics = {"accuracy": est.metrics.accuracy(labels, predictions["classes"])}
    return est.EstimatorSpec(mode, predictions, loss, train_op, eval_metric_ops=metrics, training_hooks=train_hooks)


def load_data():
    train_size = PARAMS["train_size"]
    images, labels = load_digits(return_X_y=True)
    red = np.float32(images / 16).reshape(-1, 8, 8)
    images, labels = np.stack([red, 1 - red, red**2], axis=-1), np.int32(labels)
    return (images[:train_size], labels[:train_size]), (images[train_size:], labels[train_size:])


def main(towers=4, steps=200, model_dir=None, variable_strategy="CPU", **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    distribution = {
        "CPU": VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER,
        "GPU": VariableDistribution.SHARED_ROUND_ROBIN,
    }[variable_strategy]
    model_fn = replicate_model_fn(_resnet_model_fn, devices=jax.devices()[:towers], variable_distribution=distribution)
    classifier = est.Estimator(model_fn, model_dir, params=params)
    input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    classifier.train(input_fn, [est.StepCounterHook(every_n_steps=100)], steps=steps)
    eval_results = classifier.evaluate(eval_input_fn)
    predictions = list(classifier.predict(eval_input_fn))
    served = est.load_exported(classifier.export_model(f"{classifier.model_dir}/export", test_x))(test_x)
    return classifier, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--variable_strategy", default="CPU", choices=["CPU", "GPU"])
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
