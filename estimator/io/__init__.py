"""TFRecord files and `tf.Example`s, read and written without TensorFlow."""

from typing import TYPE_CHECKING

from estimator.porting._missing_names import names_loaded_later as _names_loaded_later

__all__ = [
    "BytesList",
    "Example",
    "Feature",
    "FeatureList",
    "FeatureLists",
    "Features",
    "FixedLenFeature",
    "FixedLenSequenceFeature",
    "FloatList",
    "Int64List",
    "SequenceExample",
    "SparseTensorValue",
    "TFRecordWriter",
    "VarLenFeature",
    "parse_example",
    "parse_single_example",
    "parse_single_sequence_example",
    "tf_record_iterator",
]

if TYPE_CHECKING:
    from estimator.io._features import FixedLenFeature, FixedLenSequenceFeature, SparseTensorValue, VarLenFeature
    from estimator.io._messages import (
        BytesList,
        Example,
        Feature,
        FeatureList,
        FeatureLists,
        Features,
        FloatList,
        Int64List,
        SequenceExample,
    )
    from estimator.io._parse import parse_example, parse_single_example, parse_single_sequence_example
    from estimator.io._records import TFRecordWriter, tf_record_iterator
else:
    __getattr__, __dir__ = _names_loaded_later(
        __name__,
        {
            "_features": "FixedLenFeature FixedLenSequenceFeature SparseTensorValue VarLenFeature",
            "_messages": "BytesList Example Feature FeatureList FeatureLists Features FloatList Int64List "
            "SequenceExample",
            "_parse": "parse_example parse_single_example parse_single_sequence_example",
            "_records": "TFRecordWriter tf_record_iterator",
        },
    )
