"""Port of xDeepFM: crosses of embeddings, compressed by convolutions, beside a deep network, to predict clicks.

    python examples/ports/xdeepfm.py --towers 4

The original is `XDeepFM` of qiaoguan/deep-ctr-prediction. As there, the data are TFRecord files, the loss is a sum, and
the predictions say whose they are; the towers come from a strategy. The clicks are made up: who sees what, and when.
"""

import argparse
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import estimator as est
from replicate import MirroredStrategy

PARAMS = {
    "embedding_size": 8,
    "hidden_units": [64, 32],
    "cross_layer_sizes": [16, 8],
    "learning_rate": 0.03,
    "use_xdeepfm": True,
    "batch_size": 256,
}
INTEGERS = ["label", "user_id", "creative_id", "terminal", "hour", "day_user_show"]
STRINGS = ["device_type"]


def build_model_columns(dimension):
    creative_id = est.feature_column.categorical_column_with_hash_bucket(
        "creative_id", hash_bucket_size=200, dtype=np.int64
    )
    terminal = est.feature_column.categorical_column_with_identity("terminal", num_buckets=10)
    hour = est.feature_column.categorical_column_with_identity("hour", num_buckets=25)
    day_user_show = est.feature_column.bucketized_column(
        est.feature_column.numeric_column("day_user_show", dtype=np.int32), boundaries=[1, 2, 4, 8, 16]
    )
    device_type = est.feature_column.categorical_column_with_hash_bucket("device_type", hash_bucket_size=500, dtype=str)
    return [
        est.feature_column.embedding_column(creative_id, dimension=dimension, combiner="sum"),
        est.feature_column.embedding_column(terminal, dimension=dimension, combiner="sum"),
        est.feature_column.embedding_column(hour, dimension=dimension, combiner="sum"),
        est.feature_column.embedding_column(day_user_show, dimension=dimension, combiner="sum"),
        est.feature_column.embedding_column(device_type, dimension=dimension, combiner="sum"),
    ]


def feature_input_fn(data_file, num_epochs, shuffle, batch_size, columns):
    features = {key: est.io.FixedLenFeature(shape=[1], dtype=np.int64) for key in INTEGERS}
    features.update({key: est.io.FixedLenFeature(shape=[1], dtype=str) for key in STRINGS})
    records = est.inputs.tfrecord_input_fn(
        data_file, features, batch_size, shuffle=shuffle, num_epochs=num_epochs, seed=0, columns=columns
    )
    for feature in records():
        yield feature, feature["label"].astype(np.float32)  # a prediction names the label too


def _build_deep_layers(net, params):
    for num_hidden_units in params["hidden_units"]:
        net = est.layers.dense(
            net,
            units=num_hidden_units,
            activation=jax.nn.relu,
            kernel_initializer=jax.nn.initializers.glorot_uniform(),
        )
    return net


def _check_fm_columns(feature_columns):
    column_num = len(feature_columns)
    if column_num < 2:
        raise ValueError("feature_columns must have as least two elements.")
    dimension = -1
    for column in feature_columns:
        if dimension != -1 and column.dimension != dimension:
            raise ValueError("fm_feature_columns must have the same dimension.")
        dimension = column.dimension
    return column_num, dimension


def _build_xdeepfm_layers(net, params):
    field_num, dim = _check_fm_columns(params["feature_columns"])
    nn_input = net.reshape(-1, field_num, dim)
    final_len = 0
    field_nums = []
    field_nums.append(int(field_num))
    hidden_nn_layers = []
    hidden_nn_layers.append(nn_input)
    final_result = []
    split_tensor0 = jnp.stack(jnp.split(hidden_nn_layers[0], dim, 2))
    for idx, layer_size in enumerate(params["cross_layer_sizes"]):
        split_tensor = jnp.stack(jnp.split(hidden_nn_layers[-1], dim, 2))  # (dim, batch_size, field_nums[-1], 1)
        dot_result_m = jnp.matmul(split_tensor0, split_tensor.swapaxes(-1, -2))
        dot_result_o = dot_result_m.reshape(dim, -1, field_nums[0] * field_nums[-1])
        dot_result = jnp.transpose(dot_result_o, [1, 0, 2])  # (batch_size, dim, field_nums[0] * field_nums[-1])
        filters = est.get_variable(
            name="f_" + str(idx), shape=[1, field_nums[-1] * field_nums[0], layer_size], dtype=jnp.float32
        )
        curr_out = est.nn.conv1d(dot_result, filters=filters, stride=1, padding="VALID")
        curr_out = jax.nn.relu(curr_out)
        curr_out = jnp.transpose(curr_out, [0, 2, 1])  # (batch_size, layer_size, dim)
        direct_connect = curr_out
        next_hidden = curr_out
        final_len += int(layer_size)
        field_nums.append(int(layer_size))
        final_result.append(direct_connect)
        hidden_nn_layers.append(next_hidden)
    result = jnp.concatenate(final_result, axis=1)  # (batch_size, final_len, dim)
    return result.sum(-1)


def xdeepfm_model_fn(features, labels, mode, params):
    net = est.feature_column.input_layer(features, params["feature_columns"])
    last_deep_layer = _build_deep_layers(net, params)
    last_xdeepfm_layer = _build_xdeepfm_layers(net, params)
    if params["use_xdeepfm"]:
        last_layer = jnp.concatenate([last_deep_layer, last_xdeepfm_layer], 1)
    else:
        last_layer = last_deep_layer
    head = est.BinaryClassHead(loss_reduction=est.Reduction.SUM)
    logits = est.layers.dense(
        last_layer, units=head.logits_dimension, kernel_initializer=jax.nn.initializers.glorot_uniform()
    )
    optimizer = est.train.AdagradOptimizer(learning_rate=params["learning_rate"])
    preds = jax.nn.sigmoid(logits)
    user_id = features["user_id"]
    label = features["label"]
    if mode == est.ModeKeys.PREDICT:
        predictions = {"probabilities": preds, "user_id": user_id, "label": label}
        export_outputs = {"regression": est.export.RegressionOutput(predictions["probabilities"])}
        return est.EstimatorSpec(mode, predictions=predictions, export_outputs=export_outputs)
    loss = jnp.sum(est.nn.sigmoid_cross_entropy_with_logits(logits=logits, labels=labels))
    train_op = optimizer.minimize(loss, global_step=est.global_step())
    if mode == est.ModeKeys.TRAIN:
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    return head.create_estimator_spec(
        features=features,
        mode=mode,
        labels=labels,
        logits=logits,
        train_op_fn=lambda loss: optimizer.minimize(loss, global_step=est.global_step()),
    )


def clicks(examples, seed):
    random = np.random.default_rng(seed)
    upper = {"user_id": 50, "creative_id": 100, "terminal": 5, "hour": 24, "day_user_show": 20}
    rows = {key: random.integers(0, high, examples) for key, high in upper.items()}
    phone = rows["user_id"] % 3
    likes = np.random.default_rng(0).normal(size=(100, 5))
    score = likes[rows["creative_id"], rows["terminal"]] + likes[rows["hour"], phone] - rows["day_user_show"] / 20
    names = np.array(["android", "iphone", "tablet"])
    return rows | {"device_type": names[phone], "label": (score > 0).astype(np.int64)}


def load_data():
    return clicks(20000, seed=1), clicks(1000, seed=2)


def write(path, rows):
    with est.io.TFRecordWriter(path) as writer:
        for i in range(len(rows["label"])):
            example = est.io.Example()
            for key in INTEGERS:
                example.features.feature[key].int64_list.value.append(int(rows[key][i]))
            for key in STRINGS:
                example.features.feature[key].bytes_list.value.append(rows[key][i].encode())
            writer.write(example.SerializeToString())
    return path


def main(towers=4, steps=600, model_dir=None, **params):
    params = PARAMS | params
    data_dir = tempfile.mkdtemp()
    train_rows, eval_rows = load_data()
    train_files, eval_files = (
        write(os.path.join(data_dir, "train"), train_rows),
        write(os.path.join(data_dir, "eval"), eval_rows),
    )
    columns = build_model_columns(params["embedding_size"])
    strategy = MirroredStrategy(num_gpus=towers, loss_reduction=est.Reduction.SUM)
    run_config = est.RunConfig(train_distribute=strategy, eval_distribute=strategy).replace(
        model_dir=model_dir, log_step_count_steps=100, save_summary_steps=None
    )
    model = est.Estimator(model_fn=xdeepfm_model_fn, params=params | {"feature_columns": columns}, config=run_config)
    model.train(lambda: feature_input_fn(train_files, None, True, params["batch_size"], columns), steps=steps)

    def eval_input_fn():
        return feature_input_fn(eval_files, 1, False, params["batch_size"], columns)

    eval_results = model.evaluate(eval_input_fn)
    predictions = list(model.predict(eval_input_fn))
    features = next(eval_input_fn())[0]
    served = est.load_exported(model.export_model(os.path.join(model.model_dir, "export"), features))(features)
    return model, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
