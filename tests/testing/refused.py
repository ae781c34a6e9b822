"""What is refused: tables of errors with their messages, and contents of JSON files that nobody wrote."""

import json
import re

import pytest
from hypothesis import strategies as st

TEXTS = [b"", b"{", b"[]", b"{}", b"3", b"null", b"NaN", b"[" * 100_000, b"\xff\xfe\x00", b"1" * 5000]
NUMBERS = st.integers(-2, 2**70) | st.floats()
STRINGS = st.sampled_from(["int32", "a", "", "\0", "../../outside", "/etc/hostname", "ckpt-x", "ckpt--7", "x" * 300])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | STRINGS,
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(["file", "shape", "a", "__bytes__"]), values)
    ),
    max_leaves=4,
)


def paths(tree, path=()):
    """The paths of all values in JSON."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


def put(tree, path, value):
    *keys, last = path
    for key in keys:
        tree = tree[key]
    tree[last] = value


@st.composite
def changed(draw, contents):
    """JSON with one value replaced by any other; or something else altogether."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(TEXTS))
    tree = json.loads(contents)
    put(tree, draw(st.sampled_from(list(paths(tree)))), draw(VALUES))
    return json.dumps(tree).encode()


def raises(kind, message):
    """The error with these words, none of which is a regex."""
    return pytest.raises(kind, match=re.escape(message))


def rows(refused):
    """The rows of all kinds, each with its error in front, as `pytest.mark.parametrize` takes them."""
    return [(error, *row) for error, rows in refused.items() for row in rows]
