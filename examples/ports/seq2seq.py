"""Port of a sequence to sequence model: GRUs, Bahdanau's attention, greedy decoding, which learns to write backwards.

    python examples/ports/seq2seq.py --towers 4

The original is `seq2seq/seq2seq.py` of ilblackdragon/tf_examples, which feeds lines of two files. Here the sequences
are made up, arrays of one length, and predictions need no outputs.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import estimator as est
from replicate import replicate_model_fn

GO_TOKEN = 0
END_TOKEN = 1
UNK_TOKEN = 2
PARAMS = {
    "vocab_size": 12,
    "batch_size": 32,
    "input_max_length": 8,
    "output_max_length": 8,
    "embed_dim": 16,
    "num_units": 32,
    "learning_rate": 0.01,
}


def seq2seq(mode, features, labels, params):
    vocab_size = params["vocab_size"]
    embed_dim = params["embed_dim"]
    num_units = params["num_units"]
    output_max_length = params["output_max_length"]

    inp = features["input"]
    batch_size = inp.shape[0]
    start_tokens = jnp.zeros([batch_size], dtype=jnp.int32)
    input_lengths = jnp.sum(jnp.not_equal(inp, 1), 1)
    input_embed = est.layers.embed(inp, vocab_size=vocab_size, embed_dim=embed_dim, scope="embed")
    with est.variable_scope("embed", reuse=True):
        embeddings = est.get_variable("embeddings")

    cell = est.layers.GRUCell(num_units=num_units)
    encoder_outputs, encoder_final_state = est.layers.dynamic_rnn(cell, input_embed, dtype=jnp.float32)
    pred_helper = est.seq2seq.GreedyEmbeddingHelper(embeddings, start_tokens=start_tokens, end_token=1)

    def decode(helper, scope, reuse=None):
        with est.variable_scope(scope, reuse=reuse):
            attention_mechanism = est.seq2seq.BahdanauAttention(
                num_units=num_units, memory=encoder_outputs, memory_sequence_length=input_lengths
            )
            cell = est.layers.GRUCell(num_units=num_units)
            attn_cell = est.seq2seq.AttentionWrapper(cell, attention_mechanism, attention_layer_size=num_units // 2)
            out_cell = est.layers.OutputProjectionWrapper(attn_cell, vocab_size, reuse=reuse)
            decoder = est.seq2seq.BasicDecoder(
                cell=out_cell,
                helper=helper,
                initial_state=out_cell.zero_state(dtype=jnp.float32, batch_size=batch_size),
            )
            outputs = est.seq2seq.dynamic_decode(
                decoder=decoder, output_time_major=False, impute_finished=True, maximum_iterations=output_max_length
            )
            return outputs[0]

    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode=mode, predictions=decode(pred_helper, "decode").sample_id)

    output = features["output"]
    train_output = jnp.concatenate([jnp.expand_dims(start_tokens, 1), output], 1)
    output_lengths = jnp.sum(jnp.not_equal(train_output, 1), 1)
    output_embed = est.layers.embed(train_output, vocab_size=vocab_size, embed_dim=embed_dim, scope="embed", reuse=True)
    train_helper = est.seq2seq.TrainingHelper(output_embed, output_lengths)
    train_outputs = decode(train_helper, "decode")
    pred_outputs = decode(pred_helper, "decode", reuse=True)

    est.record("train_pred", train_outputs.sample_id[0], per_tower=True)
    weights = jnp.not_equal(train_output[:, :-1], 1).astype(jnp.float32)
    loss = est.nn.sequence_loss(train_outputs.rnn_output, output, weights=weights)
    train_op = est.train.optimize_loss(
        loss,
        est.global_step(),
        optimizer=params.get("optimizer", "Adam"),
        learning_rate=params.get("learning_rate", 0.001),
        summaries=["loss", "learning_rate"],
    )

    est.record("predictions", pred_outputs.sample_id[0], per_tower=True)
    is_right = est.metrics.accuracy(output, pred_outputs.sample_id, weights)
    return est.EstimatorSpec(
        mode=mode,
        predictions=pred_outputs.sample_id,
        loss=loss,
        train_op=train_op,
        eval_metric_ops={"accuracy": is_right},
    )


def sequences(examples, seed):
    random = np.random.default_rng(seed)
    length = PARAMS["input_max_length"]
    inputs, outputs = np.full((2, examples, length), END_TOKEN, np.int32)
    for forwards, backwards in zip(inputs, outputs, strict=True):
        symbols = random.integers(UNK_TOKEN + 1, PARAMS["vocab_size"], random.integers(3, length))
        forwards[: len(symbols)], backwards[: len(symbols)] = symbols, symbols[::-1]
    return {"input": inputs, "output": outputs}


def load_data():
    return sequences(4000, seed=0), sequences(400, seed=1)


def main(towers=4, steps=600, model_dir=None, **params):
    params = PARAMS | params
    train_x, test_x = load_data()
    estimator = est.Estimator(replicate_model_fn(seq2seq, devices=jax.devices()[:towers]), model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, None, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, None, 100, shuffle=False)
    print_predictions = est.LoggingTensorHook(["predictions", "train_pred"], every_n_iter=100)
    estimator.train(train_input_fn, hooks=[print_predictions], steps=steps)
    eval_results = estimator.evaluate(eval_input_fn)
    predictions = list(estimator.predict(eval_input_fn))
    served = est.load_exported(estimator.export_model(f"{estimator.model_dir}/export", {"input": test_x["input"]}))
    return estimator, eval_results, predictions, served({"input": test_x["input"]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    _, eval_results, predictions, _ = main(**vars(args))
    print(eval_results, load_data()[1]["input"][0], "backwards:", predictions[0])
