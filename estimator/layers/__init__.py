"""Layers, as in `tf.layers`: functions and objects that get their variables by TensorFlow's names, and cells."""

from typing import TYPE_CHECKING

from estimator.layers._cells import (
    BasicLSTMCell,
    DropoutWrapper,
    GRUCell,
    LSTMCell,
    LSTMState,
    MultiRNNCell,
    OutputProjectionWrapper,
    RNNCell,
)
from estimator.layers._convolution import conv1d, conv2d, conv2d_transpose, separable_conv2d
from estimator.layers._dense import dense
from estimator.layers._dropout import dropout
from estimator.layers._embed import embed
from estimator.layers._flatten import flatten
from estimator.layers._normalization import batch_normalization, layer_norm
from estimator.layers._objects import (
    AveragePooling1D,
    AveragePooling2D,
    BatchNormalization,
    Conv1D,
    Conv2D,
    Conv2DTranspose,
    Dense,
    Dropout,
    Flatten,
    Layer,
    MaxPooling1D,
    MaxPooling2D,
    SeparableConv2D,
)
from estimator.layers._pooling import (
    average_pooling1d,
    average_pooling2d,
    global_average_pooling1d,
    global_average_pooling2d,
    global_max_pooling1d,
    global_max_pooling2d,
    max_pooling1d,
    max_pooling2d,
)
from estimator.layers._recurrent import (
    bidirectional_gru,
    bidirectional_lstm,
    dynamic_rnn,
    gru,
    lstm,
    stack_bidirectional_rnn,
)
from estimator.porting._missing_names import names_missing_in as _names_missing_in

__all__ = [
    "AveragePooling1D",
    "AveragePooling2D",
    "BasicLSTMCell",
    "BatchNormalization",
    "Conv1D",
    "Conv2D",
    "Conv2DTranspose",
    "Dense",
    "Dropout",
    "DropoutWrapper",
    "Flatten",
    "GRUCell",
    "LSTMCell",
    "LSTMState",
    "Layer",
    "MaxPooling1D",
    "MaxPooling2D",
    "MultiRNNCell",
    "OutputProjectionWrapper",
    "RNNCell",
    "SeparableConv2D",
    "average_pooling1d",
    "average_pooling2d",
    "batch_normalization",
    "bidirectional_gru",
    "bidirectional_lstm",
    "conv1d",
    "conv2d",
    "conv2d_transpose",
    "dense",
    "dropout",
    "dynamic_rnn",
    "embed",
    "flatten",
    "global_average_pooling1d",
    "global_average_pooling2d",
    "global_max_pooling1d",
    "global_max_pooling2d",
    "gru",
    "layer_norm",
    "lstm",
    "max_pooling1d",
    "max_pooling2d",
    "separable_conv2d",
    "stack_bidirectional_rnn",
]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__, f"; it has {', '.join(__all__)}.")
