"""Port of the tutorial `custom_estimator.py`: tells irises apart by a network over feature columns.

    python examples/ports/custom_estimator.py --towers 4

The original is `samples/core/get_started/custom_estimator.py` of tensorflow/models.
"""

import argparse

import jax
from sklearn.datasets import load_iris

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

CSV_COLUMN_NAMES = ["SepalLength", "SepalWidth", "PetalLength", "PetalWidth"]
PARAMS = {
    "feature_columns": [est.feature_column.numeric_column(key) for key in CSV_COLUMN_NAMES],
    "hidden_units": [10, 10],
    "n_classes": 3,
    "batch_size": 100,
}


def my_model(features, labels, mode, params):
    net = est.feature_column.input_layer(features, params["feature_columns"])
    for units in params["hidden_units"]:
        net = est.layers.dense(net, units=units, activation=jax.nn.relu)
    logits = est.layers.dense(net, params["n_classes"], activation=None)

    predicted_classes = logits.argmax(1)
    if mode == est.ModeKeys.PREDICT:
        predictions = {
            "class_ids": predicted_classes[:, None],
            "probabilities": jax.nn.softmax(logits),
            "logits": logits,
        }
        return est.EstimatorSpec(mode, predictions=predictions)

    loss = est.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
    accuracy = est.metrics.accuracy(labels=labels, predictions=predicted_classes, name="acc_op")
    metrics = {"accuracy": accuracy}
    est.summary.scalar("accuracy", accuracy[1])
    if mode == est.ModeKeys.EVAL:
        return est.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    optimizer = TowerOptimizer(est.train.AdagradOptimizer(learning_rate=0.1))
    train_op = optimizer.minimize(loss, global_step=est.global_step())
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


def load_data():
    x, y = load_iris(return_X_y=True)
    features = {key: x[:, i].astype("float32") for i, key in enumerate(CSV_COLUMN_NAMES)}
    is_test = [i % 5 == 0 for i in range(len(y))]
    is_train = [not each for each in is_test]
    train, test = ({key: value[rows] for key, value in features.items()} for rows in (is_train, is_test))
    return (train, y[is_train].astype("int32")), (test, y[is_test].astype("int32"))


def main(towers=4, steps=1000, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    model_fn = replicate_model_fn(my_model, devices=jax.devices()[:towers])
    classifier = est.Estimator(model_fn, model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    classifier.train(input_fn=train_input_fn, steps=steps)
    eval_result = classifier.evaluate(input_fn=eval_input_fn)
    predictions = list(classifier.predict(input_fn=eval_input_fn))
    served = est.load_exported(classifier.export_model(f"{classifier.model_dir}/export", test_x))(test_x)
    return classifier, eval_result, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
