"""Port of BERT's `run_classifier`: a tiny BERT, which may begin from a checkpoint, classifies pairs of sentences.

    python examples/ports/bert_run_classifier.py --towers 4

The original is google-research/bert: `modeling.py`, `optimization.py` and `run_classifier.py`. The sentences are made
up: the label says whether words 10 to 19 outnumber words 20 to 29.
"""

import argparse
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

PARAMS = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "num_labels": 2,
    "learning_rate": 2e-3,
    "num_train_steps": 600,
    "num_warmup_steps": 60,
    "init_checkpoint": None,
    "batch_size": 64,
}
CLS, SEP = 1, 2


def layer_norm_and_dropout(x, params):
    return est.layers.dropout(est.layers.layer_norm(x, begin_norm_axis=-1), params["hidden_dropout_prob"])


def embeddings(input_ids, token_type_ids, params):
    with est.variable_scope("embeddings"):
        word = est.get_variable("word_embeddings", [params["vocab_size"], params["hidden_size"]])
        token_type = est.get_variable("token_type_embeddings", [params["type_vocab_size"], params["hidden_size"]])
        shape = [params["max_position_embeddings"], params["hidden_size"]]
        position = est.get_variable("position_embeddings", shape)[: input_ids.shape[1]]
        return layer_norm_and_dropout(word[input_ids] + token_type[token_type_ids] + position, params)


def attention_layer(x, attention_mask, params):
    heads, size = params["num_attention_heads"], params["hidden_size"] // params["num_attention_heads"]

    def transpose_for_scores(name):
        y = est.layers.dense(x, params["hidden_size"], name=name)
        return y.reshape(x.shape[0], x.shape[1], heads, size).swapaxes(1, 2)

    query, key, value = map(transpose_for_scores, ("query", "key", "value"))
    scores = query @ key.swapaxes(-1, -2) / np.float32(np.sqrt(size))
    scores += (1.0 - attention_mask[:, None, None, :]) * -10000.0
    probs = est.layers.dropout(jax.nn.softmax(scores), params["attention_probs_dropout_prob"])
    return (probs @ value).swapaxes(1, 2).reshape(x.shape)


def transformer_layer(x, attention_mask, params):
    with est.variable_scope("attention"):
        with est.variable_scope("self"):
            attention_output = attention_layer(x, attention_mask, params)
        with est.variable_scope("output"):
            attention_output = est.layers.dense(attention_output, params["hidden_size"])
            attention_output = est.layers.dropout(attention_output, params["hidden_dropout_prob"])
            attention_output = est.layers.layer_norm(attention_output + x, begin_norm_axis=-1)
    with est.variable_scope("intermediate"):
        intermediate_output = est.layers.dense(attention_output, params["intermediate_size"], jax.nn.gelu)
    with est.variable_scope("output"):
        layer_output = est.layers.dense(intermediate_output, params["hidden_size"])
        layer_output = est.layers.dropout(layer_output, params["hidden_dropout_prob"])
        return est.layers.layer_norm(layer_output + attention_output, begin_norm_axis=-1)


def bert_model(input_ids, input_mask, segment_ids, params):
    """What `BertModel.get_pooled_output` returned."""
    initializer = jax.nn.initializers.truncated_normal(params["initializer_range"])
    with est.variable_scope("bert", initializer=initializer):
        x = embeddings(input_ids, segment_ids, params)
        with est.variable_scope("encoder"):
            for layer in range(params["num_hidden_layers"]):
                with est.variable_scope(f"layer_{layer}"):
                    x = transformer_layer(x, input_mask.astype("float32"), params)
        with est.variable_scope("pooler"):
            return est.layers.dense(x[:, 0], params["hidden_size"], jnp.tanh)


def create_model(features, labels, params):
    pooled = bert_model(features["input_ids"], features["input_mask"], features["segment_ids"], params)
    shape = [params["num_labels"], params["hidden_size"]]
    output_weights = est.get_variable("output_weights", shape, initializer=jax.nn.initializers.truncated_normal(0.02))
    output_bias = est.get_variable("output_bias", [params["num_labels"]], initializer=jax.nn.initializers.zeros)
    logits = est.layers.dropout(pooled, 0.1 if params["hidden_dropout_prob"] else 0.0) @ output_weights.T + output_bias
    probabilities = jax.nn.softmax(logits)
    if labels is None:
        return None, None, logits, probabilities
    per_example_loss = -(jax.nn.one_hot(labels, params["num_labels"]) * jax.nn.log_softmax(logits)).sum(-1)
    return per_example_loss.mean(), per_example_loss, logits, probabilities


def adam_weight_decay(learning_rate, rate, b1, b2, eps, exclude_from_weight_decay):
    """AdamWeightDecayOptimizer, whose moments are not corrected; optax sees the variables by their full names."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"m": zeros, "v": zeros}

    def update(grads, state, params):
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state["v"], grads)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), m, v)
        for name, value in params.items():
            if not any(re.search(pattern, name) for pattern in exclude_from_weight_decay):
                updates[name] += rate * value
        return updates, {"m": m, "v": v}

    by_name = optax.GradientTransformation(init, update)
    return optax.chain(by_name, optax.scale_by_learning_rate(learning_rate))


def create_optimizer(loss, init_lr, num_train_steps, num_warmup_steps):
    global_step = est.global_step()
    learning_rate = est.train.polynomial_decay(init_lr, global_step, num_train_steps, end_learning_rate=0.0)
    warmup_learning_rate = init_lr * global_step.astype("float32") / num_warmup_steps
    learning_rate = jnp.where(global_step < num_warmup_steps, warmup_learning_rate, learning_rate)
    exclude = ["LayerNorm", "layer_norm", "bias"]
    optimizer = TowerOptimizer(
        lambda rate: optax.chain(
            optax.clip_by_global_norm(1.0), adam_weight_decay(rate, 0.01, 0.9, 0.999, 1e-6, exclude)
        ),
        learning_rate=learning_rate,
    )
    return optimizer.minimize(loss, global_step)


def model_fn(features, labels, mode, params):
    total_loss, per_example_loss, logits, probabilities = create_model(features, labels, params)
    if params["init_checkpoint"]:
        there = {name for name, _ in est.list_variables(params["init_checkpoint"])}
        assignment_map = {name: name for name in est.trainable_variables() if name in there}
        est.init_from_checkpoint(params["init_checkpoint"], assignment_map)

    if mode == est.ModeKeys.TRAIN:
        train_op = create_optimizer(
            total_loss, params["learning_rate"], params["num_train_steps"], params["num_warmup_steps"]
        )
        return est.EstimatorSpec(mode, loss=total_loss, train_op=train_op)
    if mode == est.ModeKeys.EVAL:
        metrics = {
            "eval_accuracy": est.metrics.accuracy(labels, logits.argmax(-1)),
            "eval_loss": est.metrics.mean(per_example_loss),
        }
        return est.EstimatorSpec(mode, loss=total_loss, eval_metric_ops=metrics)
    return est.EstimatorSpec(mode, predictions={"probabilities": probabilities})


def pairs(examples, seed):
    random = np.random.default_rng(seed)
    words = random.integers(3, 50, (examples, 16)).astype(np.int32)
    lengths = random.integers(12, 17, examples)
    words[:, 0], words[:, 6], words[np.arange(examples), lengths - 1] = CLS, SEP, SEP
    input_mask = np.arange(16) < lengths[:, None]
    words[~input_mask] = 0
    more = ((words >= 10) & (words < 20)).sum(1) > ((words >= 20) & (words < 30)).sum(1)
    segment_ids = input_mask & (np.arange(16) > 6)
    features = {"input_ids": words, "input_mask": np.int32(input_mask), "segment_ids": np.int32(segment_ids)}
    return features, np.int32(more)


def load_data():
    return pairs(6000, seed=0), pairs(500, seed=1)


def main(towers=4, steps=600, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    estimator = est.Estimator(replicate_model_fn(model_fn, devices=jax.devices()[:towers]), model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    estimator.train(input_fn=train_input_fn, max_steps=steps)
    result = estimator.evaluate(input_fn=eval_input_fn)
    predictions = list(estimator.predict(input_fn=eval_input_fn))
    served = est.load_exported(estimator.export_model(f"{estimator.model_dir}/export", test_x))(test_x)
    return estimator, result, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--init_checkpoint")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
