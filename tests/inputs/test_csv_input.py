import numpy as np
import pytest
from testing import refused

import estimator as est
from estimator.inputs import csv_input_fn

pytest.importorskip("pandas")


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.csv").write_text("age,work,rich\n39, State-gov,0\n,Private,1\n")
    (tmp_path / "b.csv").write_text("age,work,rich\n1.5,,1\n")
    (tmp_path / "bare.csv").write_text("39;x;0\n40;NA;1\n")
    return tmp_path


def test_rows_of_files_follow_each_other_and_empty_fields_have_their_defaults(files):
    defaults = {"age": 7.0, "work": "none", "rich": 0}
    input_fn = csv_input_fn([files / "a.csv", files / "b.csv"], 2, None, defaults, "rich", shuffle=False)
    (first, labels), (second, _) = input_fn()
    assert first["age"].tolist() == [39, 7] and first["age"].dtype == np.float32
    assert first["work"].tolist() == ["State-gov", "Private"] and second["work"].tolist() == ["none"]
    assert labels.tolist() == [0, 1] and labels.dtype == np.int32 and sorted(first) == ["age", "work"]


def test_a_pattern_stands_for_the_files_in_the_order_of_their_names(files):
    [batch] = csv_input_fn(f"{files}/?.csv", 3, column_defaults=[0.0, "", 0], shuffle=False)()
    assert batch["age"].tolist() == [39, 0, 1.5]


def test_files_without_a_header_have_the_given_names_and_defaults_by_order_as_record_defaults(files):
    names, defaults = ["a", "b", "c"], [[0.0], [""], [0]]
    input_fn = csv_input_fn(files / "bare.csv", 2, names, defaults, field_delim=";", header=False, shuffle=False)
    [batch] = input_fn()
    assert {name: x.tolist() for name, x in batch.items()} == {"a": [39, 40], "b": ["x", "NA"], "c": [0, 1]}


def test_only_chosen_columns_are_read(files):
    [batch] = csv_input_fn(files / "a.csv", 2, select_columns=["rich", "age"], shuffle=False)()
    assert sorted(batch) == ["age", "rich"] and np.isnan(batch["age"][1])


def test_an_estimator_trains_on_a_file(files):
    def model_fn(features, labels, mode):
        loss = est.losses.mean_squared_error(labels, est.get_variable("w", ()) * features["age"])
        return est.EstimatorSpec(mode, loss=loss, train_op=est.group())

    input_fn = csv_input_fn(files / "a.csv", 2, None, {"age": 0.0, "rich": 0.0, "work": ""}, "rich",
                            select_columns=["age", "rich", "work"], shuffle=False)  # fmt: skip

    def numbers():
        for features, labels in input_fn():
            yield {"age": features["age"]}, labels

    assert est.Estimator(model_fn, files / "model").train(numbers).get_variable_value("global_step") == 1


REFUSED = {
    ValueError: [
        (lambda a: csv_input_fn([], shuffle=False), r"needs the path of a file.*; got \[\]"),
        (lambda a: csv_input_fn(a, header=False, shuffle=False), "`column_names` where files have no header"),
        (
            lambda a: csv_input_fn(a, label_name="poor", shuffle=False),
            r"columns \['poor'\], which are not among \['age'",
        ),
        (lambda a: csv_input_fn(a, column_defaults=[0], shuffle=False), "1 column_defaults for the columns"),
        (
            lambda a: csv_input_fn(a, column_defaults=[0, None, 0], shuffle=False),
            "needs column_def.*; got 'work': None",
        ),
        (lambda a: csv_input_fn(a, column_defaults={"work": 0.0}, shuffle=False), "could not convert string to float"),
    ]
}


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_wrong_arguments_are_errors(files, call, error, message):
    with pytest.raises(error, match=message):
        call(files / "a.csv")
