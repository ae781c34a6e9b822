"""Port of the census sample: wide and deep with crossed columns, trained and evaluated from CSV files, and exported.

    python examples/ports/census_estimator.py --towers 4

The original is `census/estimator/trainer` of cloudml-samples: `model.py`, `input.py`, `task.py`. The files are written
by a formula: income follows from education, occupation, age, hours and gains.
"""

import argparse
import os
import tempfile

import jax
import numpy as np

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

CSV_COLUMNS = [
    *["age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"],
    *["race", "gender", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income_bracket"],
]
CSV_COLUMN_DEFAULTS = [[0], [""], [0], [""], [0], [""], [""], [""], [""], [""], [0], [0], [0], [""], [""]]
LABEL_COLUMN = "income_bracket"
LABELS = ["<=50K", ">50K"]
VOCABULARIES = {
    "gender": ["Female", "Male"],
    "race": ["Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White"],
    "education": ["9th", "11th", "HS-grad", "Some-college", "Assoc-voc", "Bachelors", "Masters", "Doctorate"],
    "marital_status": ["Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed"],
    "relationship": ["Husband", "Not-in-family", "Wife", "Own-child", "Unmarried", "Other-relative"],
    "workclass": ["Self-emp-not-inc", "Private", "State-gov", "Federal-gov", "Local-gov", "?", "Never-worked"],
}
fc = est.feature_column
INPUT_COLUMNS = [
    *[fc.categorical_column_with_vocabulary_list(key, words) for key, words in VOCABULARIES.items()],
    fc.categorical_column_with_hash_bucket("occupation", hash_bucket_size=100),
    fc.categorical_column_with_hash_bucket("native_country", hash_bucket_size=100),
    fc.numeric_column("age"),
    fc.numeric_column("education_num"),
    fc.numeric_column("capital_gain"),
    fc.numeric_column("capital_loss"),
    fc.numeric_column("hours_per_week"),
]
PARAMS = {"batch_size": 40, "embedding_size": 8, "first_layer_size": 100, "num_layers": 4, "scale_factor": 0.7}


def build_estimator(config, embedding_size, hidden_units):
    gender, race, education, marital_status, relationship, workclass, occupation, native_country = INPUT_COLUMNS[:8]
    age, *numbers = INPUT_COLUMNS[8:]
    age_buckets = fc.bucketized_column(age, boundaries=[18, 25, 30, 35, 40, 45, 50, 55, 60, 65])
    wide_columns = [
        fc.crossed_column(["education", "occupation"], hash_bucket_size=int(1e4)),
        fc.crossed_column([age_buckets, race, "occupation"], hash_bucket_size=int(1e6)),
        fc.crossed_column(["native_country", "occupation"], hash_bucket_size=int(1e4)),
        gender,
        native_country,
        education,
        occupation,
        workclass,
        marital_status,
        relationship,
        age_buckets,
    ]
    deep_columns = [
        fc.indicator_column(workclass),
        fc.indicator_column(education),
        fc.indicator_column(marital_status),
        fc.indicator_column(gender),
        fc.indicator_column(relationship),
        fc.indicator_column(race),
        fc.embedding_column(native_country, dimension=embedding_size),
        fc.embedding_column(occupation, dimension=embedding_size),
        age,
        *numbers,
    ]
    return est.DNNLinearCombinedClassifier(
        config=config,
        linear_feature_columns=wide_columns,
        linear_optimizer=TowerOptimizer(est.train.FtrlOptimizer(0.005)),  # the defaults, wrapped for towers
        dnn_feature_columns=deep_columns,
        dnn_optimizer=TowerOptimizer(est.train.AdagradOptimizer(0.001)),
        dnn_hidden_units=hidden_units,
        loss_reduction=est.Reduction.SUM,
    )


def input_fn(filenames, num_epochs=None, shuffle=True, batch_size=200):
    rows = est.inputs.csv_input_fn(
        filenames,
        batch_size,
        column_names=CSV_COLUMNS,
        column_defaults=CSV_COLUMN_DEFAULTS,
        label_name=LABEL_COLUMN,
        num_epochs=num_epochs,
        shuffle=shuffle,
        header=False,
        seed=0,
    )
    for features, labels in rows():
        del features["fnlwgt"]  # the one that is not used
        yield fc.encode(features, INPUT_COLUMNS), fc.encode_labels(labels, LABELS)


def census(examples, seed):
    """Rows of a file, as strings."""
    random = np.random.default_rng(seed)
    lists = VOCABULARIES | {
        "occupation": ["Exec-managerial", "Craft-repair", "Sales", "Tech-support", "Other-service", "Prof-specialty"],
        "native_country": ["United-States", "Mexico", "Germany", "Canada", "India"],
    }
    choices = {key: random.integers(0, len(words), examples) for key, words in lists.items()}
    rows = {key: np.array(words)[choices[key]] for key, words in lists.items()}
    rows |= {
        "age": random.integers(17, 80, examples),
        "fnlwgt": random.integers(20_000, 400_000, examples),
        "education_num": choices["education"] + 5,
        "capital_gain": random.integers(0, 5, examples) ** 2,
        "capital_loss": random.integers(0, 3, examples),
        "hours_per_week": random.integers(10, 60, examples),
    }
    score = (choices["education"] + choices["occupation"]) % 4 + rows["hours_per_week"] / 20
    score += (np.abs(rows["age"] - 45) < 15) + (rows["capital_gain"] - rows["capital_loss"]) / 16
    rows[LABEL_COLUMN] = np.array(LABELS)[(score + 0.3 * random.normal(size=examples) > 4.2).astype(int)]
    return np.array([",".join(map(str, row)) for row in zip(*(rows[key] for key in CSV_COLUMNS), strict=True)])


def load_data():
    return census(8000, seed=0), census(1000, seed=1)


def main(towers=4, steps=1500, model_dir=None, **params):
    params = PARAMS | params
    sizes = [params["first_layer_size"] * params["scale_factor"] ** i for i in range(params["num_layers"])]
    config = est.RunConfig(model_dir=model_dir, seed=0)
    model = build_estimator(config, params["embedding_size"], hidden_units=[max(2, int(size)) for size in sizes])
    model_fn = replicate_model_fn(model.model_fn, est.Reduction.SUM, devices=jax.devices()[:towers])
    estimator = est.Estimator(model_fn, model.model_dir, config)
    folder = tempfile.mkdtemp()
    files = [os.path.join(folder, name) for name in ("adult.data.csv", "adult.test.csv")]
    for file, lines in zip(files, load_data(), strict=True):
        np.savetxt(file, lines, fmt="%s")

    def eval_input():
        return input_fn(files[1], num_epochs=1, shuffle=False, batch_size=100)

    example_features, _ = next(eval_input())
    exporter = est.FinalExporter("census", example_features)
    train_spec = est.TrainSpec(lambda: input_fn(files[0], batch_size=params["batch_size"]), max_steps=steps)
    eval_spec = est.EvalSpec(eval_input, steps=None, exporters=[exporter], name="census-eval")
    results, exports = est.train_and_evaluate(estimator, train_spec, eval_spec)
    predictions = list(estimator.predict(eval_input))
    return estimator, results, predictions, est.load_exported(exports[0])(example_features, "predict")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
