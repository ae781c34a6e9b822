"""`tf.train.Example` and the messages around it, without TensorFlow."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tensorflow"
# By message, its fields: number, name, type; "*" is a repeated one, "{}" a map from strings, "|" one of a choice.
_MESSAGES = {
    "BytesList": ["*bytes value"],
    "FloatList": ["*float value"],
    "Int64List": ["*int64 value"],
    "Feature": ["|BytesList bytes_list", "|FloatList float_list", "|Int64List int64_list"],
    "Features": ["{}Feature feature"],
    "Example": ["Features features"],
    "FeatureList": ["*Feature feature"],
    "FeatureLists": ["{}FeatureList feature_list"],
    "SequenceExample": ["Features context", "FeatureLists feature_lists"],
}
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"bytes": _FIELD.TYPE_BYTES, "float": _FIELD.TYPE_FLOAT, "int64": _FIELD.TYPE_INT64}


def _declare(messages: dict[str, list[str]]) -> dict[str, Any]:
    """The classes of the messages. They are in a pool of their own: TensorFlow, if it is imported too, has another."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for number, field in enumerate(fields, 1):
            kind, field_name = field.lstrip("*{}|").split()
            repeated = field[0] in "*{"
            added = message.field.add(name=field_name, number=number)
            added.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            if field[0] == "{":
                entry = message.nested_type.add(name=f"{field_name.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
                _set_type(entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), kind)
                _set_type(added, f"{name}.{entry.name}")
                continue
            _set_type(added, kind)
            if field[0] == "|":
                if not message.oneof_decl:
                    message.oneof_decl.add(name="kind")
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in messages
    }


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


# The same messages, with each `Feature` left as the bytes that it is written in: protobuf makes three Python objects
# for one that it reads.
_UNREAD = _declare({name: [each.replace("Feature ", "bytes ") for each in _MESSAGES[name]] for name in _MESSAGES})
UnreadExample, UnreadSequenceExample = _UNREAD["Example"], _UNREAD["SequenceExample"]

_CLASSES = _declare(_MESSAGES)
BytesList = _CLASSES["BytesList"]
"""Strings of a feature: `value`, a list of `bytes`."""

FloatList = _CLASSES["FloatList"]
"""Numbers of a feature: `value`, a list of float32."""

Int64List = _CLASSES["Int64List"]
"""Integers of a feature: `value`, a list of int64."""

Feature = _CLASSES["Feature"]
"""One of `bytes_list`, `float_list` and `int64_list`."""

Features = _CLASSES["Features"]
"""Features by key: `feature`, a map of `Feature`s."""

Example = _CLASSES["Example"]
"""An example of `features`; `tf.train.Example`, and so `SerializeToString()` and `FromString(data)`."""

FeatureList = _CLASSES["FeatureList"]
"""Steps of a sequence: `feature`, a list of `Feature`s."""

FeatureLists = _CLASSES["FeatureLists"]
"""Sequences by key: `feature_list`, a map of `FeatureList`s."""

SequenceExample = _CLASSES["SequenceExample"]
"""An example of `context`, `Features`, and `feature_lists`, `FeatureLists`; `tf.train.SequenceExample`."""
