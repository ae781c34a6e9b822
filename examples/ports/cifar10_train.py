"""Port of TensorFlow's CIFAR-10 tutorial: response normalization, a collection of losses, and averages of everything.

    python examples/ports/cifar10_train.py --towers 4

The original is `tutorials/image/cifar10` of tensorflow/models: `cifar10.py`, `cifar10_train.py`, `cifar10_eval.py`. Its
MonitoredTrainingSession is `Estimator.train` with the same hooks. The images are scikit-learn's digits in three
colours, which are not distorted at random.
"""

import argparse
import time

import jax
import numpy as np
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

MOVING_AVERAGE_DECAY = 0.9999
LEARNING_RATE_DECAY_FACTOR = 0.1
INITIAL_LEARNING_RATE = 0.1
NUM_CLASSES = 10
LOSSES = ["local3/weight_loss", "local4/weight_loss", "cross_entropy"]
PARAMS = {
    "batch_size": 128,
    "filters": 64,
    "units": [384, 192],
    "num_epochs_per_decay": 350.0,
    "train_size": 1397,
    "log_frequency": 10,
}


def _activation_summary(x, name):
    est.summary.histogram(f"{name}/activations", x)
    est.summary.scalar(f"{name}/sparsity", est.nn.zero_fraction(x))


def _biases(shape, value):
    return est.get_variable("biases", shape, initializer=jax.nn.initializers.constant(value))


def _variable_with_weight_decay(name, shape, stddev, wd):
    var = est.get_variable(name, shape, initializer=jax.nn.initializers.truncated_normal(stddev))
    if wd is not None:
        est.losses.add_loss(wd * est.nn.l2_loss(var))
    return var


def _conv(x, filters, bias):
    kernel = _variable_with_weight_decay("weights", [5, 5, x.shape[-1], filters], stddev=5e-2, wd=None)
    conv = est.nn.conv2d(x, kernel, [1, 1, 1, 1], padding="SAME")
    return jax.nn.relu(conv + _biases([filters], bias))


def inference(images, params):
    with est.variable_scope("conv1"):
        conv1 = _conv(images, params["filters"], bias=0.0)
    _activation_summary(conv1, "conv1")
    pool1 = est.layers.max_pooling2d(conv1, 3, 2, padding="same")
    norm1 = est.nn.lrn(pool1, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)

    with est.variable_scope("conv2"):
        conv2 = _conv(norm1, params["filters"], bias=0.1)
    _activation_summary(conv2, "conv2")
    norm2 = est.nn.lrn(conv2, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)
    pool2 = est.layers.max_pooling2d(norm2, 3, 2, padding="same")

    local = est.layers.flatten(pool2)
    for name, units in zip(("local3", "local4"), params["units"], strict=True):
        with est.variable_scope(name):
            weights = _variable_with_weight_decay("weights", [local.shape[1], units], stddev=0.04, wd=0.004)
            local = jax.nn.relu(local @ weights + _biases([units], 0.1))
        _activation_summary(local, name)

    with est.variable_scope("softmax_linear"):
        shape = [local.shape[1], NUM_CLASSES]
        weights = _variable_with_weight_decay("weights", shape, stddev=1 / shape[0], wd=None)
        softmax_linear = local @ weights + _biases([NUM_CLASSES], 0.0)
    _activation_summary(softmax_linear, "softmax_linear")
    return softmax_linear


def _add_loss_summaries(total_loss):
    loss_averages = est.ExponentialMovingAverage(0.9, name="avg")
    losses = {**dict(zip(LOSSES, est.losses.get_losses(), strict=True)), "total_loss": total_loss}
    loss_averages_op = loss_averages.apply(losses.values())
    for name, loss in losses.items():
        est.summary.scalar(f"{name} (raw)", loss)
        est.summary.scalar(name, loss_averages.average(loss))
    return loss_averages_op


def train(total_loss, global_step, params):
    num_batches_per_epoch = params["train_size"] / params["batch_size"]
    decay_steps = int(num_batches_per_epoch * params["num_epochs_per_decay"])
    lr = est.train.exponential_decay(
        INITIAL_LEARNING_RATE, global_step, decay_steps, LEARNING_RATE_DECAY_FACTOR, staircase=True
    )
    est.summary.scalar("learning_rate", lr)
    loss_averages_op = _add_loss_summaries(total_loss)

    opt = TowerOptimizer(est.train.GradientDescentOptimizer(lr))
    grads = opt.compute_gradients(total_loss)
    for grad, var in grads:
        est.summary.histogram(var, est.trainable_variables()[var])
        est.summary.histogram(f"{var}/gradients", grad)
    return est.group(loss_averages_op, opt.apply_gradients(grads, global_step=global_step))


def model_fn(features, labels, mode, params):
    logits = inference(features, params)
    variable_averages = est.ExponentialMovingAverage(MOVING_AVERAGE_DECAY, est.global_step(), eval_with_averages=True)
    variables_averages_op = variable_averages.apply(est.trainable_variables())
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"classes": logits.argmax(1), "logits": logits})

    est.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
    total_loss = est.losses.get_total_loss()
    if mode == est.ModeKeys.EVAL:
        precision = est.metrics.mean(est.nn.in_top_k(logits, labels, 1))
        return est.EstimatorSpec(mode, loss=total_loss, eval_metric_ops={"precision @ 1": precision})
    train_op = est.group(train(total_loss, est.global_step(), params), variables_averages_op)
    return est.EstimatorSpec(mode, loss=total_loss, train_op=train_op)


class _LoggerHook(est.Hook):
    """Logs the loss and the speed."""

    def __init__(self, params):
        self.batch_size, self.log_frequency = params["batch_size"], params["log_frequency"]

    def after_create_state(self, context):
        self._step, self._start_time = context.global_step, time.time()

    def next_step(self, step):
        return step + -step % self.log_frequency + 1

    def before_run(self, context):
        return "loss"

    def after_run(self, context, values):
        loss_value = values.results  # waits for the step
        step, now = context.global_step, time.time()
        seconds = (now - self._start_time) / (step - self._step)
        rate = f"{self.batch_size / seconds:.1f} examples/sec; {seconds:.3f} sec/batch"
        print(f"{time.ctime()}: step {step}, loss = {loss_value:.2f} ({rate})")
        self._step, self._start_time = step, now


def load_data():
    images, labels = load_digits(return_X_y=True)
    red = np.float32(images / 16).reshape(-1, 8, 8)
    images, labels = np.stack([red, 1 - red, red**2], axis=-1), np.int32(labels)
    images -= images.mean((1, 2, 3), keepdims=True)  # per_image_standardization
    images /= images.std((1, 2, 3), keepdims=True)
    train_size = PARAMS["train_size"]
    return (images[:train_size], labels[:train_size]), (images[train_size:], labels[train_size:])


def main(towers=4, steps=400, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    classifier = est.Estimator(replicate_model_fn(model_fn, devices=jax.devices()[:towers]), model_dir, params=params)
    input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    classifier.train(input_fn, hooks=[est.StopAtStepHook(last_step=steps), est.NanTensorHook(), _LoggerHook(params)])
    eval_results = classifier.evaluate(eval_input_fn)
    predictions = list(classifier.predict(eval_input_fn))
    served = est.load_exported(classifier.export_model(f"{classifier.model_dir}/export", test_x))(test_x)
    return classifier, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
