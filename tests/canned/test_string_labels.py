"""Labels that are strings become integers in the input, and predictions become strings again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

encode_labels = est.feature_column.encode_labels
SPECIES = ["setosa", "versicolor", "virginica"]
X = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
LABELS = np.repeat(SPECIES, 4)
COLUMNS = [est.feature_column.numeric_column("x", 3)]


def input_fn():
    while True:
        yield {"x": X}, encode_labels(LABELS, SPECIES)


@pytest.mark.covers("11 classes as strings")
@pytest.mark.slow
@pytest.mark.parametrize("towers, n_classes, vocabulary", [(3, 3, SPECIES), (1, 2, SPECIES[:2]), (1, 3, None)])
def test_a_classifier_of_strings_predicts_strings(tmp_path, towers, n_classes, vocabulary):
    rows = LABELS != "virginica" if n_classes == 2 else np.ones(12, bool)
    optimizer = TowerOptimizer(optax.sgd(5.0))
    linear = est.LinearClassifier(COLUMNS, tmp_path, n_classes, None, vocabulary, optimizer)
    devices = [f"/cpu:{i}" for i in range(towers)]
    batch = {"x": X[rows][:6]}, encode_labels(LABELS[rows], SPECIES)[:6]
    classifier = est.Estimator(replicate_model_fn(linear.model_fn, devices=devices), tmp_path)
    classifier.train(lambda: [batch] * 20)
    want = [*LABELS[:4], *LABELS[4:6]] if vocabulary else ["0"] * 4 + ["1"] * 2
    rows = list(classifier.predict(lambda: batch[0]))
    assert [row["classes"].tolist() for row in rows] == [[name] for name in want]
    assert isinstance(rows[0]["classes"][0], str) and isinstance(rows[0]["class_ids"][0], np.int32)
    [whole] = classifier.predict(lambda: batch[0], "classes", yield_single_examples=False)
    assert whole.keys() == {"classes"} and whole["classes"].ravel().tolist() == want


def test_several_heads_and_pure_functions_have_the_strings_too():
    head = est.MultiHead([est.MultiClassHead(3, label_vocabulary=SPECIES, name="a"), est.BinaryClassHead(name="b")])

    def model_fn(features, labels, mode):
        return head.create_estimator_spec(features, mode, {"a": features, "b": features[:, :1]}, labels)

    model = est.transform(model_fn)
    spec = model.predict_step(model.init(jax.random.key(0), X, mode="infer"), X)
    assert np.asarray(spec.predictions["a", "classes"]).ravel().tolist() == LABELS.tolist()
    assert np.asarray(spec.predictions["b", "classes"]).ravel().tolist() == ["1"] * 4 + ["0"] * 8


@pytest.mark.slow
def test_an_export_has_the_names_in_its_signature(tmp_path):
    linear = est.LinearClassifier(COLUMNS, tmp_path, 3, label_vocabulary=SPECIES).train(input_fn, steps=1)
    exported = est.load_exported(linear.export_model(tmp_path / "export", {"x": X[:1]}))
    assert exported({"x": X})["classes"].tolist() == SPECIES
    predicted = exported({"x": X}, "predict")
    assert predicted.keys() == {"logits", "probabilities", "class_ids", "all_class_ids", "classes", "all_classes"}
    assert predicted["classes"].tolist() == np.array(SPECIES)[predicted["class_ids"]].tolist()
    assert predicted["all_classes"].tolist() == [SPECIES] * len(X)
    part = est.load_exported(linear.export_model(tmp_path / "part", {"x": X[:1]}, outputs=["classes"]))
    assert part({"x": X})["classes"].tolist() == predicted["classes"].tolist()


def test_strings_are_encoded_by_their_position():
    for given in (LABELS, LABELS.tolist(), LABELS.astype(bytes), LABELS.astype(object), LABELS[:, None]):
        codes = encode_labels(given, SPECIES)
        assert codes.dtype == np.uint32 and codes.ravel().tolist() == np.repeat(range(3), 4).tolist()
        assert codes.shape == np.shape(given)
    assert encode_labels(LABELS[0], SPECIES) == 0
    assert encode_labels(codes, SPECIES) is codes
    zeros_and_ones = np.eye(3, dtype=np.int32)
    assert encode_labels(zeros_and_ones, SPECIES, many_hot=True) is zeros_and_ones


def test_examples_of_several_classes_become_zeros_and_ones():
    given = np.array([["virginica", "setosa", ""], ["", "", ""], [b"setosa", "", "setosa"]], object)
    codes = encode_labels(given, SPECIES, many_hot=True)
    assert codes.tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 0]] and codes.dtype == np.int32
    head = est.MultiLabelHead(3, label_vocabulary=SPECIES)
    assert jnp.isfinite(head.loss(codes, X[:3]))


REFUSED = {
    ValueError: [
        (lambda: encode_labels(["rose"], SPECIES),
         r"`encode_labels` got the label 'rose', which is not in label_vocabulary, \['setosa', .*"),
        (lambda: encode_labels(["setosa", ""], SPECIES), "got the label ''"),
    ],
    TypeError: [
        (lambda: encode_labels(np.array([None, "setosa"]), SPECIES), "got the label None"),
        (lambda: encode_labels(np.array([1, 2]), ["1", "2"]),
         r"got labels of dtype int64; .* strings, such as '1'. Write `.astype\(str\)` .*`.astype\(np.uint32\)`"),
        (lambda: encode_labels(np.array([1], object), ["1", "2"]), r"got the label 1, .* `.astype\(str\)` if numbers"),
        (lambda: est.MultiClassHead(3, label_vocabulary=["1", "2", "3"]).loss(np.array([1, 0]), X[:2]),
         r"dtype should be string, for `MultiClassHead` with label_vocabulary=\['1', '2'.*; got int32. Let"),
        (lambda: est.BinaryClassHead(label_vocabulary=["1", "2"]).loss(np.array([1, 0]), X[:2, :1]),
         "dtype should be string, for `BinaryClassHead` with .*; got int32. Let"),
        (lambda: est.MultiClassHead(3).loss(LABELS, X),
         r"`est.feature_column.encode_labels\(labels, label_vocabulary\)`"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_an_error_says_what_is_wrong_with_labels(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_classifier_given_strings_says_who_turns_them_into_integers(tmp_path):
    classifier = est.LinearClassifier(COLUMNS, tmp_path, 3, label_vocabulary=SPECIES)
    message = r"got labels of dtype <U10. .*`est.feature_column.encode_labels\(labels, label_v"
    with pytest.raises(TypeError, match=message):
        classifier.train(lambda: ({"x": X}, LABELS), steps=1)
