"""Port of the official Transformer: an encoder and a decoder, tiny, which learn to write sequences backwards.

    python examples/ports/official_transformer.py --towers 4

The original is `official/transformer` of tensorflow/models. This one decodes greedily, without a beam, and each step of
decoding looks at the whole prefix: arrays in a loop have one shape, so that a cache that grows is no gain.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

PAD, EOS = 0, 1
LENGTH = 8
PARAMS = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 64,
    "layer_postprocess_dropout": 0.1,
    "attention_dropout": 0.1,
    "relu_dropout": 0.1,
    "label_smoothing": 0.1,
    "learning_rate": 0.5,
    "learning_rate_warmup_steps": 200,
    "optimizer_adam_beta1": 0.9,
    "optimizer_adam_beta2": 0.997,
    "optimizer_adam_epsilon": 1e-9,
    "batch_size": 128,
}


def get_position_encoding(length, hidden_size):
    position = np.arange(length, dtype=np.float32)[:, None]
    timescales = np.exp(-np.log(1e4) * np.arange(hidden_size // 2, dtype=np.float32) / (hidden_size // 2 - 1))
    return np.concatenate([np.sin(position * timescales), np.cos(position * timescales)], axis=1)


def get_padding_bias(x):
    return -1e9 * (x == PAD).astype("float32")[:, None, None, :]


def embedding(params):
    initializer = jax.nn.initializers.normal(params["hidden_size"] ** -0.5)
    with est.variable_scope("embedding_shared_weights"):
        return est.get_variable("weights", [params["vocab_size"], params["hidden_size"]], initializer=initializer)


def embed(x, params):
    embeddings = embedding(params)[x] * (x != PAD).astype("float32")[..., None]
    return embeddings * params["hidden_size"] ** 0.5


def split_heads(x, params):
    depth = params["hidden_size"] // params["num_heads"]
    return x.reshape(x.shape[0], x.shape[1], params["num_heads"], depth).swapaxes(1, 2)


def attention_layer(x, y, bias, params):
    def dense(z, name):
        return est.layers.dense(z, params["hidden_size"], use_bias=False, name=name)

    q, k, v = (split_heads(dense(z, name), params) for z, name in ((x, "q"), (y, "k"), (y, "v")))
    q *= (params["hidden_size"] // params["num_heads"]) ** -0.5
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) + bias)
    weights = est.layers.dropout(weights, params["attention_dropout"])
    attention_output = (weights @ v).swapaxes(1, 2).reshape(x.shape)  # combine_heads
    return dense(attention_output, "output_transform")


def feed_forward_layer(x, params):
    output = est.layers.dense(x, params["filter_size"], jax.nn.relu, name="filter_layer")
    output = est.layers.dropout(output, params["relu_dropout"])
    return est.layers.dense(output, params["hidden_size"], name="output_layer")


def prepost(name, layer, x, params, *args):
    """PrePostProcessingWrapper: layer normalization, the layer, dropout, and the residual."""
    with est.variable_scope(name):
        y = est.layers.layer_norm(x, begin_norm_axis=-1)
        y = layer(y, *args, params)
        return x + est.layers.dropout(y, params["layer_postprocess_dropout"])


def encode(inputs, attention_bias, params):
    x = embed(inputs, params) + get_position_encoding(inputs.shape[1], params["hidden_size"])
    x = est.layers.dropout(x, params["layer_postprocess_dropout"])
    with est.variable_scope("encoder_stack"):
        for n in range(params["num_hidden_layers"]):
            with est.variable_scope(f"layer_{n}"):
                x = prepost("self_attention", lambda y, *a: attention_layer(y, y, *a), x, params, attention_bias)
                x = prepost("ffn", feed_forward_layer, x, params)
        return est.layers.layer_norm(x, begin_norm_axis=-1)


def decode(targets, encoder_outputs, attention_bias, params):
    length = targets.shape[1]
    x = jnp.pad(embed(targets, params), [(0, 0), (1, 0), (0, 0)])[:, :-1]  # shifted to the right
    x = x + get_position_encoding(length, params["hidden_size"])
    x = est.layers.dropout(x, params["layer_postprocess_dropout"])
    self_bias = -1e9 * (1 - np.tri(length, dtype=np.float32))  # get_decoder_self_attention_bias
    with est.variable_scope("decoder_stack"):
        for n in range(params["num_hidden_layers"]):
            with est.variable_scope(f"layer_{n}"):
                x = prepost("self_attention", lambda y, *a: attention_layer(y, y, *a), x, params, self_bias)
                x = prepost("encdec_attention", attention_layer, x, params, encoder_outputs, attention_bias)
                x = prepost("ffn", feed_forward_layer, x, params)
        x = est.layers.layer_norm(x, begin_norm_axis=-1)
    return x @ embedding(params).T


def transformer(inputs, targets, params):
    initializer = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    with est.variable_scope("Transformer", reuse=est.AUTO_REUSE, initializer=initializer):
        attention_bias = get_padding_bias(inputs)
        encoder_outputs = encode(inputs, attention_bias, params)
        if targets is not None:
            return decode(targets, encoder_outputs, attention_bias, params)
        return predict(encoder_outputs, attention_bias, params)


def predict(encoder_outputs, attention_bias, params):
    def symbols_to_logits(ids, i):
        logits = decode(ids, encoder_outputs, attention_bias, params)[:, i]
        return ids.at[:, i].set(logits.argmax(-1).astype("int32")), None

    ids = jnp.zeros((encoder_outputs.shape[0], LENGTH), "int32")
    symbols_to_logits(ids, 0)  # creates the variables, which a loop cannot
    ids, _ = jax.lax.scan(symbols_to_logits, ids, jnp.arange(LENGTH))
    return {"outputs": ids}


def padded_cross_entropy_loss(logits, labels, smoothing, vocab_size):
    confidence = 1 - smoothing
    low_confidence = smoothing / (vocab_size - 1)
    soft_targets = jax.nn.one_hot(labels, vocab_size) * (confidence - low_confidence) + low_confidence
    xentropy = est.nn.softmax_cross_entropy_with_logits_v2(labels=soft_targets, logits=logits)
    normalizing = -(
        confidence * np.log(confidence) + (vocab_size - 1) * low_confidence * np.log(low_confidence + 1e-20)
    )
    return xentropy - np.float32(normalizing), (labels != PAD).astype("float32")


def get_learning_rate(params):
    step, warmup_steps = est.global_step().astype("float32"), params["learning_rate_warmup_steps"]
    learning_rate = params["learning_rate"] * params["hidden_size"] ** -0.5
    learning_rate *= jnp.minimum(1.0, step / warmup_steps)
    return learning_rate * jnp.maximum(step, warmup_steps) ** -0.5


def get_train_op(loss, params):
    learning_rate = get_learning_rate(params)
    est.summary.scalar("learning_rate", learning_rate)
    optimizer = est.train.LazyAdamOptimizer(
        learning_rate,
        beta1=params["optimizer_adam_beta1"],
        beta2=params["optimizer_adam_beta2"],
        epsilon=params["optimizer_adam_epsilon"],
    )
    optimizer = TowerOptimizer(optimizer)
    gradients = optimizer.compute_gradients(loss, est.trainable_variables())
    train_op = optimizer.apply_gradients(gradients, global_step=est.global_step())
    est.summary.scalar("global_norm/gradient_norm", optax.tree.norm([gradient for gradient, _ in gradients]))
    return train_op


def model_fn(features, labels, mode, params):
    with est.variable_scope("model"):
        output = transformer(features, labels, params)
        if mode == est.ModeKeys.PREDICT:
            export_outputs = {"translate": est.export.PredictOutput(output)}
            return est.EstimatorSpec(mode, predictions=output, export_outputs=export_outputs)
        xentropy, weights = padded_cross_entropy_loss(output, labels, params["label_smoothing"], params["vocab_size"])
        loss = est.losses.compute_weighted_loss(xentropy, weights)  # over all towers' symbols
        est.record("cross_entropy", loss)
        if mode == est.ModeKeys.EVAL:
            correct = (output.argmax(-1) == labels) | (labels == PAD)
            metrics = {
                "accuracy": est.metrics.accuracy(labels, output.argmax(-1), weights),
                "accuracy_per_sequence": est.metrics.mean(correct.all(-1).astype("float32")),
            }
            return est.EstimatorSpec(mode, loss=loss, predictions={"predictions": output}, eval_metric_ops=metrics)
        return est.EstimatorSpec(mode, loss=loss, train_op=get_train_op(loss, params))


def sequences(examples, seed):
    random = np.random.default_rng(seed)
    inputs, targets = np.zeros((2, examples, LENGTH), np.int32)
    for each, backwards in zip(inputs, targets, strict=True):
        symbols = random.integers(2, PARAMS["vocab_size"], random.integers(3, LENGTH))
        each[: len(symbols) + 1] = [*symbols, EOS]
        backwards[: len(symbols) + 1] = [*symbols[::-1], EOS]
    return inputs, targets


def load_data():
    return sequences(8000, seed=0), sequences(400, seed=1)


def main(towers=4, steps=1500, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    estimator = est.Estimator(replicate_model_fn(model_fn, devices=jax.devices()[:towers]), model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    estimator.train(train_input_fn, steps=steps)
    eval_results = estimator.evaluate(eval_input_fn)
    predictions = list(estimator.predict(eval_input_fn))
    served = est.load_exported(estimator.export_model(f"{estimator.model_dir}/export", test_x))(test_x, "translate")
    return estimator, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    _, eval_results, predictions, _ = main(**vars(args))
    print(eval_results, load_data()[1][0][0], "backwards:", predictions[0]["outputs"])
