"""Port of a sequence to sequence model: GRUs, Bahdanau's attention, greedy decoding, which learns to write backwards.

    python examples/ports/seq2seq.py --towers 4

The original is `seq2seq/seq2seq.py` of ilblackdragon/tf_examples, which reads lines of two files, and feeds
them by a hook; here by input_fn. The lines are made up, and predictions need no outputs.
"""

import argparse
import itertools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import estimator as est
from replicate import replicate_model_fn

GO_TOKEN = 0
END_TOKEN = 1
UNK_TOKEN = 2


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


def tokenize_and_map(line, vocab):
    return [vocab.get(token, UNK_TOKEN) for token in line.strip().split(" ")]


def make_input_fn(
    batch_size,
    input_filename,
    output_filename,
    vocab,
    input_max_length,
    output_max_length,
    input_process=tokenize_and_map,
    output_process=tokenize_and_map,
    repeat=True,
):
    def sampler():
        while True:
            with open(input_filename) as finput, open(output_filename) as foutput:
                for in_line in finput:
                    out_line = foutput.readline()
                    yield {
                        "input": input_process(in_line, vocab)[: input_max_length - 1] + [END_TOKEN],
                        "output": output_process(out_line, vocab)[: output_max_length - 1] + [END_TOKEN],
                    }
            if not repeat:
                return

    def input_fn():
        sample_me = sampler()
        while recs := list(itertools.islice(sample_me, batch_size)):
            inputs, outputs = [], []
            for rec in recs:
                inputs.append(rec["input"])
                outputs.append(rec["output"])
            # Pad me right with </S> token.
            for i in range(len(recs)):
                inputs[i] += [END_TOKEN] * (input_max_length - len(inputs[i]))
                outputs[i] += [END_TOKEN] * (output_max_length - len(outputs[i]))
            yield {"input": np.array(inputs, np.int32), "output": np.array(outputs, np.int32)}

    return input_fn


def load_vocab(filename):
    vocab = {}
    with open(filename) as f:
        for idx, line in enumerate(f):
            vocab[line.strip()] = idx
    return vocab


def get_rev_vocab(vocab):
    return {idx: key for key, idx in vocab.items()}


def get_formatter(keys, vocab):
    rev_vocab = get_rev_vocab(vocab)

    def to_str(sequence):
        tokens = [rev_vocab.get(x, "<UNK>") for x in sequence]
        return " ".join(tokens)

    def format(values):
        res = []
        for key in keys:
            res.append(f"{key} = {to_str(values[key][0].tolist())}")
        return "\n".join(res)

    return format


def train_seq2seq(input_filename, output_filename, vocab_filename, model_dir, towers, steps, params):
    vocab = load_vocab(vocab_filename)
    params = {
        "vocab_size": len(vocab),
        "batch_size": 32,
        "input_max_length": 8,
        "output_max_length": 8,
        "embed_dim": 16,
        "num_units": 32,
        "learning_rate": 0.01,
    } | params
    estimator = est.Estimator(
        model_fn=replicate_model_fn(seq2seq, devices=jax.devices()[:towers]), model_dir=model_dir, params=params
    )

    input_fn = make_input_fn(
        params["batch_size"],
        input_filename,
        output_filename,
        vocab,
        params["input_max_length"],
        params["output_max_length"],
    )

    # Make hooks to print examples of predictions.
    print_predictions = est.LoggingTensorHook(
        ["predictions", "train_pred"], every_n_iter=100, formatter=get_formatter(["predictions", "train_pred"], vocab)
    )

    estimator.train(input_fn=input_fn, hooks=[print_predictions], steps=steps)
    return estimator, vocab, params


def sequences(examples, seed):
    """Lines of letters, and the same backwards."""
    random = np.random.default_rng(seed)
    words = [random.choice(list("abcdefghi"), random.integers(3, 8)) for _ in range(examples)]
    return {"input": np.array([" ".join(w) for w in words]), "output": np.array([" ".join(w[::-1]) for w in words])}


def load_data():
    return sequences(4000, seed=0), sequences(400, seed=1)


def main(towers=4, steps=600, model_dir=None, **params):
    folder = tempfile.mkdtemp()
    files = {"vocab": ["<S>", "</S>", "<UNK>", *"abcdefghi"]}
    for name, data in zip(("train", "test"), load_data(), strict=True):
        files |= {f"{name}_{key}": lines for key, lines in data.items()}
    for name, lines in files.items():
        with open(f"{folder}/{name}", "w") as f:
            f.writelines(f"{line}\n" for line in lines)
    names = (f"{folder}/{name}" for name in ("train_input", "train_output", "vocab"))
    estimator, vocab, params = train_seq2seq(*names, model_dir, towers, steps, params)
    lengths = params["input_max_length"], params["output_max_length"]
    eval_input_fn = make_input_fn(100, f"{folder}/test_input", f"{folder}/test_output", vocab, *lengths, repeat=False)
    eval_results = estimator.evaluate(eval_input_fn)
    predictions = list(estimator.predict(eval_input_fn))
    inputs = {"input": next(eval_input_fn())["input"]}
    served = est.load_exported(estimator.export_model(f"{estimator.model_dir}/export", inputs))(inputs)
    return estimator, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    _, eval_results, predictions, _ = main(**vars(args))
    print(eval_results, load_data()[1]["input"][0], "backwards:", predictions[0])
