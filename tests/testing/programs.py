"""What a compiled program does, by the operations in its text."""

import collections
import re

from replicate.explain import collectives as each_of


def operations(program):
    """How often each operation stands in the text of an HLO program."""
    return collections.Counter(re.findall(r" = .*? ([a-z][a-z0-9-]*)\(", program))


def collectives(program):
    """How often each collective stands in the text of an HLO program."""
    return dict(collections.Counter(each.kind for each in each_of(program)))
