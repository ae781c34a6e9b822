"""Port of the official Wide & Deep: a linear model of crossed columns and a network of embeddings, trained together.

    python examples/ports/wide_deep.py --towers 4 --model_type wide

The original is `official/wide_deep/wide_deep.py` of tensorflow/models. The census is made up: income follows from
education, occupation, age and hours.
"""

import argparse

import jax
import numpy as np

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

EDUCATION = ["Bachelors", "HS-grad", "11th", "Masters", "9th", "Some-college", "Assoc-acdm", "Doctorate"]
MARITAL_STATUS = ["Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed"]
RELATIONSHIP = ["Husband", "Not-in-family", "Wife", "Own-child", "Unmarried"]
WORKCLASS = ["Self-emp-not-inc", "Private", "State-gov", "Federal-gov", "Local-gov", "?"]
OCCUPATION = ["Exec-managerial", "Craft-repair", "Sales", "Tech-support", "Other-service", "Prof-specialty"]
PARAMS = {"model_type": "wide_deep", "hidden_units": [100, 75, 50, 25], "batch_size": 40}


def build_model_columns():
    fc = est.feature_column
    age = fc.numeric_column("age")
    education_num = fc.numeric_column("education_num")
    capital_gain = fc.numeric_column("capital_gain")
    hours_per_week = fc.numeric_column("hours_per_week")

    education = fc.categorical_column_with_vocabulary_list("education", EDUCATION)
    marital_status = fc.categorical_column_with_vocabulary_list("marital_status", MARITAL_STATUS)
    relationship = fc.categorical_column_with_vocabulary_list("relationship", RELATIONSHIP)
    workclass = fc.categorical_column_with_vocabulary_list("workclass", WORKCLASS)
    occupation = fc.categorical_column_with_hash_bucket("occupation", hash_bucket_size=1000)
    age_buckets = fc.bucketized_column(age, boundaries=[18, 25, 30, 35, 40, 45, 50, 55, 60, 65])

    base_columns = [education, marital_status, relationship, workclass, occupation, age_buckets]
    crossed_columns = [
        fc.crossed_column(["education", "occupation"], hash_bucket_size=1000),
        fc.crossed_column([age_buckets, "education", "occupation"], hash_bucket_size=1000),
    ]
    wide_columns = base_columns + crossed_columns
    deep_columns = [
        age,
        education_num,
        capital_gain,
        hours_per_week,
        fc.indicator_column(workclass),
        fc.indicator_column(education),
        fc.indicator_column(marital_status),
        fc.indicator_column(relationship),
        fc.embedding_column(occupation, dimension=8),
    ]
    return wide_columns, deep_columns


def build_estimator(model_dir, model_type, hidden_units):
    wide_columns, deep_columns = build_model_columns()
    linear_optimizer = TowerOptimizer(est.train.FtrlOptimizer(0.2))
    dnn_optimizer = TowerOptimizer(est.train.AdagradOptimizer(0.05))
    if model_type == "wide":
        return est.LinearClassifier(wide_columns, model_dir, optimizer=linear_optimizer)
    if model_type == "deep":
        return est.DNNClassifier(hidden_units, deep_columns, model_dir, optimizer=dnn_optimizer)
    return est.DNNLinearCombinedClassifier(
        model_dir=model_dir,
        linear_feature_columns=wide_columns,
        linear_optimizer=linear_optimizer,
        dnn_feature_columns=deep_columns,
        dnn_optimizer=dnn_optimizer,
        dnn_hidden_units=hidden_units,
    )


def census(examples, seed):
    random = np.random.default_rng(seed)
    lists = {"education": EDUCATION, "marital_status": MARITAL_STATUS, "relationship": RELATIONSHIP}
    lists |= {"workclass": WORKCLASS, "occupation": OCCUPATION}
    choices = {key: random.integers(0, len(words), examples) for key, words in lists.items()}
    features = {key: np.array(words)[choices[key]] for key, words in lists.items()}
    features["age"] = random.integers(17, 80, examples).astype(np.float32)
    features["education_num"] = choices["education"].astype(np.float32)
    features["capital_gain"] = random.exponential(1, examples).astype(np.float32)
    features["hours_per_week"] = random.integers(10, 60, examples).astype(np.float32)
    score = (choices["education"] + choices["occupation"]) % 4 + features["hours_per_week"] / 20
    score += (np.abs(features["age"] - 45) < 15) + 0.5 * random.normal(size=examples)
    wide_columns, deep_columns = build_model_columns()
    return est.feature_column.encode(features, wide_columns + deep_columns), (score > 3.7).astype(np.int32)


def load_data():
    return census(8000, seed=0), census(1000, seed=1)


def main(towers=4, steps=800, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    model = build_estimator(model_dir, params["model_type"], params["hidden_units"])
    model = est.Estimator(replicate_model_fn(model.model_fn, devices=jax.devices()[:towers]), model.model_dir)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    model.train(input_fn=train_input_fn, steps=steps)
    results = model.evaluate(input_fn=eval_input_fn)
    predictions = list(model.predict(input_fn=eval_input_fn))
    served = est.load_exported(model.export_model(f"{model.model_dir}/export", test_x))(test_x, "predict")
    return model, results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--model_type", default="wide_deep", choices=["wide", "deep", "wide_deep"])
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
