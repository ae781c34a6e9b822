"""A SavedModel answers what clients of TensorFlow's Estimators send: serialized `tf.Example`s, or features."""

import os

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import cpus

import estimator as est
from estimator.inputs._tfrecord import _dense
from estimator.renew import renew_export
from replicate import TowerOptimizer, replicate_model_fn

tf = pytest.importorskip("tensorflow")
saved_model_pb2 = pytest.importorskip("tensorflow.core.protobuf.saved_model_pb2")

fc = est.feature_column
STATES = ["Texas", "New York", "Ohio"]
CLASSES = ["cat", "dog", "emu"]
ROWS = [
    {"age": [30.5], "pet": ["dog", "emu"], "id": [3], "tags": ["a", "bb"], "counts": [1.0, 2.0], "state": ["Ohio"]},
    {"age": [7.0], "pet": [], "id": [0], "tags": [], "counts": [], "state": ["Utah"]},
    {"age": [-1.0], "pet": ["é" * 40, "cat", "cat"], "id": [-1], "tags": ["bb"], "counts": [3.0], "state": [""]},
    {"pet": ["dog"], "id": [4, 2], "tags": ["new", "a", "bb"], "counts": [1.0, 0.5, 2.0], "state": ["Texas"]},
]


def serialize(row):
    """A `tf.Example`, as the client of TensorFlow Serving puts it into a request."""
    features = {}
    for key, values in row.items():
        if key in ("pet", "tags", "state"):
            features[key] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[x.encode() for x in values]))
        elif key == "id":
            features[key] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        else:
            features[key] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    """A column of each kind."""
    path = tmp_path_factory.mktemp("assets") / "states.txt"
    path.write_text("\n".join(STATES) + "\n")
    tags = fc.categorical_column_with_vocabulary_list("tags", ["a", "bb"], num_oov_buckets=3)
    return [
        fc.numeric_column("age", default_value=40.0),
        fc.embedding_column(fc.categorical_column_with_hash_bucket("pet", 50), 3),
        fc.indicator_column(fc.categorical_column_with_identity("id", 5)),
        fc.indicator_column(fc.weighted_categorical_column(tags, "counts")),
        fc.embedding_column(fc.categorical_column_with_vocabulary_file("state", path, default_value=1), 2),
        fc.indicator_column(fc.crossed_column(["pet", "state"], 11)),
    ]


def parse(rows, columns):
    """The features of examples, as `tfrecord_input_fn` makes them for training."""
    parsed = est.io.parse_example([serialize(row) for row in rows], fc.make_parse_example_spec(columns))
    return fc.encode({key: _dense(value) for key, value in parsed.items()}, columns)


def own_model_fn(features, labels, mode, params):
    net = fc.input_layer(features, params)
    y = est.layers.dense(net, 2)
    if mode == est.ModeKeys.PREDICT:
        outputs = {
            "serving_default": est.export.PredictOutput({"y": y, "more": {"a b": y[:, 0]}}),
            "top": est.export.ClassificationOutput(y, y.argmax(-1)[:, None] + jnp.arange(2)),
            "half": est.export.RegressionOutput(y[:, 0].astype(jnp.bfloat16)),
        }
        return est.EstimatorSpec(mode, predictions={"y": y, "more": {"a b": y[:, 0]}}, export_outputs=outputs)
    loss = est.losses.mean_squared_error(labels, y[:, 0])
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))


def make(kind, columns, model_dir):
    if kind == "classifier":
        return est.DNNClassifier([4], columns, model_dir, n_classes=3, label_vocabulary=CLASSES)
    if kind == "two classes":
        return est.LinearClassifier(columns, model_dir)
    if kind == "regressor":
        return est.DNNRegressor([4], columns, model_dir)
    return est.Estimator(replicate_model_fn(own_model_fn, devices=cpus(2)), model_dir, params=columns)


def train(kind, columns, model_dir):
    labels = fc.encode_labels(["emu", "cat", "cat", "dog"], CLASSES) if kind == "classifier" else np.array([0, 1, 1, 0])
    labels = labels if "class" in kind else labels.astype(np.float32)
    return make(kind, columns, model_dir).train(lambda: [(parse(ROWS, columns), labels)])


def receiver(columns, **arguments):
    spec = fc.make_parse_example_spec(columns)
    return est.export.build_parsing_serving_input_receiver_fn(spec, columns=columns, **arguments)


SIGNATURES = {
    "classifier": {"serving_default": "classify", "classification": "classify", "predict": "predict"},
    "two classes": {
        "serving_default": "classify", "classification": "classify", "regression": "regress", "predict": "predict",
    },
    "regressor": {"serving_default": "regress", "regression": "regress", "predict": "predict"},
    "towers": {"serving_default": "predict", "top": "classify", "half": "regress"},
}  # fmt: skip


def check_servable(path, methods):
    """What TensorFlow Serving looks at in a signature before it answers."""
    with open(os.path.join(path, "saved_model.pb"), "rb") as file:
        [graph] = saved_model_pb2.SavedModel.FromString(file.read()).meta_graphs
    found = {name: each for name, each in graph.signature_def.items() if not name.startswith("__")}
    assert {name: each.method_name for name, each in found.items()} == {
        name: f"tensorflow/serving/{method}" for name, method in methods.items()
    }
    for name, each in found.items():
        is_predict = methods[name] == "predict"
        [(key, given)] = each.inputs.items()
        assert key == ("examples" if is_predict else "inputs")
        assert given.dtype == tf.string and [d.size for d in given.tensor_shape.dim] == [-1]
        kinds = {key: (x.dtype, len(x.tensor_shape.dim)) for key, x in each.outputs.items()}
        if methods[name] == "classify":
            assert kinds == {"scores": (tf.float32, 2), "classes": (tf.string, 2)}
        elif methods[name] == "regress":
            [(dtype, rank)] = [kinds.pop("outputs")]
            assert dtype == tf.float32 and rank in (1, 2) and not kinds
        assert tf.compat.v1.saved_model.signature_def_utils.is_valid_signature(each)


@pytest.mark.slow
@pytest.mark.covers("1.2 export_saved_model", "9 build_parsing_serving_input_receiver_fn", "9 signatures")
@pytest.mark.parametrize("kind", SIGNATURES)
def test_the_answer_to_serialized_examples_is_what_predict_gives_for_the_parsed_features(kind, columns, tmp_path):
    estimator = train(kind, columns, tmp_path / "model")
    path = estimator.export_saved_model(tmp_path / "exports", receiver(columns))
    with open(os.path.join(path, "assets", "states.txt")) as file:
        assert file.read().splitlines() == STATES
    check_servable(path, SIGNATURES[kind])
    loaded = tf.saved_model.load(path).signatures
    # How examples are parsed is the same for all models.
    for rows in [[*ROWS, *ROWS, ROWS[0]], *([ROWS, ROWS[1:2], ROWS[3:]] if kind == "classifier" else [])]:
        [want] = estimator.predict(lambda rows=rows: parse(rows, columns), yield_single_examples=False)
        examples = tf.constant([serialize(row) for row in rows])
        for name, method in SIGNATURES[kind].items():
            got = loaded[name](**{"examples" if method == "predict" else "inputs": examples})
            check_answer(kind, name, {key: x.numpy() for key, x in got.items()}, want, len(rows))


def check_answer(kind, name, got, want, rows):
    close = dict(rtol=1e-5, atol=1e-6)
    if kind == "towers":
        if name == "top":
            assert got["classes"].tolist() == [[b"%d" % n, b"%d" % (n + 1)] for n in want["y"].argmax(-1)]
            np.testing.assert_allclose(got["scores"], want["y"], **close)
        elif name == "half":
            np.testing.assert_allclose(got["outputs"], want["y"][:, 0], rtol=1e-2)
        else:
            np.testing.assert_allclose(got["y"], want["y"], **close)
            np.testing.assert_allclose(got["more/a b"], want["more"]["a b"], **close)
    elif "classes" in got and "scores" in got:
        names = CLASSES if kind == "classifier" else ["0", "1"]
        assert got["classes"].tolist() == [[each.encode() for each in names]] * rows
        np.testing.assert_allclose(got["scores"], want["probabilities"], **close)
    elif name == "predict":
        assert got.keys() == want.keys() | ({"all_classes"} if "class_ids" in want else set())
        for key, value in want.items():
            if value.dtype.kind == "U":
                assert got[key].tolist() == np.char.encode(value).tolist()
            else:
                np.testing.assert_allclose(got[key], value, **close)
    else:
        key = "logistic" if kind == "two classes" else "predictions"
        np.testing.assert_allclose(got["outputs"], want[key], **close)


@pytest.mark.slow
def test_a_session_answers_as_serving_runs_it_also_where_examples_share_a_context(columns, tmp_path):
    estimator = train("two classes", columns, tmp_path / "model")
    exporter = est.FinalExporter("final", serving_input_receiver_fn=receiver(columns, default_batch_size=2))
    path = exporter.export(estimator, str(tmp_path / "exports"), None, {"loss": 1.0}, True)
    context, rows = {"age": [3.0]}, [{**ROWS[0]}, {**ROWS[3]}]
    del rows[0]["age"]
    features = parse([{**row, **context} for row in rows], columns)
    [want] = estimator.predict(lambda: features, yield_single_examples=False)
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        loader = tf.compat.v1.saved_model.loader
        signature = loader.load(session, ["serve"], path).signature_def["serving_default"]
        names = [signature.outputs[key].name for key in ("scores", "classes")]
        # An ExampleListWithContext: Serving puts the bytes of the context before those of each example.
        request = [serialize(context) + serialize(row) for row in rows]
        scores, classes = session.run(names, {signature.inputs["inputs"].name: request})
    np.testing.assert_allclose(scores, want["probabilities"], rtol=1e-5)
    assert classes.tolist() == [[b"0", b"1"]] * 2
    model = est.load_exported(path)
    got = model(features, "predict")
    assert got["classes"].tolist() == want["classes"].tolist() and got["all_classes"].tolist() == [["0", "1"]] * 2
    with pytest.raises(ValueError, match="reads requests by a serving_input_receiver_fn, which is not in it"):
        renew_export(path, estimator.model_fn)


@pytest.mark.slow
@pytest.mark.covers("9 build_raw_serving_input_receiver_fn")
def test_raw_features_may_be_strings_and_sequences_have_the_steps_of_a_request(tmp_path):
    words = fc.sequence_categorical_column_with_vocabulary_list("words", ["a", "b"])
    columns = [fc.indicator_column(words), fc.sequence_numeric_column("rating")]

    def model_fn(features, labels, mode):
        x, lengths = fc.sequence_input_layer(features, columns)
        y = est.layers.lstm(x, 4, sequence_length=lengths)[0].sum(1)
        predictions = {"y": y, "lengths": lengths}
        return est.EstimatorSpec(mode, predictions=predictions, loss=y.mean(), train_op=est.group())

    raw = {"words": np.array([["a", "?", "b"], ["b", "", ""]]), "rating": np.ones((2, 3), np.float32)}
    raw["rating"][1, 1:] = np.nan
    features = fc.encode(raw, columns)
    estimator = est.Estimator(model_fn, tmp_path / "model").train(lambda: [(features, None)])
    [want] = estimator.predict(lambda: features, yield_single_examples=False)
    assert want["lengths"].tolist() == [3, 1]
    receiver_fn = est.export.build_raw_serving_input_receiver_fn(raw, columns=columns)
    served = tf.saved_model.load(estimator.export_model(tmp_path / "raw", receiver_fn)).signatures["serving_default"]
    for key, value in served(words=tf.constant(raw["words"]), rating=tf.constant(raw["rating"])).items():
        np.testing.assert_allclose(value, want[key], rtol=1e-5)

    def example(row):
        lists = {"words": tf.train.Feature(bytes_list=tf.train.BytesList(value=[x.encode() for x in row[0]]))}
        lists["rating"] = tf.train.Feature(float_list=tf.train.FloatList(value=row[1]))
        return tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString()

    path = estimator.export_model(tmp_path / "parsed", receiver(columns), outputs=["y"])
    served = tf.saved_model.load(path).signatures["serving_default"]
    examples = tf.constant([example((["a", "?", "b"], [1, 1, 1])), example((["b"], [1]))])
    np.testing.assert_allclose(served(examples=examples)["y"], want["y"], rtol=1e-5)


@pytest.mark.slow
def test_ids_are_those_of_the_host_or_an_error(tmp_path):
    hashed = fc.categorical_column_with_hash_bucket("word", 10)
    listed = fc.categorical_column_with_vocabulary_list("listed", ["a", "ü"], num_oov_buckets=1000)
    spec = {
        "n": est.io.FixedLenFeature([], np.int64),
        "word": est.io.FixedLenFeature([2], str, ["", "x"]),
        "listed": est.io.VarLenFeature(str),
        "list": est.io.FixedLenFeature([2], np.float32, [1.0, 2.0]),
        "sum": est.io.FixedLenSequenceFeature([], np.int64, allow_missing=True, default_value=7),
    }

    def model_fn(features, labels, mode):
        w = est.get_variable("w", ())
        predictions = {**features, "sum": features["sum"].sum(1)}
        return est.EstimatorSpec(mode, predictions=predictions, loss=w * 1.0, train_op=est.group())

    def parsed(request):
        features = {key: _dense(value) for key, value in est.io.parse_example(request, spec).items()}
        return fc.encode(features, [hashed, listed])

    def example(n, *more, words=()):
        message = est.io.Example()
        message.features.feature["n"].int64_list.value.append(n)
        message.features.feature["sum"].int64_list.value.extend(more)
        message.features.feature["listed"].bytes_list.value.extend([x.encode() for x in words])
        if words:
            message.features.feature["word"].bytes_list.value.extend([x.encode() for x in words[:2]])
        return message.SerializeToString()

    requests = [[example(-3, 1, 2, 3, words=["ü", "é" * 300, "", "zz"]), example(5)], [example(1, 4)]]
    estimator = est.Estimator(model_fn, tmp_path / "model").train(lambda: [(parsed(requests[0]), None)])
    receiver_fn = est.export.build_parsing_serving_input_receiver_fn(spec, columns=[hashed, listed])
    path = estimator.export_saved_model(tmp_path / "exports", receiver_fn)
    served = tf.saved_model.load(path).signatures["serving_default"]
    for request in requests:
        [want] = estimator.predict(lambda r=request: parsed(r), yield_single_examples=False)
        for key, value in served(examples=tf.constant(request)).items():
            np.testing.assert_array_equal(value, want[key])
    with pytest.raises(tf.errors.InvalidArgumentError, match="Feature: n holds an integer that does not fit"):
        served(examples=tf.constant([example(2**40)]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="n .data type: int64. is required but could not be found"):
        served(examples=tf.constant([b""]))


@pytest.mark.covers("9 receiver fn")
def test_what_an_export_cannot_take_is_refused_at_the_door(tmp_path):
    estimator = est.Estimator(own_model_fn, tmp_path / "model", params=[])
    fn = est.export.build_raw_serving_input_receiver_fn({"x": np.ones((2, 3), np.float32)})
    for call, error, message in (
        (lambda: estimator.export_saved_model("e", None), ValueError, r"^An input_receiver_fn must be defined\.$"),
        (lambda: estimator.export_saved_model("e", fn, as_text=True), ValueError, "writes no text; got as_text=True"),
        (lambda: estimator.export_saved_model("e", {"x": 1}), TypeError, "`export_saved_model` needs a serving_in"),
        (lambda: estimator.export_model("e", fn, format="jax"), ValueError, 'is for `format="saved_model"`'),
        (lambda: estimator.export_model("e", fn, batch_size=3), ValueError, "its builder `default_batch_size=3` inst"),
    ):
        with pytest.raises(error, match=message):
            call()
