"""Port of the official ResNet for CIFAR-10: the second version of the block, weight decay, momentum, a stepwise rate.

    python examples/ports/official_resnet.py --towers 4

The original is `official/resnet` of tensorflow/models: `resnet_model.py`, `resnet_run_loop.py`, `cifar10_main.py`. The
images are scikit-learn's digits in three colours, and the network has eight layers.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

_BATCH_NORM_DECAY = 0.997
_BATCH_NORM_EPSILON = 1e-5
_NUM_IMAGES = 1397
PARAMS = {"resnet_size": 8, "num_filters": 16, "batch_size": 128, "loss_scale": 1, "learning_rate": 0.1}


def batch_norm(inputs):
    return est.layers.batch_normalization(
        inputs, momentum=_BATCH_NORM_DECAY, epsilon=_BATCH_NORM_EPSILON, synchronized=True
    )


def fixed_padding(inputs, kernel_size):
    pad_beg = (kernel_size - 1) // 2
    pad_end = kernel_size - 1 - pad_beg
    return jnp.pad(inputs, [(0, 0), (pad_beg, pad_end), (pad_beg, pad_end), (0, 0)])


def conv2d_fixed_padding(inputs, filters, kernel_size, strides):
    if strides > 1:
        inputs = fixed_padding(inputs, kernel_size)
    return est.layers.conv2d(
        inputs,
        filters,
        kernel_size,
        strides,
        padding="same" if strides == 1 else "valid",
        use_bias=False,
        kernel_initializer=jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal"),
    )


def building_block_v2(inputs, filters, projection_shortcut, strides):
    shortcut = inputs
    inputs = jax.nn.relu(batch_norm(inputs))
    if projection_shortcut is not None:
        shortcut = projection_shortcut(inputs)
    inputs = conv2d_fixed_padding(inputs, filters, 3, strides)
    inputs = jax.nn.relu(batch_norm(inputs))
    return conv2d_fixed_padding(inputs, filters, 3, 1) + shortcut


def block_layer(inputs, filters, blocks, strides):
    def projection_shortcut(inputs):
        return conv2d_fixed_padding(inputs, filters, 1, strides)

    inputs = building_block_v2(inputs, filters, projection_shortcut, strides)
    for _ in range(1, blocks):
        inputs = building_block_v2(inputs, filters, None, 1)
    return inputs


def cifar10_model(inputs, params, num_classes=10):
    with est.variable_scope("resnet_model"):
        inputs = conv2d_fixed_padding(inputs, params["num_filters"], 3, 1)
        for i, strides in enumerate([1, 2, 2]):
            num_blocks = (params["resnet_size"] - 2) // 6
            inputs = block_layer(inputs, params["num_filters"] * 2**i, num_blocks, strides)
        inputs = jax.nn.relu(batch_norm(inputs))
        inputs = inputs.mean((1, 2))
        return est.layers.dense(inputs, num_classes)


def learning_rate_with_decay(params, boundary_epochs=(100, 150, 200), decay_rates=(1, 0.1, 0.01, 0.001)):
    batches_per_epoch = _NUM_IMAGES / params["batch_size"]
    boundaries = [int(batches_per_epoch * epoch) for epoch in boundary_epochs]
    vals = [params["learning_rate"] * decay for decay in decay_rates]
    return est.train.piecewise_constant(None, boundaries, vals)  # a function of the step


def resnet_model_fn(features, labels, mode, params, weight_decay=2e-4, momentum=0.9):
    est.summary.image("images", features[:6])
    logits = cifar10_model(features, params)
    predictions = {"classes": logits.argmax(1), "probabilities": jax.nn.softmax(logits)}
    if mode == est.ModeKeys.PREDICT:
        export_outputs = {"predict": est.export.PredictOutput(predictions)}
        return est.EstimatorSpec(mode, predictions=predictions, export_outputs=export_outputs)

    cross_entropy = est.losses.sparse_softmax_cross_entropy(labels, logits)
    est.record("cross_entropy", cross_entropy)
    est.summary.scalar("cross_entropy", cross_entropy)
    decayed = [v for name, v in est.trainable_variables().items() if "batch_normalization" not in name]
    l2_loss = weight_decay * sum(est.nn.l2_loss(v) for v in decayed)
    est.summary.scalar("l2_loss", l2_loss)
    loss = cross_entropy + l2_loss

    train_op = None
    if mode == est.ModeKeys.TRAIN:
        learning_rate = learning_rate_with_decay(params)(est.global_step())
        est.record("learning_rate", learning_rate)
        est.summary.scalar("learning_rate", learning_rate)
        optimizer = TowerOptimizer(est.train.MomentumOptimizer(learning_rate, momentum))
        if params["loss_scale"] != 1:
            grad_vars = optimizer.compute_gradients(loss * params["loss_scale"])
            unscaled_grad_vars = [(grad / params["loss_scale"], var) for grad, var in grad_vars]
            train_op = optimizer.apply_gradients(unscaled_grad_vars, est.global_step())
        else:
            train_op = optimizer.minimize(loss, est.global_step())

    accuracy = est.metrics.accuracy(labels, predictions["classes"])
    est.record("train_accuracy", accuracy[1])
    est.summary.scalar("train_accuracy", accuracy[1])
    return est.EstimatorSpec(
        mode, predictions=predictions, loss=loss, train_op=train_op, eval_metric_ops={"accuracy": accuracy}
    )


def load_data():
    images, labels = load_digits(return_X_y=True)
    red = np.float32(images / 16).reshape(-1, 8, 8)
    images, labels = np.stack([red, 1 - red, red**2], axis=-1), np.int32(labels)
    return (images[:_NUM_IMAGES], labels[:_NUM_IMAGES]), (images[_NUM_IMAGES:], labels[_NUM_IMAGES:])


def main(towers=4, steps=200, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    classifier = est.Estimator(
        replicate_model_fn(resnet_model_fn, devices=jax.devices()[:towers]), model_dir, params=params
    )
    input_fn_train = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    input_fn_eval = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    classifier.train(input_fn_train, steps=steps)
    eval_results = classifier.evaluate(input_fn_eval)
    predictions = list(classifier.predict(input_fn_eval))
    exported = est.load_exported(classifier.export_model(f"{classifier.model_dir}/export", test_x))
    return classifier, eval_results, predictions, exported(test_x, "predict")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
