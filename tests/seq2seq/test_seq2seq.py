"""Attention, decoders and beam search, beside the formulas of TensorFlow 1 written out in numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import predicting
from testing.towers import assert_same_training, predict, replicate, started

import estimator as est
from replicate import TowerOptimizer

BATCH, MEMORY, WIDTH, UNITS, VOCABULARY, STEPS, END = 3, 5, 4, 6, 7, 4, 1
RANDOM = np.random.default_rng(0)
X = {
    "memory": RANDOM.normal(size=(BATCH, MEMORY, WIDTH)).astype(np.float32),
    "memory_length": np.array([5, 2, 3]),
    "inputs": RANDOM.normal(size=(BATCH, STEPS, WIDTH)).astype(np.float32),
    "length": np.array([4, 2, 1]),
}
X["memory"][np.arange(MEMORY) >= X["memory_length"][:, None]] = np.nan  # which nothing reads
MECHANISMS = {
    "bahdanau": (est.seq2seq.BahdanauAttention, {}),
    "normalized": (est.seq2seq.BahdanauAttention, {"normalize": True}),
    "luong": (est.seq2seq.LuongAttention, {}),
    "scaled": (est.seq2seq.LuongAttention, {"scale": True}),
}


def decoder_of(features, kind, size, beams=1, **options):
    mechanism, more = MECHANISMS[kind]
    memory, lengths = est.seq2seq.tile_batch((features["memory"], features["memory_length"]), beams)
    attention = mechanism(UNITS, memory, lengths, **more)
    cell = est.layers.GRUCell(UNITS)
    cell = est.seq2seq.AttentionWrapper(cell, attention, size, alignment_history=True, **options)
    return cell, cell.zero_state(memory.shape[0])


def random_state(model, *batch):
    """A state whose scales and biases do something."""
    state = model.abstract_init(*batch, mode="infer")
    random = np.random.default_rng(1)
    values = {name: random.normal(size=v.shape).astype(np.float32) for name, v in sorted(state.variables.items())}
    return est.State(values, state.slots, np.int32(0), jax.random.key(0))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class ByHand:
    """One example's decoder in numpy."""

    def __init__(self, variables, kind, size, row, inner="decoder/attention_wrapper/"):
        self.v = lambda name: np.asarray(variables[inner + name], np.float64)
        self.kind, self.size = kind, size
        self.memory = X["memory"][row, : X["memory_length"][row]]
        self.keys = self.memory @ np.asarray(variables["memory_layer/kernel"])
        self.start = np.zeros(UNITS), np.zeros(size or WIDTH)

    def __call__(self, x, state):
        h, attention = state
        x = np.concatenate([x, attention])
        gates = sigmoid(np.concatenate([x, h]) @ self.v("gru_cell/gates/kernel") + self.v("gru_cell/gates/bias"))
        r, u = np.split(gates, 2)
        new = np.concatenate([x, r * h]) @ self.v("gru_cell/candidate/kernel") + self.v("gru_cell/candidate/bias")
        h = u * h + (1 - u) * np.tanh(new)
        alignments = softmax(np.array([self.score(h, key) for key in self.keys]))
        context = sum(a * m for a, m in zip(alignments, self.memory, strict=True))
        attention = context
        if self.size:
            attention = np.concatenate([h, context]) @ self.v("attention_layer/kernel")
        return attention, (h, attention), np.pad(alignments, (0, MEMORY - len(alignments)))

    def score(self, h, key):
        if self.kind in ("luong", "scaled"):
            return h @ key * (self.v("luong_attention/attention_g") if self.kind == "scaled" else 1)
        v, b = self.v("bahdanau_attention/attention_v"), 0
        if self.kind == "normalized":
            v = self.v("bahdanau_attention/attention_g") * v / np.sqrt((v**2).sum())
            b = self.v("bahdanau_attention/attention_b")
        return v @ np.tanh(key + h @ self.v("bahdanau_attention/query_layer/kernel") + b)


@pytest.mark.quick
@pytest.mark.parametrize(
    "kind, size, is_output",
    [("bahdanau", None, True), ("normalized", 3, True), ("luong", 3, False), ("scaled", None, True)],
)
def test_attention_has_the_numbers_of_the_formulas(kind, size, is_output):
    def model_fn(features, labels, mode):
        cell, start = decoder_of(features, kind, size, output_attention=is_output)
        helper = est.seq2seq.TrainingHelper(features["inputs"], features["length"])
        decoder = est.seq2seq.BasicDecoder(cell, helper, start)
        outputs, state, lengths = est.seq2seq.dynamic_decode(decoder, impute_finished=True)
        return est.EstimatorSpec(mode, predictions=(outputs, state, lengths))

    model = est.transform(model_fn)
    state = random_state(model, X)
    outputs, last, lengths = model.predict_step(state, X).predictions
    np.testing.assert_array_equal(lengths, X["length"])
    for row, length in enumerate(X["length"]):
        by_hand = ByHand(state.variables, kind, size, row)
        now = by_hand.start
        for step in range(length):
            attention, now, alignments = by_hand(X["inputs"][row, step], now)
            output = attention if is_output else now[0]
            np.testing.assert_allclose(outputs.rnn_output[row, step], output, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(last.alignment_history[step, row], alignments, rtol=1e-4, atol=1e-5)
            assert outputs.sample_id[row, step] == output.argmax()
        np.testing.assert_allclose(last.cell_state[row], now[0], rtol=1e-4, atol=1e-5)
        assert not outputs.rnn_output[row, length:].any()


@pytest.mark.slow
def test_gradients_are_those_of_a_loop_written_out():
    def model_fn(features, labels, mode, params):
        cell, state = decoder_of(features, "bahdanau", 3)
        cell = est.layers.OutputProjectionWrapper(cell, VOCABULARY)
        helper = est.seq2seq.TrainingHelper(features["inputs"], jnp.full(BATCH, STEPS))
        if params["by_hand"]:
            with est.variable_scope("decoder"):
                outputs = []
                for step in range(STEPS):
                    output, state = cell(features["inputs"][:, step], state)
                    outputs.append(output)
            outputs = jnp.stack(outputs, 1)
        else:
            outputs = est.seq2seq.dynamic_decode(est.seq2seq.BasicDecoder(cell, helper, state))[0].rnn_output
        loss = jnp.mean(outputs**2)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(1.0)).minimize(loss))

    model, state = started(model_fn, X, params={"by_hand": False})
    written_out = est.transform(model_fn, {"by_hand": True})
    assert state.variables.keys() == written_out.abstract_init(X).variables.keys()
    after, wanted = (each.train_step(state, X)[0].variables for each in (model, written_out))
    for name, value in after.items():
        assert (value != state.variables[name]).any(), name
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)


class EndsOnce(est.seq2seq.TrainingHelper):
    """A helper that says in the first step alone that the examples have finished."""

    def next_inputs(self, time, outputs, state, sample_ids):
        _, inputs, state = super().next_inputs(time, outputs, state, sample_ids)
        return jnp.full(BATCH, time == 0), inputs, state


def test_an_example_that_has_finished_does_not_begin_again():
    def decoded(features):
        cell = est.layers.GRUCell(UNITS)
        helper = EndsOnce(features["inputs"], features["length"])
        decoder = est.seq2seq.BasicDecoder(cell, helper, cell.zero_state(BATCH))
        return est.seq2seq.dynamic_decode(decoder, impute_finished=True, maximum_iterations=3)  # of 4 inputs

    outputs, _, lengths = predict(predicting(decoded), X).predictions
    assert (lengths == 1).all() and outputs.rnn_output.shape == (BATCH, 3, UNITS)
    assert outputs.rnn_output[:, 0].all() and not outputs.rnn_output[:, 1:].any()


@pytest.mark.slow
def test_greedy_decoding_ends_at_the_end_token():
    def model_fn(features, labels, mode):
        cell, start = decoder_of(features, "luong", VOCABULARY)
        table = est.get_variable("table", (VOCABULARY, WIDTH))
        helper = est.seq2seq.GreedyEmbeddingHelper(table, jnp.zeros(BATCH, int), END)
        decoder = est.seq2seq.BasicDecoder(cell, helper, start)
        outputs, _, lengths = est.seq2seq.dynamic_decode(decoder, impute_finished=True, maximum_iterations=9)
        return est.EstimatorSpec(mode, predictions=(outputs.sample_id, lengths))

    model = est.transform(model_fn)
    state = random_state(model, X)
    state.variables["decoder/attention_wrapper/attention_layer/kernel"][:, END] += 0.3
    ids, lengths = model.predict_step(state, X).predictions
    for row in range(BATCH):
        by_hand, symbol, want = ByHand(state.variables, "luong", VOCABULARY, row), 0, []
        now = by_hand.start
        while symbol != END and len(want) < 9:
            output, now, _ = by_hand(state.variables["table"][symbol], now)
            symbol = output.argmax()
            want.append(symbol)
        assert lengths[row] == len(want) and list(ids[row, : len(want)]) == want
        assert not ids[row, len(want) :].any()
    assert len({*np.asarray(lengths)}) > 1  # some end, at different steps


LOGITS = RANDOM.normal(size=(STEPS, 3, 3)).astype(np.float32)  # of each step and symbol before


class Bigrams(est.layers.RNNCell):
    output_size = 3

    def call(self, inputs, state):
        return jnp.asarray(LOGITS)[state[:, 0], inputs.astype(int)[:, 0]], state + 1


@pytest.mark.slow
def test_a_beam_that_holds_all_sequences_ranks_them_as_brute_force_does():
    every, weight = [], 2.5
    for ids in itertools.product(range(3), repeat=STEPS):
        ids = ids[: ids.index(END) + 1] if END in ids else ids
        if ids not in [each for each, _ in every]:
            steps = [np.log(softmax(LOGITS[t, before])[now]) for t, (before, now) in enumerate(zip((0, *ids), ids))]  # noqa: B905
            # TensorFlow's penalty counts an end token from the step after on.
            length = len(ids) - (len(ids) == STEPS and ids[-1] == END)
            every.append((ids, sum(steps) / ((5 + length) / 6) ** weight))
    every.sort(key=lambda each: -each[1])

    def model_fn(features, labels, mode):
        decoder = est.seq2seq.BeamSearchDecoder(
            *(Bigrams(), lambda ids: ids[..., None].astype(jnp.float32), jnp.zeros(2, int), END),
            *(jnp.zeros((2 * len(every), 1), int), len(every)),
            length_penalty_weight=weight,
        )
        outputs, state, lengths = est.seq2seq.dynamic_decode(decoder, maximum_iterations=STEPS)
        scores = outputs.beam_search_decoder_output.scores[:, -1]
        return est.EstimatorSpec(mode, predictions=(outputs.predicted_ids, scores, lengths))

    found, scores, lengths = predict(model_fn, jnp.ones(2)).predictions
    assert len(every) == 31  # 1 + 2 + 4 + 8 that end, and 16 that do not
    for row in range(2):
        np.testing.assert_allclose(scores[row], [score for _, score in every], rtol=1e-5)
        assert [tuple(found[row, :n, k].tolist()) for k, n in enumerate(lengths[row])] == [ids for ids, _ in every]
        assert all((found[row, n:, k] == END).all() for k, n in enumerate(lengths[row]))


@pytest.mark.slow
def test_a_narrow_beam_takes_states_and_alignments_along():
    beams, steps, weight, coverage = 3, 6, 0.8, 0.4

    def model_fn(features, labels, mode):
        cell, start = decoder_of(features, "bahdanau", VOCABULARY, beams)
        decoder = est.seq2seq.BeamSearchDecoder(
            *(cell, est.get_variable("table", (VOCABULARY, WIDTH)), jnp.zeros(BATCH, int), END, start, beams),
            length_penalty_weight=weight,
            coverage_penalty_weight=coverage,
        )
        outputs, state, _ = est.seq2seq.dynamic_decode(decoder, maximum_iterations=steps)
        history = state.cell_state.alignment_history
        return est.EstimatorSpec(mode, predictions=(outputs.predicted_ids, state.log_probs, state.lengths, history))

    model = est.transform(model_fn)
    state = random_state(model, X)
    state.variables["decoder/attention_wrapper/attention_layer/kernel"][:, END] += 1.0
    ids, log_probs, lengths, history = model.predict_step(state, X).predictions
    for row in range(BATCH):
        by_hand = ByHand(state.variables, "bahdanau", VOCABULARY, row)
        want = search(by_hand, state.variables["table"], beams, steps, weight, coverage)
        for k, (symbols, log_prob, _, alignments) in enumerate(want):
            assert lengths[row, k] == len(symbols)
            assert ids[row, :, k].tolist() == symbols + [END] * (steps - len(symbols))
            np.testing.assert_allclose(log_probs[row, k], log_prob, rtol=1e-4)
            np.testing.assert_allclose(history[: len(symbols), row * beams + k], alignments, rtol=1e-4, atol=1e-5)
            assert not history[len(symbols) :, row * beams + k].any()
    assert 1 < len({*np.asarray(lengths).ravel()})


def search(by_hand, table, beams, steps, weight, coverage):
    """TensorFlow's beam search, with lists: symbols, log probability, state, alignments."""
    kept = [([], 0.0, by_hand.start, [])]
    for _ in range(steps):
        candidates = []
        for symbols, log_prob, now, alignments in kept:
            if END in symbols:
                covered = np.array(alignments).sum(0)
                covered = np.log(np.minimum(covered[covered > 0], 1)).sum()
                penalty = ((5 + len(symbols)) / 6) ** weight
                candidates.append((log_prob / penalty + coverage * covered, (symbols, log_prob, now, alignments)))
                continue
            output, after, alignment = by_hand(table[symbols[-1] if symbols else 0], now)
            for symbol, step in enumerate(np.log(softmax(output))):
                longer = len(symbols) + (symbol != END)
                entry = [*symbols, symbol], log_prob + step, after, [*alignments, alignment]
                candidates.append(((log_prob + step) / ((5 + longer) / 6) ** weight, entry))
        candidates.sort(key=lambda each: -each[0])
        kept = [entry for _, entry in candidates[:beams]]
    return kept


def test_tiling_keeps_rows_together():
    tiled = est.seq2seq.tile_batch((jnp.array([1, 2]), est.layers.LSTMState(jnp.eye(2), jnp.eye(2))), 2)
    assert tiled[0].tolist() == [1, 1, 2, 2] and tiled[1].h[:, 0].tolist() == [1, 1, 0, 0]


def decode(maximum_iterations=None, beams=1, **options):
    cell, start = decoder_of(X, "luong", None)
    embedding, tokens = jnp.ones((VOCABULARY, WIDTH)), jnp.zeros(BATCH, int)
    decoder = est.seq2seq.BeamSearchDecoder(cell, embedding, tokens, END, start, beams)
    return est.seq2seq.dynamic_decode(decoder, maximum_iterations=maximum_iterations, **options)


REFUSED = {
    ValueError: [
        (lambda: decode(), "needs `maximum_iterations`, an int: the number of steps"),
        (lambda: decode(3, impute_finished=True), "for a decoder whose beams change places. Leave it"),
        (
            lambda: decode(3, beams=2),
            r"of 3 examples and 2 beams needs an `initial_state` of 6 rows; got 3\. Write `est",
        ),
        (lambda: decoder_of(X, "luong", [3, 4]), r"one `attention_layer_size` for each of 1 mechanisms; got \[3, 4\]"),
        (lambda: decoder_of(X, "luong", None)[0].zero_state(6), r"a batch size of \[3, 6\] rows\. For a Beam"),
        (lambda: est.seq2seq.BahdanauAttention(3, X["inputs"][0]), r"of shape \[batch, steps, width\]; got \(4, 4\)"),
        (lambda: est.seq2seq.LuongAttention(3, X["memory"], jnp.ones(3)), r"needs 3 integers as .*; got float32\[3\]"),
        (
            lambda: est.seq2seq.LuongAttention(3, X["memory"])(jnp.ones((3, 2))),
            "has keys of width 3, and got a query of width 2. Give it the units",
        ),
        (lambda: est.seq2seq.TrainingHelper(X["inputs"], jnp.ones(2)), r"for each of the 3 examples; got shape \(2,\)"),
        (lambda: est.seq2seq.GreedyEmbeddingHelper(jnp.eye(3), 0, END), r"start_tokens`; got int32\[\]\. Write `jnp.f"),
    ],
    TypeError: [
        (lambda: decode(est.global_step()), "needs an int as `maximum_iterations`; got .*Tracer. Write a number"),
        (lambda: decoder_of(X, "luong", None)[0](X["inputs"][:, 0], jnp.ones((3, 6))), "needs a state of its own: wri"),
        (lambda: est.seq2seq.AttentionWrapper(est.layers.GRUCell(3), 64), "needs an attention mechanism, .*; got 64"),
        (lambda: est.seq2seq.BasicDecoder(jnp.tanh, None, None), "BasicDecoder` needs cells, such as .*; got <"),
    ],
    AttributeError: [
        (lambda: est.seq2seq.sequence_loss, "here it is `est.nn.sequence_loss"),
        (lambda: est.seq2seq.SampleEmbeddingHelper, "here it is a helper of your own"),
    ],
}


@pytest.mark.quick
@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_wrong_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        predict(lambda features, mode: est.EstimatorSpec(mode, predictions=call()), jnp.ones(3))


@pytest.mark.slow
def test_towers_train_and_search_as_one_big_batch():
    def model_fn(features, labels, mode):
        rows, beams = features["inputs"].shape[0], 3
        table = est.get_variable("table", (VOCABULARY, WIDTH))
        cells = est.layers.MultiRNNCell([est.layers.BasicLSTMCell(UNITS) for _ in range(2)])
        output_layer = est.layers.Dense(VOCABULARY, use_bias=False, name="projection")

        def decoder_cell(beams):
            memory, lengths = est.seq2seq.tile_batch((features["memory"], features["memory_length"]), beams)
            attention = est.seq2seq.LuongAttention(UNITS, memory, lengths, scale=True)
            cell = est.seq2seq.AttentionWrapper(cells, attention, UNITS)
            return cell, cell.zero_state(rows * beams)

        with est.variable_scope("decode", reuse=est.AUTO_REUSE):
            cell, start = decoder_cell(1)
            helper = est.seq2seq.TrainingHelper(features["inputs"], features["length"])
            logits = est.seq2seq.dynamic_decode(est.seq2seq.BasicDecoder(cell, helper, start, output_layer))[0]
        weights = est.nn.sequence_mask(features["length"], STEPS, jnp.float32)
        loss = est.nn.sequence_loss(logits.rnn_output, jnp.tile(labels, (1, STEPS)), weights)
        with est.variable_scope("decode", reuse=est.AUTO_REUSE):
            cell, start = decoder_cell(beams)
            decoder = est.seq2seq.BeamSearchDecoder(
                cell, table, jnp.zeros(rows, int), END, start, beams, output_layer, length_penalty_weight=1.0
            )
            found = est.seq2seq.dynamic_decode(decoder, maximum_iterations=5)[0].predicted_ids
        train_op = TowerOptimizer(optax.adam(0.02)).minimize(loss + 0 * jnp.sum(table))
        return est.EstimatorSpec(mode, {"found": found, "logits": logits.rnn_output}, loss, train_op)

    x = {name: np.tile(value, (3, *(1,) * (value.ndim - 1)))[:8] for name, value in X.items()}
    y = RANDOM.integers(2, VOCABULARY, (8, 1))
    batches = jax.tree.map(lambda x: np.stack([x, x]), (x, y))
    state = assert_same_training(model_fn, replicate(model_fn, 2), batches, rtol=1e-4, atol=1e-5)
    attention = "decode/decoder/attention_wrapper/"
    assert set(state.variables) == {
        "table",
        "decode/memory_layer/kernel",
        "decode/decoder/projection/kernel",
        f"{attention}attention_layer/kernel",
        f"{attention}luong_attention/attention_g",
        *(f"{attention}multi_rnn_cell/cell_{n}/basic_lstm_cell/{kind}" for n in (0, 1) for kind in ("kernel", "bias")),
    }
