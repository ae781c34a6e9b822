"""Port of a tagger: convolutions over characters, an LSTM both ways, a CRF, and moving averages of the weights.

    python examples/ports/lstm_crf_ema.py --towers 4

The original is `models/chars_conv_lstm_crf_ema/main.py` of guillaumegenthial/tf_ner. Its index tables are on the host
here, where words are strings. The text is made up: a name follows "in" (a place) or "by" (a person).
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

TAGS = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
CHARS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["in", "by", "the", "a", "saw", "went", "house", "tree", "and", "old"]
LENGTH, WORD_LENGTH = 10, 6
PARAMS = {
    "dim_chars": 8,
    "filters": 16,
    "kernel_size": 3,
    "dim": 16,
    "lstm_size": 24,
    "dropout": 0.2,
    "ema_decay": 0.95,
    "learning_rate": 1e-2,
    "batch_size": 32,
}


def masked_conv1d_and_max(t, weights, filters, kernel_size):
    """A convolution over the characters of each word, and the largest of its outputs."""
    shape = t.shape
    t = jnp.where(weights[..., None], t, 0).reshape(-1, *shape[-2:])
    t_conv = est.layers.conv1d(t, filters, kernel_size, padding="same").reshape(*shape[:-1], filters)
    return jnp.where(weights[..., None], t_conv, -1e9).max(axis=-2)


def graph_fn(features, mode, params, reuse=None, getter=None):
    with est.variable_scope("graph", reuse=reuse, custom_getter=getter):
        words, nwords, chars, nchars = (features[key] for key in ("words", "nwords", "chars", "nchars"))
        training = mode == est.ModeKeys.TRAIN

        char_table = est.get_variable("chars_embeddings", [len(CHARS) + 1, params["dim_chars"]])
        char_embeddings = est.layers.dropout(char_table[chars], params["dropout"], training=training)
        weights = est.nn.sequence_mask(nchars, chars.shape[-1])
        char_embeddings = masked_conv1d_and_max(char_embeddings, weights, params["filters"], params["kernel_size"])

        word_table = est.get_variable("words_embeddings", [len(WORDS) + 1, params["dim"]], trainable=False)
        embeddings = jnp.concatenate([word_table[words], char_embeddings], axis=-1)
        embeddings = est.layers.dropout(embeddings, params["dropout"], training=training)

        outputs, _ = est.layers.bidirectional_lstm(embeddings, params["lstm_size"], nwords)
        output = est.layers.dropout(jnp.concatenate(outputs, axis=-1), params["dropout"], training=training)

        logits = est.layers.dense(output, len(TAGS))
        crf_params = est.get_variable("crf", [len(TAGS), len(TAGS)])
        return logits, crf_params


def model_fn(features, labels, mode, params):
    nwords = features["nwords"]
    logits, crf_params = graph_fn(features, mode, params)

    ema = est.ExponentialMovingAverage(params["ema_decay"])
    ema_op = ema.apply(est.trainable_variables())

    def ema_getter(getter, name, *args, **kwargs):
        return ema.average(name) if name in est.trainable_variables() else getter(name, *args, **kwargs)

    logits_ema, crf_params_ema = graph_fn(features, mode, params, reuse=True, getter=ema_getter)
    pred_ids, _ = est.nn.crf_decode(logits, crf_params, nwords)
    pred_ids_ema, _ = est.nn.crf_decode(logits_ema, crf_params_ema, nwords)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"pred_ids": pred_ids, "pred_ids_ema": pred_ids_ema})

    log_likelihood, _ = est.nn.crf_log_likelihood(logits, labels, nwords, crf_params)
    loss = -log_likelihood.mean()
    log_likelihood_ema, _ = est.nn.crf_log_likelihood(logits_ema, labels, nwords, crf_params_ema)
    weights = est.nn.sequence_mask(nwords, LENGTH, "float32")
    metrics = {"loss_ema": est.metrics.mean(-log_likelihood_ema)}
    for end, ids in (("", pred_ids), ("_ema", pred_ids_ema)):
        is_right = (ids == labels).astype("float32")
        metrics |= {
            f"acc{end}": est.metrics.accuracy(labels, ids, weights),
            f"precision{end}": est.metrics.mean(is_right, weights * (ids > 0)),
            f"recall{end}": est.metrics.mean(is_right, weights * (labels > 0)),
        }
    if mode == est.ModeKeys.EVAL:
        return est.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    for name, metric in metrics.items():
        est.summary.scalar(name, metric[1])
    optimizer = TowerOptimizer(est.train.AdamOptimizer(params["learning_rate"]))
    train_op = est.group(optimizer.minimize(loss, global_step=est.global_step()), ema_op)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


def sentence(random):
    """Words and their tags."""
    words, tags = [], []
    while len(words) < LENGTH - 2:
        words.append(random.choice(WORDS))
        tags.append("O")
        if words[-1] in ("in", "by") and random.random() < 0.8:
            kind = "LOC" if words[-1] == "in" else "PER"
            for position in "BI"[: random.integers(1, 3)]:
                words.append("".join(random.choice(list(CHARS), random.integers(3, WORD_LENGTH + 1))))
                tags.append(f"{position}-{kind}")
    return words[:LENGTH], tags[:LENGTH]


def sentences(examples, seed):
    """As integers: a word that is not in the list has the last id, and tags and characters are filled up by zeros."""
    random = np.random.default_rng(seed)
    features = {"words": (LENGTH,), "nwords": (), "chars": (LENGTH, WORD_LENGTH), "nchars": (LENGTH,)}
    features = {key: np.zeros((examples, *shape), np.int32) for key, shape in features.items()}
    labels = np.zeros((examples, LENGTH), np.int32)
    for i in range(examples):
        words, tags = sentence(random)
        features["nwords"][i] = len(words)
        for j, (word, tag) in enumerate(zip(words, tags, strict=True)):
            features["words"][i, j] = WORDS.index(word) if word in WORDS else len(WORDS)
            features["nchars"][i, j] = len(word)
            features["chars"][i, j, : len(word)] = [CHARS.index(char) + 1 for char in word]
            labels[i, j] = TAGS.index(tag)
    return features, labels


def load_data():
    return sentences(2000, seed=0), sentences(300, seed=1)


def main(towers=4, steps=300, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    estimator = est.Estimator(replicate_model_fn(model_fn, devices=jax.devices()[:towers]), model_dir, params=params)
    train_inpf = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_inpf = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    estimator.train(train_inpf, steps=steps)
    results = estimator.evaluate(eval_inpf)
    predictions = list(estimator.predict(eval_inpf))
    served = est.load_exported(estimator.export_model(f"{estimator.model_dir}/export", test_x))(test_x)
    return estimator, results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
