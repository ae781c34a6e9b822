"""What heads refuse, and what they say then."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused

import estimator as est

LOGIT, LOGITS = np.zeros((4, 1), np.float32), np.zeros((4, 3), np.float32)
ONE = est.RegressionHead(name="one")


CONSTRUCTED = {
    ValueError: [
        (lambda: est.BinaryClassHead(thresholds=[0.5, 1.0]), r"thresholds must be in \(0, 1\) range; got 1.0."),
        (lambda: est.BinaryClassHead(loss_reduction=est.Reduction.NONE),
         "Invalid loss_reduction: 'none'. A head needs one number to train on"),
        (lambda: est.RegressionHead(loss_reduction="mean"), "Unknown loss reduction 'mean'"),
        (lambda: est.RegressionHead(name=""), "needs a non-empty string, or None, as name; got ''"),
        (lambda: est.BinaryClassHead(label_vocabulary="ab"),
         "label_vocabulary should be a list or tuple. Given type: str"),
        (lambda: est.BinaryClassHead(label_vocabulary=[0, 1]),
         r"label_vocabulary should hold the names of classes, strings; got \[0, 1\]"),
        (lambda: est.MultiClassHead(3, label_vocabulary=["a", "b"]),
         r'"label_vocabulary" does not have "n_classes" items. len\(label_vocabulary\)=2, n_classes=3.'),
        (lambda: est.MultiClassHead(2), "n_classes must be > 2: 2. .*`est.BinaryClassHead`"),
        (lambda: est.MultiLabelHead(1), "n_classes must be > 1 for multi-label classification. Given: 1."),
        (lambda: est.MultiLabelHead(3, classes_for_class_based_metrics=[3]),
         r"All classes_for_class_based_metrics must be in range \[0, n_classes\), or in label_vocabulary. Given: 3"),
        (lambda: est.MultiLabelHead(2, label_vocabulary=["a", "b"], classes_for_class_based_metrics=["c"]),
         "Given: 'c', with n_classes=2"),
        (lambda: est.RegressionHead(0), "Invalid label_dimension 0; it must be an int"),
        (lambda: est.RegressionHead(loss_fn=lambda labels: labels),
         r"loss_fn must contain argument: logits. Given arguments: \['labels'\]."),
        (lambda: est.RegressionHead(loss_fn=lambda labels, logits, scale: labels),
         r"loss_fn has unexpected args: \['scale'\]."),
        (lambda: est.MultiHead([]), r"Must specify heads. Given: \[\]."),
        (lambda: est.MultiHead([est.RegressionHead()]), "All given heads must have name specified"),
        (lambda: est.MultiHead([ONE, ONE]), r"All given heads must have different names. Given: \['one', 'one'\]."),
        (lambda: est.MultiHead([ONE], [1.0, 2.0]),
         r"heads and head_weights must have the same size. Given len\(heads\): 1. Given len\(head_weights\): 2."),
        (lambda: est.MultiHead([ONE, est.RegressionHead(name="two", loss_reduction="weighted_sum")]),
         "The loss_reduction must be the same for different heads."),
    ],
    TypeError: [
        (lambda: est.BinaryClassHead(est.feature_column.numeric_column("w")),
         "`BinaryClassHead` needs the name of a feature as weight_column; .*`weight_column=column.key`"),
        (lambda: est.RegressionHead(inverse_link_fn=1.0),
         "inverse_link_fn must be a function of logits, such as `jnp.exp`; got 1.0"),
        (lambda: est.MultiClassHead(3.0), "`MultiClassHead` needs an int as n_classes; got 3.0 of type float."),
        (lambda: est.MultiClassHead(np.ones(3)), r"needs an int as n_classes; got array\(\[1., 1., 1.\]\) of type nda"),
        (lambda: est.MultiLabelHead(True), "`MultiLabelHead` needs an int as n_classes; got True of type bool."),
        (lambda: est.RegressionHead(None), "`RegressionHead` needs an int as label_dimension; got None of type None"),
        (lambda: jax.jit(est.MultiClassHead)(3), r"`MultiClassHead` needs an int as n_classes; got .*JitTracer.*"),
        (lambda: est.RegressionHead(loss_fn="mse"), "loss_fn must be a function .* got 'mse'"),
        (lambda: est.MultiHead(["a"]), r"`MultiHead` takes heads such as .* got 'a'"),
    ],
}  # fmt: skip


@pytest.mark.covers("11 constructor errors")
@pytest.mark.parametrize("error, call, message", refused.rows(CONSTRUCTED))
def test_a_head_says_what_it_cannot_be_made_of(call, error, message):
    with pytest.raises(error, match=message):
        call()


BINARY, WEIGHTED, MANY = est.BinaryClassHead(), est.BinaryClassHead("w"), est.MultiClassHead(3)
BOTH = est.MultiHead([ONE, est.RegressionHead(2, name="two")])
ZEROS = np.zeros(4, np.int32)
LOSSES = {
    ValueError: [
        ((BINARY, None, LOGIT), "You must provide labels to `BinaryClassHead`. Given: None. "),
        ((MANY, np.zeros((4, 3), np.int32), LOGITS),
         r"Mismatched label shape. Expected labels dimension=1. Received 3: `MultiClassHead` got labels of shape"),
        ((BINARY, np.zeros((3, 1)), LOGIT), r"labels of shape \(3, 1\) .* expected \(4, 1\)"),
        ((MANY, ZEROS, LOGIT),
         r"logits shape must be \[D0, D1, ... DN, logits_dimension\], which is 3 .* got \(4, 1\)"),
        ((BINARY, ZEROS, LOGIT[:, 0]), r"logits shape must be .* got \(4,\)"),
        ((WEIGHTED, ZEROS, LOGIT), "weight_column 'w' .* is not in features, .* NoneType"),
        ((WEIGHTED, ZEROS, LOGIT, {"x": ZEROS}), r"weight_column 'w' .* which are \['x'\]"),
        ((WEIGHTED, ZEROS, LOGIT, {"w": np.ones((4, 2))}),
         r"weights shape must be \(4,\) or \(4, 1\), for logits of shape \(4, 1\); features\['w'\] has shape "
         r"\(4, 2\)"),
        ((BINARY, ZEROS, LOGIT, None, None, [jnp.ones(2)]),
         r"regularization_losses\[0\] must be a scalar; it has shape \(2,\)"),
        ((est.RegressionHead(loss_fn=lambda labels, logits: jnp.mean(logits)), ZEROS, LOGIT),
         r"loss_fn must return the losses before any reduction, shape \[D0, D1, ... DN, 1\]; .* \(4, 1\), "
         r".* shape \(\)"),
        ((BOTH, ZEROS, LOGITS), r"labels must be a dict by .*\['one', 'two'\]. Given: ndarray"),
        ((BOTH, None, LOGITS), "labels must be a dict .* Given: None."),
        ((BOTH, {"one": ZEROS}, LOGITS), r"labels has missing values for head\(s\): \['two'\]"),
        ((BOTH, {}, {"one": LOGIT}), r"logits has missing values for head\(s\): \['two'\]"),
        ((BOTH, {}, LOGIT),
         r"Could not split logits of shape \(4, 1\) .* dimensions: \[1, 2\]. The last dimension .* should equal 3"),
    ],
    TypeError: [
        ((BINARY, {"a": ZEROS}, LOGIT), r"takes one array of labels; got a dict of \['a'\]. .*MultiHead"),
        ((BINARY, np.array(["a"] * 4), LOGIT),
         r"got strings. Let input_fn .*`est.feature_column.encode_labels\(labels, label_vocabulary\)`"),
        ((MANY, np.zeros(4, np.float32), LOGITS), "Labels dtype should be integer. Instead got float32"),
        ((BINARY, ZEROS, LOGIT, None, None, jnp.float32(1)),
         "regularization_losses must be a list or tuple of scalars"),
    ],
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.covers("11 Head")
@pytest.mark.parametrize("error, args, message", refused.rows(LOSSES))
def test_a_head_says_what_is_wrong_with_a_batch(args, error, message):
    head, *rest = args
    with pytest.raises(error, match=message):
        head.loss(*rest)


@pytest.mark.parametrize("head, logits", [(BINARY, LOGIT), (BOTH, LOGITS)])
def test_an_unknown_prediction_key_is_refused(head, logits):
    message = r"Prediction key must be one of the head's, given: \['all_classes'\]. .* the label_vocabulary"
    with pytest.raises(ValueError, match=message):
        head.predictions(logits, ["all_classes"])


OPTIMIZERS = {
    ValueError: [
        ({}, "train_op_fn and optimizer cannot both be None in TRAIN."),
        ({"optimizer": est.Optimizer(optax.sgd(0.1)), "train_op_fn": lambda loss: None},
         "train_op_fn and optimizer cannot both be set"),
        ({"optimizer": est.Optimizer(optax.sgd(0.1)), "trainable_variables": "w"},
         "trainable_variables should be a list or a tuple of names of variables; got 'w'"),
    ],
    TypeError: [
        ({"optimizer": optax.sgd(0.1)},
         r"needs an `est.Optimizer` or a `TowerOptimizer` .* Write `optimizer=est.Optimizer\(optax.adam\(1e-3\)\)`")
    ],
}  # fmt: skip


@pytest.mark.covers("11 Head")
@pytest.mark.parametrize("error, kwargs, message", refused.rows(OPTIMIZERS))
def test_a_head_needs_one_optimizer_in_train(kwargs, error, message):
    with pytest.raises(error, match=message):
        BINARY.create_estimator_spec({}, "train", LOGIT, ZEROS, **kwargs)
    assert BINARY.create_estimator_spec({}, "eval", LOGIT, ZEROS, **kwargs).train_op is None


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be one of .* got 'predict'"):
        BINARY.create_estimator_spec({}, "predict", LOGIT)
