"""What heads refuse, and what they say then."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import estimator as est

LOGIT, LOGITS = np.zeros((4, 1), np.float32), np.zeros((4, 3), np.float32)
ONE = est.RegressionHead(name="one")


def make(cls, *args, **kwargs):
    return lambda: cls(*args, **kwargs)


CONSTRUCTED = {
    "threshold": (
        make(est.BinaryClassHead, thresholds=[0.5, 1.0]),
        ValueError,
        r"thresholds must be in \(0, 1\) range; got 1.0.",
    ),
    "no reduction": (
        make(est.BinaryClassHead, loss_reduction=est.Reduction.NONE),
        ValueError,
        "Invalid loss_reduction: 'none'. A head needs one number to train on",
    ),
    "unknown reduction": (make(est.RegressionHead, loss_reduction="mean"), ValueError, "Unknown loss reduction 'mean'"),
    "weight column": (
        make(est.BinaryClassHead, est.feature_column.numeric_column("w")),
        TypeError,
        "`BinaryClassHead` needs the name of a feature as weight_column; .*`weight_column=column.key`",
    ),
    "name": (make(est.RegressionHead, name=""), ValueError, "needs a non-empty string, or None, as name; got ''"),
    "vocabulary type": (
        make(est.BinaryClassHead, label_vocabulary="ab"),
        ValueError,
        "label_vocabulary should be a list or tuple. Given type: str",
    ),
    "vocabulary of numbers": (
        make(est.BinaryClassHead, label_vocabulary=[0, 1]),
        ValueError,
        r"label_vocabulary should hold the names of classes, strings; got \[0, 1\]",
    ),
    "vocabulary length": (
        make(est.MultiClassHead, 3, label_vocabulary=["a", "b"]),
        ValueError,
        r'"label_vocabulary" does not have "n_classes" items. len\(label_vocabulary\)=2, n_classes=3.',
    ),
    "two classes": (make(est.MultiClassHead, 2), ValueError, "n_classes must be > 2: 2. .*`est.BinaryClassHead`"),
    "one class": (
        make(est.MultiLabelHead, 1),
        ValueError,
        "n_classes must be > 1 for multi-label classification. Given: 1.",
    ),
    "class based metrics": (
        make(est.MultiLabelHead, 3, classes_for_class_based_metrics=[3]),
        ValueError,
        r"All classes_for_class_based_metrics must be in range \[0, n_classes\), or in label_vocabulary. Given: 3",
    ),
    "class name": (
        make(est.MultiLabelHead, 2, label_vocabulary=["a", "b"], classes_for_class_based_metrics=["c"]),
        ValueError,
        "Given: 'c', with n_classes=2",
    ),
    "label dimension": (make(est.RegressionHead, 0), ValueError, "Invalid label_dimension 0; it must be an int"),
    "link": (
        make(est.RegressionHead, inverse_link_fn=1.0),
        TypeError,
        "inverse_link_fn must be a function of logits, such as `jnp.exp`; got 1.0",
    ),
    "loss_fn": (make(est.RegressionHead, loss_fn="mse"), TypeError, "loss_fn must be a function .* got 'mse'"),
    "loss_fn without logits": (
        make(est.RegressionHead, loss_fn=lambda labels: labels),
        ValueError,
        r"loss_fn must contain argument: logits. Given arguments: \['labels'\].",
    ),
    "loss_fn with more": (
        make(est.RegressionHead, loss_fn=lambda labels, logits, scale: labels),
        ValueError,
        r"loss_fn has unexpected args: \['scale'\].",
    ),
    "no heads": (make(est.MultiHead, []), ValueError, r"Must specify heads. Given: \[\]."),
    "no head": (make(est.MultiHead, ["a"]), TypeError, r"`MultiHead` takes heads such as .* got 'a'"),
    "unnamed": (make(est.MultiHead, [est.RegressionHead()]), ValueError, "All given heads must have name specified"),
    "same names": (
        make(est.MultiHead, [ONE, ONE]),
        ValueError,
        r"All given heads must have different names. Given: \['one', 'one'\].",
    ),
    "head weights": (
        make(est.MultiHead, [ONE], [1.0, 2.0]),
        ValueError,
        r"heads and head_weights must have the same size. Given len\(heads\): 1. Given len\(head_weights\): 2.",
    ),
    "reductions": (
        make(est.MultiHead, [ONE, est.RegressionHead(name="two", loss_reduction="weighted_sum")]),
        ValueError,
        "The loss_reduction must be the same for different heads.",
    ),
}


@pytest.mark.covers("11 constructor errors")
@pytest.mark.parametrize("call, error, message", CONSTRUCTED.values(), ids=CONSTRUCTED)
def test_a_head_says_what_it_cannot_be_made_of(call, error, message):
    with pytest.raises(error, match=message):
        call()


BINARY, WEIGHTED, MANY = est.BinaryClassHead(), est.BinaryClassHead("w"), est.MultiClassHead(3)
BOTH = est.MultiHead([ONE, est.RegressionHead(2, name="two")])
ZEROS = np.zeros(4, np.int32)
LOSSES = {
    "no labels": ((BINARY, None, LOGIT), ValueError, "You must provide labels to `BinaryClassHead`. Given: None. "),
    "a dict": (
        (BINARY, {"a": ZEROS}, LOGIT),
        TypeError,
        r"takes one array of labels; got a dict of \['a'\]. .*MultiHead",
    ),
    "strings": (
        (BINARY, np.array(["a"] * 4), LOGIT),
        TypeError,
        r"got strings. Let input_fn .*`est.feature_column.encode_labels\(labels, label_vocabulary\)`",
    ),
    "dimension": (
        (MANY, np.zeros((4, 3), np.int32), LOGITS),
        ValueError,
        r"Mismatched label shape. Expected labels dimension=1. Received 3: `MultiClassHead` got labels of shape",
    ),
    "rows": ((BINARY, np.zeros((3, 1)), LOGIT), ValueError, r"labels of shape \(3, 1\) .* expected \(4, 1\)"),
    "floats": (
        (MANY, np.zeros(4, np.float32), LOGITS),
        TypeError,
        "Labels dtype should be integer. Instead got float32",
    ),
    "logits": (
        (MANY, ZEROS, LOGIT),
        ValueError,
        r"logits shape must be \[D0, D1, ... DN, logits_dimension\], which is 3 .* got \(4, 1\)",
    ),
    "flat logits": ((BINARY, ZEROS, LOGIT[:, 0]), ValueError, r"logits shape must be .* got \(4,\)"),
    "no features": ((WEIGHTED, ZEROS, LOGIT), ValueError, "weight_column 'w' .* is not in features, .* NoneType"),
    "no weights": ((WEIGHTED, ZEROS, LOGIT, {"x": ZEROS}), ValueError, r"weight_column 'w' .* which are \['x'\]"),
    "weights": (
        (WEIGHTED, ZEROS, LOGIT, {"w": np.ones((4, 2))}),
        ValueError,
        r"weights shape must be \(4,\) or \(4, 1\), for logits of shape \(4, 1\); features\['w'\] has shape \(4, 2\)",
    ),
    "penalty": (
        (BINARY, ZEROS, LOGIT, None, None, jnp.float32(1)),
        TypeError,
        "regularization_losses must be a list or tuple of scalars",
    ),
    "penalties": (
        (BINARY, ZEROS, LOGIT, None, None, [jnp.ones(2)]),
        ValueError,
        r"regularization_losses\[0\] must be a scalar; it has shape \(2,\)",
    ),
    "reduced loss_fn": (
        (est.RegressionHead(loss_fn=lambda labels, logits: jnp.mean(logits)), ZEROS, LOGIT),
        ValueError,
        r"loss_fn must return the losses before any reduction, shape \[D0, D1, ... DN, 1\]; .* \(4, 1\), .* shape \(\)",
    ),
    "labels of several": (
        (BOTH, ZEROS, LOGITS),
        ValueError,
        r"labels must be a dict by .*\['one', 'two'\]. Given: ndarray",
    ),
    "none of several": ((BOTH, None, LOGITS), ValueError, "labels must be a dict .* Given: None."),
    "labels of one": (
        (BOTH, {"one": ZEROS}, LOGITS),
        ValueError,
        r"labels has missing values for head\(s\): \['two'\]",
    ),
    "logits of one": ((BOTH, {}, {"one": LOGIT}), ValueError, r"logits has missing values for head\(s\): \['two'\]"),
    "logits of several": (
        (BOTH, {}, LOGIT),
        ValueError,
        r"Could not split logits of shape \(4, 1\) .* dimensions: \[1, 2\]. The last dimension .* should equal 3",
    ),
}


@pytest.mark.covers("11 Head")
@pytest.mark.parametrize("args, error, message", LOSSES.values(), ids=LOSSES)
def test_a_head_says_what_is_wrong_with_a_batch(args, error, message):
    head, *rest = args
    with pytest.raises(error, match=message):
        head.loss(*rest)


@pytest.mark.parametrize("head, logits", [(BINARY, LOGIT), (BOTH, LOGITS)])
def test_an_unknown_prediction_key_is_refused(head, logits):
    with pytest.raises(
        ValueError, match=r"Prediction key must be one of the head's, given: \['all_classes'\]. .* the label_vocabulary"
    ):
        head.predictions(logits, ["all_classes"])


OPTIMIZERS = {
    "none": ({}, ValueError, "train_op_fn and optimizer cannot both be None in TRAIN."),
    "both": (
        {"optimizer": est.Optimizer(optax.sgd(0.1)), "train_op_fn": lambda loss: None},
        ValueError,
        "train_op_fn and optimizer cannot both be set",
    ),
    "optax": (
        {"optimizer": optax.sgd(0.1)},
        TypeError,
        r"needs an `est.Optimizer` or a `TowerOptimizer` .* Write `optimizer=est.Optimizer\(optax.adam\(1e-3\)\)`",
    ),
    "one name": (
        {"optimizer": est.Optimizer(optax.sgd(0.1)), "trainable_variables": "w"},
        ValueError,
        "trainable_variables should be a list or a tuple of names of variables; got 'w'",
    ),
}


@pytest.mark.covers("11 Head")
@pytest.mark.parametrize("kwargs, error, message", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_head_needs_one_optimizer_in_train(kwargs, error, message):
    with pytest.raises(error, match=message):
        BINARY.create_estimator_spec({}, "train", LOGIT, ZEROS, **kwargs)
    assert BINARY.create_estimator_spec({}, "eval", LOGIT, ZEROS, **kwargs).train_op is None


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be one of .* got 'predict'"):
        BINARY.create_estimator_spec({}, "predict", LOGIT)
