"""Port of a tutorial on text: a convolutional and a recurrent classifier of sentences, both with a head.

    python examples/ports/text_classification.py --towers 4 --model lstm

The original is `nlp_estimators.py` of eisenjulian/nlp_estimator_tutorial. The reviews of films are made up:
words 2 to 9 are kind, words 10 to 17 are not, and the majority says what a review is.
"""

import argparse

import jax
import numpy as np

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

PARAMS = {"vocab_size": 200, "embedding_size": 16, "filters": 32, "units": 32, "dropout": 0.2, "batch_size": 100}
SENTENCE_SIZE = 24
head = est.BinaryClassHead()


def train_op_fn(loss):
    est.summary.scalar("loss", loss)
    optimizer = TowerOptimizer(est.train.AdamOptimizer(learning_rate=3e-3))
    return optimizer.minimize(loss=loss, global_step=est.global_step())


def cnn_model_fn(features, labels, mode, params):
    input_layer = est.layers.embed(features["x"], params["vocab_size"], params["embedding_size"])
    training = mode == est.ModeKeys.TRAIN
    dropout_emb = est.layers.dropout(inputs=input_layer, rate=params["dropout"], training=training)
    conv = est.layers.conv1d(
        inputs=dropout_emb, filters=params["filters"], kernel_size=3, padding="same", activation=jax.nn.relu
    )
    pool = conv.max(axis=1)  # global max pooling
    hidden = est.layers.dense(inputs=pool, units=params["units"], activation=jax.nn.relu)
    dropout_hidden = est.layers.dropout(inputs=hidden, rate=params["dropout"], training=training)
    logits = est.layers.dense(inputs=dropout_hidden, units=1)
    return head.create_estimator_spec(
        features=features, labels=labels, mode=mode, logits=logits, train_op_fn=train_op_fn
    )


def lstm_model_fn(features, labels, mode, params):
    inputs = est.layers.embed(features["x"], params["vocab_size"], params["embedding_size"])
    _, final_states = est.layers.lstm(inputs, params["units"], sequence_length=features["len"])
    logits = est.layers.dense(inputs=final_states.h, units=1)
    return head.create_estimator_spec(
        features=features, labels=labels, mode=mode, logits=logits, train_op_fn=train_op_fn
    )


def reviews(examples, seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(8, SENTENCE_SIZE + 1, examples).astype(np.int32)
    words = random.integers(2, 60, (examples, SENTENCE_SIZE)).astype(np.int32)
    words[np.arange(SENTENCE_SIZE) >= lengths[:, None]] = 0  # padding
    kind = ((words >= 2) & (words < 10)).sum(1) - ((words >= 10) & (words < 18)).sum(1)
    return {"x": words, "len": lengths}, (kind > 0).astype(np.int32)[:, None]


def load_data():
    return reviews(4000, seed=0), reviews(500, seed=1)


def main(towers=4, steps=600, model_dir=None, model="cnn", **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    model_fn = replicate_model_fn(globals()[f"{model}_model_fn"], devices=jax.devices()[:towers])
    classifier = est.Estimator(model_fn, model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    classifier.train(input_fn=train_input_fn, steps=steps)
    eval_results = classifier.evaluate(input_fn=eval_input_fn)
    predictions = list(classifier.predict(input_fn=eval_input_fn))
    served = est.load_exported(classifier.export_model(f"{classifier.model_dir}/export", test_x))(test_x)
    return classifier, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--model", default="cnn", choices=["cnn", "lstm"])
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
