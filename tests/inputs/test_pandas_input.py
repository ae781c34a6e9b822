import sys

import jax
import numpy as np
import pytest
from testing import refused
from testing.model_fns import regressing

import estimator as est
from estimator.inputs import pandas_input_fn

pd = pytest.importorskip("pandas")

X = pd.DataFrame({"a": np.arange(5, dtype=np.int32), "b": np.arange(5) / 2}, index=list("pqrst"))
SERIES = pd.Series(np.arange(5) * 10, index=list("pqrst"), name="label")
FRAME = pd.DataFrame({"c": np.arange(5) * 10, "a": np.arange(5) * 20}, index=list("pqrst"))


def test_features_are_the_columns_without_the_index():
    batches = list(pandas_input_fn(X, batch_size=2, shuffle=False)())
    assert [sorted(batch) for batch in batches] == [["a", "b"]] * 3
    assert [batch["a"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert batches[0]["a"].dtype == np.int32 and batches[0]["b"].tolist() == [0, 0.5]


def test_a_series_gives_an_array_of_labels_and_a_frame_a_dict():
    for features, labels in pandas_input_fn(X, SERIES, 2, num_epochs=3, shuffle=True)():
        assert type(labels) is np.ndarray
        np.testing.assert_array_equal(labels, features["a"] * 10)
    for features, labels in pandas_input_fn(X, FRAME, 2, shuffle=True)():  # may have the column names of x
        np.testing.assert_array_equal(labels["c"], features["a"] * 10)
        np.testing.assert_array_equal(labels["a"], features["a"] * 20)


@pytest.mark.parametrize("labels", [SERIES, FRAME])
def test_later_changes_of_the_frames_do_not_matter(labels):
    x, y = X.copy(), labels.copy()
    rest = pandas_input_fn(x, y, 2, shuffle=False)()  # alone keeps what it reads
    first = next(rest)
    x.loc["t", "a"], x.iloc[4, 1] = 100, 100
    x["new"] = 1
    x += 1
    y.iloc[4] = 100
    y += 1
    want = list(pandas_input_fn(X, labels, 2, shuffle=False)())
    jax.tree.map(np.testing.assert_array_equal, [first, *rest], want)


@pytest.mark.skipif(pd.__version__ < "3", reason="pandas 2 copies at once, unless its option says otherwise")
def test_a_frame_is_not_copied_before_it_changes():
    for features, labels in pandas_input_fn(X, SERIES, shuffle=False)():
        assert np.shares_memory(features["a"], X["a"].to_numpy()) and not features["a"].flags.writeable
        assert np.shares_memory(labels, SERIES.to_numpy())


def test_order_seed_and_remainder_match_numpy_input_fn():
    for options in ({"seed": 3}, {"seed": 4, "drop_remainder": True}):
        theirs = est.inputs.numpy_input_fn(X["a"].to_numpy(), None, 3, 3, True, **options)()
        ours = pandas_input_fn(X, None, 3, 3, True, **options)()
        next(ours), next(theirs)
        assert ours.get_state() == theirs.get_state()
        assert [batch["a"].tolist() for batch in ours] == [batch.tolist() for batch in theirs]


def test_an_estimator_trains_evaluates_and_predicts_on_a_frame(tmp_path):
    model_fn = regressing(lambda features: features["b"].astype(np.float32) * est.get_variable("w", ()))
    estimator = est.Estimator(model_fn, tmp_path)
    estimator.train(pandas_input_fn(X, SERIES, 5, num_epochs=None, shuffle=True), steps=40)
    assert estimator.evaluate(pandas_input_fn(X, SERIES, 2, shuffle=False))["loss"] < 1e-3
    np.testing.assert_allclose(list(estimator.predict(pandas_input_fn(X, shuffle=False))), SERIES, atol=0.1)


FC = est.feature_column
COLUMNS = [
    FC.numeric_column("b"),
    FC.indicator_column(FC.categorical_column_with_vocabulary_list("color", ["red", "green"])),
]
COLORS = X.assign(color=["red", None, "green", "red", "blue"], w=[1, 0, 1, 1, 1])
CLASSES = pd.Series(["no", "yes", "no", "yes", "no"], index=X.index)


@pytest.mark.slow
def test_a_canned_classifier_takes_strings_of_a_frame_and_of_a_file(tmp_path):
    options = {"columns": COLUMNS, "label_vocabulary": ["no", "yes"]}
    COLORS.assign(label=CLASSES).to_csv(tmp_path / "rows.csv", index=False)
    file = str(tmp_path / "rows.csv")
    inputs = [
        pandas_input_fn(COLORS, CLASSES, 5, shuffle=False, **options),
        est.inputs.csv_input_fn(file, 5, label_name="label", shuffle=False, **options),
    ]
    losses = []
    for i, input_fn in enumerate(inputs):
        linear = est.LinearClassifier(COLUMNS, tmp_path / str(i), weight_column="w", label_vocabulary=["no", "yes"])
        linear.train(input_fn)
        losses.append(linear.evaluate(input_fn)["loss"])
    assert losses[0] == losses[1]
    features, labels = next(inputs[0]())
    assert features["color"].tolist() == [0, 2**32 - 1, 1, 0, 2**32 - 1] and labels.tolist() == [0, 1, 0, 1, 0]
    predicted = list(linear.predict(lambda: FC.encode(COLORS.drop(columns="w"), COLUMNS), "classes"))
    again = linear.predict(inputs[0], "classes")
    assert [row["classes"][0] for row in predicted] == [row["classes"][0] for row in again]
    exported = est.load_exported(linear.export_model(tmp_path / "export", FC.encode(COLORS[["b", "color"]], COLUMNS)))
    one = pd.DataFrame({"b": [1], "color": ["red"]})  # an integer, where the table has floats
    assert exported(FC.encode(one, COLUMNS))["scores"].shape == (1, 2)


REFUSED = {
    ValueError: [
        ({"shuffle": None}, "shuffle must be provided and explicitly set.*got None"),
        ({"y": SERIES, "target_column": "a"}, r"Cannot use name a for target column: .*\['a', 'b'\]. Give"),
        ({"y": SERIES.iloc[::-1]}, "Index for x and y are mismatched.*index for x: .*index for y"),
        ({"y": SERIES.iloc[:3]}, "Index for x and y are mismatched"),
        ({"x": X.iloc[:0]}, "x cannot be an empty array"),
        ({"x": X[[]]}, r"x must have at least one column; got a DataFrame of shape \(5, 0\)"),
        ({"x": X[["a", "b", "a"]]}, r"columns of x must have different names; got several called \['a'\]"),
        ({"y": FRAME[["c", "c"]]}, r"columns of y must have different names; got several called \['c'\]"),
        ({"batch_size": 0}, "batch_size must be an int >= 1; got 0"),
        ({"columns": ["a"]}, "Items of feature_columns must be columns such as .* Given: 'a'"),
        ({"x": COLORS, "columns": COLUMNS[:1]}, r"features \['color'\] hold strings or objects, .* `frame.drop\("),
        ({"y": CLASSES, "label_vocabulary": ["no"]}, "got the label 'yes', which is not in label_vocabulary"),
    ],
    TypeError: [
        ({"target_column": ["t"]}, r"target_column must be a string type; got \['t'\]"),
        ({"y": SERIES.to_numpy()}, "y must be a pandas Series or DataFrame; got ndarray"),
        ({"y": FRAME, "label_vocabulary": ["no"]}, r"label_vocabulary is for y as a Series; .* columns \['c', 'a'\]"),
        ({"x": {"a": np.ones(3)}}, "x must be a pandas DataFrame; got dict. For arrays there is numpy_input"),
    ],
}


@pytest.mark.covers("10 pandas_input_fn")
@pytest.mark.parametrize("error, args, message", refused.rows(REFUSED))
def test_bad_arguments_are_errors_at_once(args, error, message):
    with pytest.raises(error, match=message):
        pandas_input_fn(**{"x": X, "shuffle": False} | args)


@pytest.mark.covers("10 pandas_input_fn")
def test_without_pandas_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(TypeError, match="should not be called without pandas installed. Install it .* numpy_input_fn"):
        pandas_input_fn(X, shuffle=False)
