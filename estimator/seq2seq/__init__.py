"""Attention and decoders over a cell, as in `tf.contrib.seq2seq`, with its numbers and its names of variables."""

from typing import TYPE_CHECKING

from estimator.porting._missing_names import names_missing_in as _names_missing_in
from estimator.seq2seq._attention import AttentionWrapper, AttentionWrapperState, BahdanauAttention, LuongAttention
from estimator.seq2seq._beam_search import (
    BeamSearchDecoder,
    BeamSearchDecoderOutput,
    BeamSearchDecoderState,
    FinalBeamSearchDecoderOutput,
    tile_batch,
)
from estimator.seq2seq._decoder import (
    BasicDecoder,
    BasicDecoderOutput,
    GreedyEmbeddingHelper,
    TrainingHelper,
    dynamic_decode,
)

__all__ = [
    "AttentionWrapper",
    "AttentionWrapperState",
    "BahdanauAttention",
    "BasicDecoder",
    "BasicDecoderOutput",
    "BeamSearchDecoder",
    "BeamSearchDecoderOutput",
    "BeamSearchDecoderState",
    "FinalBeamSearchDecoderOutput",
    "GreedyEmbeddingHelper",
    "LuongAttention",
    "TrainingHelper",
    "dynamic_decode",
    "tile_batch",
]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__, f"; it has {', '.join(__all__)}.")
