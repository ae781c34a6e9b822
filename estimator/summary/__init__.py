"""What a model_fn shows in TensorBoard: `tf.summary`'s functions of the same names."""

from estimator.summary._ops import histogram, image, scalar

__all__ = ["histogram", "image", "scalar"]
