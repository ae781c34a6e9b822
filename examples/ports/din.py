"""Port of the Deep Interest Network: how much a user's past weighs depends on the advertisement that is shown.

    python examples/ports/din.py --towers 4

The original is `deep_ctr/Model_pipeline/DIN.py` of lambdaji/tf_repos, with two fields of a user here. The clicks are
made up: a user clicks where the categories and shops of the past and of the advertisement have much in common.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

FIELDS = {"cat": (0, 30), "shop": (30, 60), "int": (90, 40)}  # where the ids of a field begin, and how many there are
PARAMS = {
    "feature_size": 130,
    "embedding_size": 8,
    "attention_pooling": True,
    "attention_layers": [16],
    "deep_layers": [32, 16],
    "dropout": [0.9, 0.9],  # what is kept
    "learning_rate": 5e-3,
    "l2_reg": 1e-4,
    "batch_size": 256,
}


def attention_unit(behaviours, ad, mask, params, scope):
    """The sum of the rows of the past, each weighted by a network that sees it beside the advertisement."""
    with est.variable_scope(scope):
        ad = jnp.broadcast_to(ad[:, None], behaviours.shape)
        x = jnp.concatenate([behaviours, ad, behaviours - ad, behaviours * ad], axis=-1)
        for i, units in enumerate(params["attention_layers"]):
            x = est.layers.dense(x, units, jax.nn.sigmoid, name=f"att_fc{i}")
        weights = est.layers.dense(x, 1, name="att_out")
        return (behaviours * weights * mask[..., None]).sum(1)


def user_emb(features, field, ad, shape, params):
    ids = features[f"u_{field}ids"]  # filled up by -1
    if not params["attention_pooling"]:
        return est.embedding_lookup_sparse("embeddings", ids, features[f"u_{field}vals"], shape, combiner="sum")
    behaviours = est.embedding_lookup("embeddings", ids, shape)
    return attention_unit(behaviours, ad, (ids >= 0).astype("float32"), params, f"attention_{field}")


def model_fn(features, labels, mode, params):
    shape = (params["feature_size"], params["embedding_size"])
    with est.variable_scope("Embedding-layer"):
        embs = [est.embedding_lookup_sparse("embeddings", features["a_intids"], shape=shape, combiner="sum")]
        for field in ("cat", "shop"):
            ad = est.embedding_lookup("embeddings", features[f"a_{field}id"])
            embs += [user_emb(features, field, ad, shape, params), ad]
        x_deep = jnp.concatenate(embs, axis=1)

    with est.variable_scope("MLP-layer", regularizer=est.regularizers.l2(params["l2_reg"])):
        for i, units in enumerate(params["deep_layers"]):
            x_deep = est.layers.dense(x_deep, units, jax.nn.relu, name=f"mlp{i}")
            x_deep = est.layers.dropout(x_deep, rate=1 - params["dropout"][i])

    with est.variable_scope("DIN-out"):
        y = est.layers.dense(x_deep, 1, name="din_out").reshape(-1)
        pred = jax.nn.sigmoid(y)

    predictions = {"prob": pred}
    export_outputs = {"serving_default": est.export.PredictOutput(predictions)}
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=predictions, export_outputs=export_outputs)
    loss = (
        est.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=y).mean() + est.losses.get_regularization_loss()
    )
    eval_metric_ops = {"auc": est.metrics.auc(labels, pred)}
    if mode == est.ModeKeys.EVAL:
        return est.EstimatorSpec(mode, predictions=predictions, loss=loss, eval_metric_ops=eval_metric_ops)
    optimizer = est.train.AdamOptimizer(params["learning_rate"], beta1=0.9, beta2=0.999, epsilon=1e-8)
    train_op = TowerOptimizer(optimizer).minimize(loss, global_step=est.global_step())
    return est.EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)


def clicks(examples, seed, length=6):
    taste = np.random.default_rng(0).normal(size=(PARAMS["feature_size"], 3))
    random = np.random.default_rng(seed)

    def ids_of(field, *shape):
        first, count = FIELDS[field]
        return first + random.integers(0, count, (examples, *shape)).astype(np.int32)

    features, score = {"a_intids": ids_of("int", 3)}, 0
    for field in ("cat", "shop"):
        past, ad = ids_of(field, length), ids_of(field)
        past[np.arange(length) >= random.integers(1, length + 1, (examples, 1))] = -1
        alike = (taste[past] * taste[ad][:, None]).sum(-1)
        score += np.where(past >= 0, alike, -9).max(1)
        features |= {f"u_{field}ids": past, f"u_{field}vals": np.float32(past >= 0), f"a_{field}id": ad}
    return features, np.float32(score > 3)


def load_data():
    return clicks(20000, seed=1), clicks(1000, seed=2)


def main(towers=4, steps=600, model_dir=None, **params):
    params = PARAMS | params
    (train_x, train_y), (test_x, test_y) = load_data()
    din = est.Estimator(replicate_model_fn(model_fn, devices=jax.devices()[:towers]), model_dir, params=params)
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, 100, shuffle=False)
    din.train(train_input_fn, steps=steps)
    eval_results = din.evaluate(eval_input_fn)
    predictions = list(din.predict(eval_input_fn, predict_keys="prob"))
    served = est.load_exported(din.export_model(f"{din.model_dir}/export", test_x))(test_x)
    return din, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
