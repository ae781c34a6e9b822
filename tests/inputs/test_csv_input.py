import gzip

import numpy as np
import pytest
from testing import refused
from testing.model_fns import regressing

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


def test_blank_lines_quotes_and_compression_are_read_as_pandas_reads_them(tmp_path):
    with gzip.open(tmp_path / "a.csv.gz", "wt", encoding="utf-8-sig", newline="") as file:
        file.write('\ntext, n\r\n"one, ""two""\nthree",1\r\n   \r\n,2')
    [batch] = csv_input_fn(tmp_path / "a.csv.gz", 2, column_defaults=["none", 0], shuffle=False)()
    assert batch["text"].tolist() == ['one, "two"\nthree', "none"] and batch["n"].tolist() == [1, 2]


@pytest.mark.filterwarnings("error::pandas.errors.DtypeWarning")
def test_a_column_has_one_kind_however_long_its_file_is(tmp_path):
    (tmp_path / "long.csv").write_text("a,b\n" + "1,2\n" * 300_000 + "x,2\n")
    [batch] = csv_input_fn(tmp_path / "long.csv", 300_001, shuffle=False)()
    assert {*batch["a"]} == {"1", "x"}


def test_an_estimator_trains_on_a_file(files):
    model_fn = regressing(lambda features: est.get_variable("w", ()) * features["age"])
    defaults = {"age": 0.0, "rich": 0.0}
    input_fn = csv_input_fn(files / "a.csv", 2, None, defaults, "rich", select_columns=["age", "rich"], shuffle=False)
    assert est.Estimator(model_fn, files / "model").train(input_fn).get_variable_value("global_step") == 1


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

SECOND = {  # the second of two files of which the first is "age,income\n30,1000\n", and what else is given
    "other order": ("income,age\n2000,40\n", {}, r"the same column names .*b.csv' has \['income', 'age'\], '.*a.csv"),
    "other names": ("age,pay\n40,2000\n", {"column_names": ["x", "y"]}, "must have the same column names"),
    "no header": ("40,2000\n41,2000\n", {}, r"must have the same column names.*b.csv' has \['40', '2000'\]"),
    "one column more": ("age,income,job\n40,2000,x\n", {}, r"must have the same column names.*, 'job'\]"),
    "one field more": ("age,income\n40,2000\n41,2000,9\n", {}, r"expects 2 fields .*line 3 of '.*b.csv' has 3: \['41'"),
    "one field less": ('age,income\n"40",2000\n\n8\n', {}, r"expects 2 fields in .*line 4 of '.*b.csv' has 1: \['8'\]"),
    "too few names": ("age,income\n", {"column_names": ["age"]}, "expects 1 fields in .*line 1 of '.*a.csv' has 2"),
    "too few, bare": ("1,2\n", {"column_names": ["age"], "header": False}, "expects 1 fields in .*line 1 of '.*a.csv"),
    "names in another order": ("age,income\n", {"column_names": ["income", "age"]}, "has its columns in the order"),
    "one name twice": ("age,income\n", {"column_names": ["x", "x"]}, r"columns of different names; got \['x', 'x'\]"),
    "empty": ("\n", {}, "found no rows in '.*b.csv'"),
    "two characters": ("age,income\n", {"field_delim": ", "}, "needs one character as field_delim"),
}  # fmt: skip


@pytest.mark.parametrize("text, arguments, message", SECOND.values(), ids=SECOND)
def test_files_and_rows_that_differ_in_their_columns_are_errors(tmp_path, text, arguments, message):
    (tmp_path / "a.csv").write_text("age,income\n30,1000\n")
    (tmp_path / "b.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        csv_input_fn(f"{tmp_path}/?.csv", 9, shuffle=False, **arguments)


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_wrong_arguments_are_errors(files, call, error, message):
    with pytest.raises(error, match=message):
        call(files / "a.csv")
