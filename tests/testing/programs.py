"""What a compiled program does, by the operations in its text."""

import collections
import re


def operations(program):
    """How often each operation stands in the text of an HLO program."""
    return collections.Counter(re.findall(r" = .*? ([a-z][a-z0-9-]*)\(", program))


def collectives(program):
    names = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
    return {name: count for name, count in operations(program).items() if name.startswith(names)}
