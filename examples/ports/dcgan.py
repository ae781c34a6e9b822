"""Port of a DCGAN: a generator and a discriminator, which two optimizers train in turn, in one model_fn.

    python examples/ports/dcgan.py --towers 4

The original is insoochung/dcgan_tf_estimator, made smaller: it learns to draw scikit-learn's digits.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

PARAMS = {"z_dim": 16, "filters": 32, "learning_rate": 2e-3, "beta1": 0.5, "epsilon": 1e-8, "batch_size": 64}


def leaky_relu(x):
    return jax.nn.leaky_relu(x, 0.2)  # TensorFlow's slope


def batch_norm(x, training):
    return est.layers.batch_normalization(x, momentum=0.9, training=training, synchronized=True)


def generator(z, training, params):
    with est.variable_scope("generator", reuse=est.AUTO_REUSE):
        filters = params["filters"]
        x = est.layers.dense(z, 2 * 2 * 2 * filters)
        x = jax.nn.relu(batch_norm(x.reshape(-1, 2, 2, 2 * filters), training))
        x = est.layers.conv2d_transpose(x, filters, 5, strides=2, padding="same")
        x = jax.nn.relu(batch_norm(x, training))
        x = est.layers.conv2d_transpose(x, 1, 5, strides=2, padding="same")
        return jnp.tanh(x)


def discriminator(image, training, params):
    with est.variable_scope("discriminator", reuse=est.AUTO_REUSE):
        filters = params["filters"]
        x = leaky_relu(est.layers.conv2d(image, filters, 5, strides=2, padding="same"))
        x = est.layers.conv2d(x, 2 * filters, 5, strides=2, padding="same")
        x = leaky_relu(batch_norm(x, training))
        return est.layers.dense(est.layers.flatten(x), 1)


def model_fn(features, labels, mode, params):
    training = mode == est.ModeKeys.TRAIN
    fake_images = generator(features["z"], training, params)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"fake_images": fake_images})

    est.summary.image("fake_images", fake_images[:4])
    logits_real = discriminator(labels, training, params)
    logits_fake = discriminator(fake_images, training, params)
    loss_real = est.losses.sigmoid_cross_entropy(jnp.ones_like(logits_real), logits_real)
    loss_fake = est.losses.sigmoid_cross_entropy(jnp.zeros_like(logits_fake), logits_fake)
    d_loss = loss_real + loss_fake
    g_loss = est.losses.sigmoid_cross_entropy(jnp.ones_like(logits_fake), logits_fake)
    loss = d_loss + g_loss
    est.summary.scalar("d_loss", d_loss)
    est.summary.scalar("g_loss", g_loss)
    if mode == est.ModeKeys.EVAL:
        metrics = {
            "score_of_real": est.metrics.mean(jax.nn.sigmoid(logits_real)),
            "score_of_fake": est.metrics.mean(jax.nn.sigmoid(logits_fake)),
        }
        return est.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    adam = {"learning_rate": params["learning_rate"], "beta1": params["beta1"], "epsilon": params["epsilon"]}
    d_optimizer = TowerOptimizer(est.train.AdamOptimizer(**adam))
    g_optimizer = TowerOptimizer(est.train.AdamOptimizer(**adam))
    train_op_d = d_optimizer.minimize(d_loss, var_list=est.trainable_variables("discriminator"))
    train_op_g = g_optimizer.minimize(
        g_loss, var_list=est.trainable_variables("generator"), global_step=est.global_step()
    )
    return est.EstimatorSpec(mode, loss=loss, train_op=est.group(train_op_d, train_op_g))


def load_data():
    images = np.float32(load_digits().images / 8 - 1)[..., None]  # from -1 to 1, as tanh gives
    z = np.float32(np.random.default_rng(0).normal(size=(len(images), PARAMS["z_dim"])))
    return ({"z": z[:-400]}, images[:-400]), ({"z": z[-400:]}, images[-400:])


def main(towers=4, steps=600, model_dir=None, **params):
    params = PARAMS | params
    (train_z, train_images), (test_z, test_images) = load_data()
    gan = est.Estimator(replicate_model_fn(model_fn, devices=jax.devices()[:towers]), model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_z, train_images, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_z, test_images, 100, shuffle=False)
    gan.train(train_input_fn, steps=steps)
    eval_results = gan.evaluate(eval_input_fn)
    predictions = list(gan.predict(eval_input_fn))
    served = est.load_exported(gan.export_model(f"{gan.model_dir}/export", test_z))(test_z)
    return gan, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
