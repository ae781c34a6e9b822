"""The three ways a model_fn is run."""

import enum


class ModeKeys(enum.StrEnum):
    """The modes in which a model_fn runs; equal to TensorFlow's strings, which work everywhere, too.

    >>> ModeKeys.PREDICT == "infer"
    True
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"

    @classmethod
    def _missing_(cls, value: object) -> "ModeKeys":
        known = ", ".join(repr(str(mode)) for mode in cls)
        raise ValueError(f"mode must be one of {known} (see est.ModeKeys); got {value!r}.")
