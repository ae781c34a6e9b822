"""Port of DeepFM: a factorization machine and a deep network share embeddings of features, to predict clicks.

    python examples/ports/deepfm.py --towers 4

The original is `deep_ctr/Model_pipeline/DeepFM.py` of lambdaji/tf_repos. The clicks are made up: they follow from
products of hidden properties of the features.
"""

import argparse

import jax
import numpy as np

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

PARAMS = {
    "field_size": 8,
    "feature_size": 400,
    "embedding_size": 8,
    "learning_rate": 5e-3,
    "l2_reg": 1e-4,
    "deep_layers": [32, 16],
    "dropout": [0.9, 0.9],  # what is kept
    "batch_norm": True,
    "batch_norm_decay": 0.9,
    "optimizer": "Adam",
    "batch_size": 256,
}


def model_fn(features, labels, mode, params):
    field_size, feature_size = params["field_size"], params["feature_size"]
    embedding_size, l2_reg = params["embedding_size"], params["l2_reg"]

    glorot = jax.nn.initializers.glorot_normal()
    fm_b = est.get_variable("fm_bias", shape=[1], initializer=jax.nn.initializers.zeros)
    fm_w = est.get_variable("fm_w", [feature_size, 1], initializer=glorot)
    fm_v = est.get_variable("fm_v", [feature_size, embedding_size], initializer=glorot)

    feat_ids = features["feat_ids"].reshape(-1, field_size)
    feat_vals = features["feat_vals"].reshape(-1, field_size)

    with est.variable_scope("First-order"):
        feat_wgts = fm_w[feat_ids][..., 0]
        y_w = (feat_wgts * feat_vals).sum(1)

    with est.variable_scope("Second-order"):
        embeddings = fm_v[feat_ids] * feat_vals[..., None]
        sum_square = embeddings.sum(1) ** 2
        square_sum = (embeddings**2).sum(1)
        y_v = 0.5 * (sum_square - square_sum).sum(1)

    with est.variable_scope("Deep-part", regularizer=est.regularizers.l2(l2_reg)):
        deep_inputs = embeddings.reshape(-1, field_size * embedding_size)
        for i, units in enumerate(params["deep_layers"]):
            deep_inputs = est.layers.dense(deep_inputs, units, jax.nn.relu, name=f"mlp{i}")
            if params["batch_norm"]:
                deep_inputs = batch_norm_layer(deep_inputs, params["batch_norm_decay"], scope_bn=f"bn_{i}")
            deep_inputs = est.layers.dropout(deep_inputs, rate=1 - params["dropout"][i])
        y_deep = est.layers.dense(deep_inputs, 1, name="deep_out")
        y_d = y_deep.reshape(-1)

    with est.variable_scope("DeepFM-out"):
        y = fm_b + y_w + y_v + y_d
        pred = jax.nn.sigmoid(y)

    predictions = {"prob": pred}
    export_outputs = {"serving_default": est.export.PredictOutput(predictions)}
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=predictions, export_outputs=export_outputs)

    loss = est.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=y).mean()
    loss += l2_reg * est.nn.l2_loss(fm_w) + l2_reg * est.nn.l2_loss(fm_v) + est.losses.get_regularization_loss()
    eval_metric_ops = {"auc": est.metrics.auc(labels, pred)}
    if mode == est.ModeKeys.EVAL:
        return est.EstimatorSpec(mode, predictions=predictions, loss=loss, eval_metric_ops=eval_metric_ops)

    if params["optimizer"] == "Adam":
        optimizer = est.train.AdamOptimizer(params["learning_rate"], beta1=0.9, beta2=0.999, epsilon=1e-8)
    elif params["optimizer"] == "Adagrad":
        optimizer = est.train.AdagradOptimizer(params["learning_rate"], initial_accumulator_value=1e-8)
    elif params["optimizer"] == "Momentum":
        optimizer = est.train.MomentumOptimizer(params["learning_rate"], momentum=0.95)
    train_op = TowerOptimizer(optimizer).minimize(loss, global_step=est.global_step())
    return est.EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)


def batch_norm_layer(x, decay, scope_bn):
    return est.layers.batch_normalization(x, momentum=decay, name=scope_bn, synchronized=True)


def clicks(examples, seed):
    field_size, feature_size = PARAMS["field_size"], PARAMS["feature_size"]
    hidden = np.random.default_rng(0).normal(size=(feature_size, 3))
    random = np.random.default_rng(seed)
    per_field = feature_size // field_size
    ids = random.integers(0, per_field, (examples, field_size)) + per_field * np.arange(field_size)
    score = (hidden[ids].sum(1) ** 2 - (hidden[ids] ** 2).sum(1)).sum(1)
    features = {"feat_ids": ids.astype(np.int32), "feat_vals": np.ones(ids.shape, np.float32)}
    return features, (score > 0).astype(np.float32)


def load_data():
    return clicks(20000, seed=1), clicks(1000, seed=2)


def main(towers=4, steps=600, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    model = replicate_model_fn(model_fn, devices=jax.devices()[:towers])
    deep_fm = est.Estimator(model, model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    deep_fm.train(train_input_fn, steps=steps)
    eval_results = deep_fm.evaluate(eval_input_fn)
    predictions = list(deep_fm.predict(eval_input_fn, predict_keys="prob"))
    served = est.load_exported(deep_fm.export_model(f"{deep_fm.model_dir}/export", test_x))(test_x)
    return deep_fm, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
