"""Port of SSD: boxes and classes of objects from the feature maps of a VGG, with hard negatives, and NMS in predict.

    python examples/ports/ssd.py --towers 4

The original is HiKapok/SSD.TensorFlow, which called `replicate_model_fn` itself: `train_ssd.py`, `net/ssd_net.py`, the
boxes of `eval_ssd.py`. The network is smaller, and so are the images, which are made up: blocks of three colours.
"""

import argparse
import os
import tempfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

PARAMS = {
    "width": 4,
    "num_classes": 4,
    "model_scope": "ssd300",
    "checkpoint_model_scope": "vgg_16",
    "checkpoint_exclude_scopes": ["ssd300/multibox_head", "ssd300/additional_layers", "ssd300/conv4_3_scale"],
    "negative_ratio": 3.0,
    "match_threshold": 0.5,
    "weight_decay": 5e-4,
    "momentum": 0.9,
    "learning_rate": 1e-3,
    "end_learning_rate": 1e-6,
    "decay_boundaries": [200, 250],
    "lr_decay_factors": [1, 0.1, 0.01],
    "select_threshold": 0.2,
    "min_size": 0.03,
    "keep_topk": 40,
    "nms_topk": 5,
    "nms_threshold": 0.45,
    "batch_size": 32,
}
IMAGE_SIZE = 32
LAYERS = [(8, 0.2, 0.27), (4, 0.375, 0.45), (2, 0.55, 0.65)]  # cells, and two sizes of boxes
RATIOS = (1.0, 2.0, 0.5)
PRIOR_SCALING = [0.1, 0.1, 0.2, 0.2]


def get_all_anchors():
    """The centers and the sizes of the boxes that each cell of each layer starts from, shaped (4, anchors)."""
    anchors = []
    for cells, scale, extra_scale in LAYERS:
        sizes = [(extra_scale, extra_scale), *((scale / ratio**0.5, scale * ratio**0.5) for ratio in RATIOS)]
        centers = (np.arange(cells) + 0.5) / cells
        anchors += [(y, x, *size) for y in centers for x in centers for size in sizes]
    return np.float32(anchors).T


ANCHORS = get_all_anchors()


def point2center(boxes):
    ymin, xmin, ymax, xmax = np.moveaxis(boxes, -1, 0)
    return (ymin + ymax) / 2, (xmin + xmax) / 2, ymax - ymin, xmax - xmin


def iou_matrix(boxes, others):
    """The overlap of each of the boxes with each of the others, which are (ymin, xmin, ymax, xmax)."""
    low = jnp.maximum(boxes[:, None, :2], others[None, :, :2])
    high = jnp.minimum(boxes[:, None, 2:], others[None, :, 2:])
    both = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
    one, other = (jnp.prod(each[:, 2:] - each[:, :2], axis=-1) for each in (boxes, others))
    return both / jnp.maximum(one[:, None] + other[None] - both, 1e-9)


def encode_all_anchors(labels, bboxes, match_threshold):
    """What the anchors of an image are to predict: places relative to theirs, classes, and how well they match."""
    anchor_cy, anchor_cx, anchor_h, anchor_w = ANCHORS
    overlap = np.array(iou_matrix(bboxes, decode_all_anchors(np.zeros((ANCHORS.shape[1], 4), np.float32))))
    overlap[np.arange(len(bboxes)), overlap.argmax(1)] = 1.0  # each object has an anchor
    matched, scores = overlap.argmax(0), overlap.max(0)
    gt_cy, gt_cx, gt_h, gt_w = point2center(bboxes[matched])
    gt_cy, gt_cx = (gt_cy - anchor_cy) / anchor_h, (gt_cx - anchor_cx) / anchor_w
    targets = np.stack([gt_cy, gt_cx, np.log(gt_h / anchor_h), np.log(gt_w / anchor_w)], axis=-1) / PRIOR_SCALING
    positive = scores >= match_threshold
    return np.float32(targets * positive[:, None]), np.int32(labels[matched] * positive), scores


def decode_all_anchors(pred_location):
    anchor_cy, anchor_cx, anchor_h, anchor_w = ANCHORS
    pred_h = jnp.exp(pred_location[:, -2] * PRIOR_SCALING[2]) * anchor_h
    pred_w = jnp.exp(pred_location[:, -1] * PRIOR_SCALING[3]) * anchor_w
    pred_cy = pred_location[:, 0] * PRIOR_SCALING[0] * anchor_h + anchor_cy
    pred_cx = pred_location[:, 1] * PRIOR_SCALING[1] * anchor_w + anchor_cx
    return jnp.stack([pred_cy - pred_h / 2, pred_cx - pred_w / 2, pred_cy + pred_h / 2, pred_cx + pred_w / 2], axis=-1)


global_anchor_info = {"decode_fn": decode_all_anchors, "all_num_anchors_depth": [1 + len(RATIOS)] * len(LAYERS)}


class VGG16Backbone:
    def __init__(self, width):
        self._conv_initializer = jax.nn.initializers.glorot_uniform
        # VGG layers
        self._conv1_block = self.conv_block(2, width, 3, (1, 1), "conv1")
        self._pool1 = est.layers.MaxPooling2D(pool_size=2, strides=2, padding="same", name="pool1")
        self._conv2_block = self.conv_block(2, 2 * width, 3, (1, 1), "conv2")
        self._pool2 = est.layers.MaxPooling2D(pool_size=2, strides=2, padding="same", name="pool2")
        self._conv4_block = self.conv_block(3, 8 * width, 3, (1, 1), "conv4")
        self._pool4 = est.layers.MaxPooling2D(pool_size=2, strides=2, padding="same", name="pool4")
        self._conv6 = est.layers.Conv2D(
            filters=16 * width,
            kernel_size=3,
            strides=1,
            padding="same",
            dilation_rate=6,
            activation=jax.nn.relu,
            kernel_initializer=self._conv_initializer(),
            name="fc6",
        )
        self._conv7 = est.layers.Conv2D(
            filters=16 * width,
            kernel_size=1,
            strides=1,
            padding="same",
            activation=jax.nn.relu,
            kernel_initializer=self._conv_initializer(),
            name="fc7",
        )
        # SSD layers
        self._conv8_block = self.ssd_conv_block(4 * width, 2, "conv8")

    def l2_normalize(self, x, name):
        with jax.named_scope(name):
            axis = -1
            square_sum = jnp.sum(jnp.square(x), axis, keepdims=True)
            x_inv_norm = jax.lax.rsqrt(jnp.maximum(square_sum, 1e-10))
            return jnp.multiply(x, x_inv_norm)

    def forward(self, inputs):
        feature_layers = []
        # forward vgg layers
        for conv in self._conv1_block:
            inputs = conv(inputs)
        inputs = self._pool1(inputs)
        for conv in self._conv2_block:
            inputs = conv(inputs)
        inputs = self._pool2(inputs)
        for conv in self._conv4_block:
            inputs = conv(inputs)
        # conv4_3
        with est.variable_scope("conv4_3_scale"):
            weight_scale = est.get_variable("weights", initializer=np.full(inputs.shape[-1], 20.0, np.float32))
            weight_scale = weight_scale.reshape(1, 1, 1, -1)
            feature_layers.append(jnp.multiply(weight_scale, self.l2_normalize(inputs, name="norm")))
        inputs = self._pool4(inputs)
        # forward fc layers
        inputs = self._conv6(inputs)
        inputs = self._conv7(inputs)
        # fc7
        feature_layers.append(inputs)
        # forward ssd layers
        for layer in self._conv8_block:
            inputs = layer(inputs)
        # conv8
        feature_layers.append(inputs)
        return feature_layers

    def conv_block(self, num_blocks, filters, kernel_size, strides, name):
        conv_blocks = []
        for ind in range(1, num_blocks + 1):
            conv_blocks.append(
                est.layers.Conv2D(
                    filters=filters,
                    kernel_size=kernel_size,
                    strides=strides,
                    padding="same",
                    activation=jax.nn.relu,
                    kernel_initializer=self._conv_initializer(),
                    name=f"{name}/{name}_{ind}",
                )
            )
        return conv_blocks

    def ssd_conv_block(self, filters, strides, name, padding="same"):
        conv_blocks = []
        conv_blocks.append(
            est.layers.Conv2D(
                filters=filters,
                kernel_size=1,
                strides=1,
                padding=padding,
                activation=jax.nn.relu,
                kernel_initializer=self._conv_initializer(),
                name=f"additional_layers/{name}/{name}_1",
            )
        )
        conv_blocks.append(
            est.layers.Conv2D(
                filters=filters * 2,
                kernel_size=3,
                strides=strides,
                padding=padding,
                activation=jax.nn.relu,
                kernel_initializer=self._conv_initializer(),
                name=f"additional_layers/{name}/{name}_2",
            )
        )
        return conv_blocks


def multibox_head(feature_layers, num_classes, num_anchors_depth_per_layer):
    with est.variable_scope("multibox_head"):
        cls_preds = []
        loc_preds = []
        for ind, feat in enumerate(feature_layers):
            loc_preds.append(
                est.layers.conv2d(feat, num_anchors_depth_per_layer[ind] * 4, (3, 3), name=f"loc_{ind}", padding="same")
            )
            cls_preds.append(
                est.layers.conv2d(
                    feat, num_anchors_depth_per_layer[ind] * num_classes, (3, 3), name=f"cls_{ind}", padding="same"
                )
            )
        return loc_preds, cls_preds


def modified_smooth_l1(bbox_pred, bbox_targets, bbox_inside_weights=1.0, bbox_outside_weights=1.0, sigma=1.0):
    with jax.named_scope("smooth_l1"):
        sigma2 = sigma * sigma
        inside_mul = jnp.multiply(bbox_inside_weights, jnp.subtract(bbox_pred, bbox_targets))
        smooth_l1_sign = jnp.less(jnp.abs(inside_mul), 1.0 / sigma2).astype(jnp.float32)
        smooth_l1_option1 = jnp.multiply(jnp.multiply(inside_mul, inside_mul), 0.5 * sigma2)
        smooth_l1_option2 = jnp.subtract(jnp.abs(inside_mul), 0.5 / sigma2)
        smooth_l1_result = jnp.add(
            jnp.multiply(smooth_l1_option1, smooth_l1_sign),
            jnp.multiply(smooth_l1_option2, jnp.abs(jnp.subtract(smooth_l1_sign, 1.0))),
        )
        outside_mul = jnp.multiply(bbox_outside_weights, smooth_l1_result)
        return outside_mul


def nms_bboxes(scores_pred, bboxes_pred, nms_topk, nms_threshold):
    """The boxes that overlap no better one, the best first, filled up with zeros."""
    overlap = iou_matrix(bboxes_pred, bboxes_pred) > nms_threshold
    better = jnp.tri(len(scores_pred), k=-1, dtype=bool)  # boxes are sorted

    def keep_if_free(keep, i):
        keep = keep.at[i].set((scores_pred[i] > 0) & ~jnp.any(keep & overlap[i] & better[i]))
        return keep, None

    keep, _ = jax.lax.scan(keep_if_free, jnp.zeros(len(scores_pred), bool), jnp.arange(len(scores_pred)))
    scores, idxes = est.nn.top_k(jnp.where(keep, scores_pred, 0.0), k=nms_topk)
    return scores, bboxes_pred[idxes] * (scores > 0)[:, None]


def parse_by_class(cls_pred, bboxes_pred, params):
    """The boxes of each class in one image: scores (nms_topk,) and corners (nms_topk, 4), zeros where there is none."""
    scores_pred = jax.nn.softmax(cls_pred)
    selected_bboxes, selected_scores = {}, {}
    for class_ind in range(1, params["num_classes"]):
        bboxes = jnp.clip(bboxes_pred, 0.0, 1.0)
        is_large = ((bboxes[:, 2:] - bboxes[:, :2]) > params["min_size"]).all(-1)
        scores = scores_pred[:, class_ind]
        scores = jnp.where(is_large & (scores > params["select_threshold"]), scores, 0.0)
        scores, idxes = est.nn.top_k(scores, k=params["keep_topk"])
        selected_scores[class_ind], selected_bboxes[class_ind] = nms_bboxes(
            scores, bboxes[idxes], params["nms_topk"], params["nms_threshold"]
        )
    return selected_bboxes, selected_scores


def ssd_model_fn(features, labels, mode, params):
    decode_fn = global_anchor_info["decode_fn"]
    all_num_anchors_depth = global_anchor_info["all_num_anchors_depth"]

    with est.variable_scope(params["model_scope"], default_name=None, values=[features], reuse=est.AUTO_REUSE):
        backbone = VGG16Backbone(params["width"])
        feature_layers = backbone.forward(features)
        location_pred, cls_pred = multibox_head(feature_layers, params["num_classes"], all_num_anchors_depth)
        cls_pred = [pred.reshape(features.shape[0], -1, params["num_classes"]) for pred in cls_pred]
        location_pred = [pred.reshape(features.shape[0], -1, 4) for pred in location_pred]
        cls_pred = jnp.concatenate(cls_pred, axis=1)
        location_pred = jnp.concatenate(location_pred, axis=1)
        cls_pred = jnp.reshape(cls_pred, (-1, params["num_classes"]))
        location_pred = jnp.reshape(location_pred, (-1, 4))

    bboxes_pred = jax.vmap(decode_fn)(jnp.reshape(location_pred, (features.shape[0], -1, 4)))
    if mode == est.ModeKeys.PREDICT:
        cls_pred = jnp.reshape(cls_pred, (features.shape[0], -1, params["num_classes"]))
        selected_bboxes, selected_scores = jax.vmap(partial(parse_by_class, params=params))(cls_pred, bboxes_pred)
        predictions = {}
        for class_ind in range(1, params["num_classes"]):
            predictions[f"scores_{class_ind}"] = selected_scores[class_ind]
            predictions[f"bboxes_{class_ind}"] = selected_bboxes[class_ind]
        return est.EstimatorSpec(mode=mode, predictions=predictions)

    loc_targets = labels["loc_targets"]
    cls_targets = labels["cls_targets"]
    with jax.named_scope("post_forward"):
        flaten_cls_targets = jnp.reshape(cls_targets, (-1))
        flaten_loc_targets = jnp.reshape(loc_targets, (-1, 4))

        # each positive examples has one label
        positive_mask = flaten_cls_targets > 0
        batch_n_positives = jnp.count_nonzero(cls_targets, -1)
        batch_negtive_mask = jnp.equal(cls_targets, 0)
        batch_n_negtives = jnp.count_nonzero(batch_negtive_mask, -1)
        batch_n_neg_select = (params["negative_ratio"] * batch_n_positives.astype(jnp.float32)).astype(jnp.int32)
        batch_n_neg_select = jnp.minimum(batch_n_neg_select, batch_n_negtives.astype(jnp.int32))

        # hard negative mining for classification
        predictions_for_bg = jax.nn.softmax(jnp.reshape(cls_pred, (features.shape[0], -1, params["num_classes"])))[
            :, :, 0
        ]
        prob_for_negtives = jnp.where(
            batch_negtive_mask,
            0.0 - predictions_for_bg,
            # ignore all the positives
            0.0 - jnp.ones_like(predictions_for_bg),
        )
        topk_prob_for_bg, _ = est.nn.top_k(prob_for_negtives, k=jnp.shape(prob_for_negtives)[1])
        score_at_k = jnp.take_along_axis(topk_prob_for_bg, batch_n_neg_select[:, None] - 1, axis=-1)[:, 0]
        selected_neg_mask = prob_for_negtives >= jnp.expand_dims(score_at_k, axis=-1)

        # include both selected negtive and all positive examples: as weights, so that nothing changes its shape
        final_mask = jax.lax.stop_gradient(
            jnp.logical_or(jnp.reshape(jnp.logical_and(batch_negtive_mask, selected_neg_mask), (-1)), positive_mask)
        )
        flaten_cls_targets = jnp.clip(flaten_cls_targets, 0, params["num_classes"])
        predictions = {
            "classes": jnp.reshape(jnp.argmax(cls_pred, axis=-1), (features.shape[0], -1)),
            "probabilities": jnp.reshape(jnp.max(jax.nn.softmax(cls_pred), axis=-1), (features.shape[0], -1)),
            "loc_predict": bboxes_pred,
        }
        cls_accuracy = est.metrics.accuracy(flaten_cls_targets, predictions["classes"].reshape(-1), final_mask)
        metrics = {"cls_accuracy": cls_accuracy}
        # Create a tensor named train_accuracy for logging purposes.
        est.record("cls_accuracy", cls_accuracy[1])
        est.summary.scalar("cls_accuracy", cls_accuracy[1])

    # Calculate loss, which includes softmax cross entropy and L2 regularization.
    cross_entropy = est.losses.sparse_softmax_cross_entropy(flaten_cls_targets, cls_pred, final_mask) * (
        params["negative_ratio"] + 1.0
    )
    est.record("cross_entropy_loss", cross_entropy)
    est.summary.scalar("cross_entropy_loss", cross_entropy)

    loc_loss = modified_smooth_l1(location_pred, flaten_loc_targets, sigma=1.0)
    loc_loss = est.losses.compute_weighted_loss(jnp.sum(loc_loss, axis=-1), positive_mask)
    est.record("location_loss", loc_loss)
    est.summary.scalar("location_loss", loc_loss)

    l2_loss_vars = []
    for name, trainable_var in est.trainable_variables().items():
        if "_bn" not in name:
            if "conv4_3_scale" not in name:
                l2_loss_vars.append(est.nn.l2_loss(trainable_var))
            else:
                l2_loss_vars.append(est.nn.l2_loss(trainable_var) * 0.1)
    total_loss = jnp.add(cross_entropy + loc_loss, jnp.multiply(params["weight_decay"], sum(l2_loss_vars)))
    est.record("total_loss", total_loss)

    if mode == est.ModeKeys.TRAIN:
        global_step = est.global_step()
        lr_values = [params["learning_rate"] * decay for decay in params["lr_decay_factors"]]
        learning_rate = est.train.piecewise_constant(global_step, params["decay_boundaries"], lr_values)
        truncated_learning_rate = jnp.maximum(learning_rate, params["end_learning_rate"])
        est.record("learning_rate", truncated_learning_rate)
        est.summary.scalar("learning_rate", truncated_learning_rate)
        optimizer = est.train.MomentumOptimizer(learning_rate=truncated_learning_rate, momentum=params["momentum"])
        optimizer = TowerOptimizer(optimizer)
        train_op = optimizer.minimize(total_loss, global_step)
        if params["checkpoint_path"]:
            est.init_from_checkpoint(params["checkpoint_path"], get_assignment_map(params))
    else:
        train_op = None

    return est.EstimatorSpec(
        mode=mode, predictions=predictions, loss=total_loss, train_op=train_op, eval_metric_ops=metrics
    )


def get_assignment_map(params):
    """The names of the variables of VGG in its own checkpoint."""
    names = [
        name for name in est.trainable_variables() if not name.startswith(tuple(params["checkpoint_exclude_scopes"]))
    ]
    renamed = {name: name.replace(params["model_scope"], params["checkpoint_model_scope"], 1) for name in names}
    return {old.replace("/kernel", "/weights").replace("/bias", "/biases"): name for name, old in renamed.items()}


def pretrained_vgg(path, width):
    """Writes a checkpoint of VGG with the names of its variables in Slim, and made-up values."""
    layers = [("conv1/conv1_1", 3, 1), ("conv1/conv1_2", 3, 1), ("conv2/conv2_1", 3, 2), ("conv2/conv2_2", 3, 2)]
    layers += [*((f"conv4/conv4_{ind}", 3, 8) for ind in (1, 2, 3)), ("fc6", 3, 16), ("fc7", 1, 16)]
    random, channels, values = np.random.default_rng(0), 3, {}
    for name, size, filters in layers:
        shape = (size, size, channels, filters * width)
        channels = filters * width
        values[f"vgg_16/{name}/weights"] = np.float32(random.normal(size=shape) * (2 / np.prod(shape[:3])) ** 0.5)
        values[f"vgg_16/{name}/biases"] = np.zeros(channels, np.float32)
    np.savez(path, **values)
    return path


def detection_data(examples, seed):
    """Images with one or two blocks, whose colour is their class."""
    random = np.random.default_rng(seed)
    images = np.float32(0.2 * random.random((examples, IMAGE_SIZE, IMAGE_SIZE, 3)))
    targets = []
    for image in images:
        labels, bboxes = random.integers(1, 4, random.integers(1, 3)), []
        for label in labels:
            (top, left), (height, width) = random.integers(0, 18, 2), random.integers(6, 15, 2)
            image[top : top + height, left : left + width, label - 1] += 0.8
            bboxes.append([top, left, top + height, left + width])
        targets.append(encode_all_anchors(labels, np.float32(bboxes) / IMAGE_SIZE, PARAMS["match_threshold"]))
    loc_targets, cls_targets, match_scores = map(np.stack, zip(*targets, strict=True))
    return images, {"loc_targets": loc_targets, "cls_targets": cls_targets, "match_scores": match_scores}


def load_data():
    return detection_data(512, seed=1), detection_data(128, seed=2)


def main(towers=4, steps=300, model_dir=None, **params):
    params = PARAMS | {"checkpoint_path": None} | params
    params["checkpoint_path"] = pretrained_vgg(os.path.join(tempfile.mkdtemp(), "vgg_16.npz"), params["width"])
    (train_x, train_y), (test_x, test_y) = load_data()
    run_config = (
        est.RunConfig()
        .replace(save_checkpoints_secs=7200)
        .replace(save_checkpoints_steps=None)
        .replace(save_summary_steps=500)
        .replace(keep_checkpoint_max=5)
        .replace(log_step_count_steps=100)
    )
    replicate_ssd_model_fn = replicate_model_fn(
        ssd_model_fn, loss_reduction=est.Reduction.MEAN, devices=jax.devices()[:towers]
    )
    ssd_detector = est.Estimator(model_fn=replicate_ssd_model_fn, model_dir=model_dir, config=run_config, params=params)
    tensors_to_log = {
        "lr": "learning_rate",
        "ce": "cross_entropy_loss",
        "loc": "location_loss",
        "loss": "total_loss",
        "acc": "cls_accuracy",
    }
    logging_hook = est.LoggingTensorHook(
        tensors=tensors_to_log,
        every_n_iter=100,
        formatter=lambda dicts: ", ".join([f"{k}={v:.6f}" for k, v in dicts.items()]),
    )
    train_input_fn = est.inputs.numpy_input_fn(train_x, train_y, params["batch_size"], None, shuffle=True, seed=0)
    eval_input_fn = est.inputs.numpy_input_fn(test_x, test_y, params["batch_size"], shuffle=False)
    ssd_detector.train(train_input_fn, hooks=[logging_hook], max_steps=steps)
    eval_results = ssd_detector.evaluate(eval_input_fn)
    predictions = list(ssd_detector.predict(eval_input_fn))
    served = est.load_exported(ssd_detector.export_model(f"{ssd_detector.model_dir}/export", test_x))(test_x)
    return ssd_detector, eval_results, predictions, served


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.towers)
    print(main(**vars(args))[1])
