"""Reports values of a model_fn for TensorBoard, by functions named as in `tf.summary`."""

from estimator.summary._ops import histogram, image, scalar

__all__ = ["histogram", "image", "scalar"]
