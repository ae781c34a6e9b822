"""Reads the collectives off the text of a compiled program."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
# XLA numbers the elements of long tuples by comments, as in /*index=5*/.
_COMMENT = re.compile(r"/\*.*?\*/")
# With the bound of a dimension whose size is only known when the program runs, as in f32[<=8].
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|(?:true|false)_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")
# In the backend_config, which is JSON: with escaped quotes where it is written as a string.
_TRIPS = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_LISTED_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=")
_MESH_GROUPS = re.compile(r"replica_groups=@?mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]*)\}")
_NAMES = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
      kind: XLA's name, such as "all-reduce".
      arrays: the dtype and shape of each array that a device has after it, as in `("float32", (3, 4))`.
      bytes: the larger of what a device has before it and after it.
      participants: how many devices work together.
      times: how often a step runs it; None if a loop decides while it runs.
      within: "loop", "branch" (it may not run at all), or "" where neither is around it.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    bytes: int
    participants: int
    times: int | None = 1
    within: str = ""

    @property
    def dtype(self) -> str:
        """The dtype, or dtypes, of the arrays."""
        return ", ".join(dict.fromkeys(dtype for dtype, _ in self.arrays))

    def seconds(self, bandwidth: float, latency: float) -> float:
        """The time of all its runs if each device sends to the next in a ring, the usual algorithm.

        A loop of unknown length counts once, a branch as taken.

        >>> total = Collective("all-reduce", (("float32", (250,)),), bytes=1000, participants=4)
        >>> total.seconds(bandwidth=1500.0, latency=0.5)  # 6 rounds of a quarter each
        4.0

        Args:
          bandwidth: of the way from a device to the next, in bytes per second.
          latency: of a message, in seconds.
        """
        n = self.participants
        if self.kind in ("collective-permute", "collective-broadcast"):
            rounds, sent = 1, float(self.bytes)
        else:
            # Once around the ring, with 1/n of the bytes in each message; an all-reduce goes around twice, to add and
            # to send the sums.
            rounds = (n - 1) * (2 if self.kind == "all-reduce" else 1)
            sent = rounds * self.bytes / n
        return (rounds * latency + sent / bandwidth) * (1 if self.times is None else self.times)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    opcode: str
    result: str
    line: str

    @property
    def attributes(self) -> str:
        # Without strings: metadata holds names and source lines of Python, which may look like attributes.
        return _QUOTED.sub('""', self.line)


def collectives(program: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program, in loops and branches too, in the order of its text.

    An asynchronous one, which XLA writes as a start and a done, comes once. One that stands in a computation called
    from several places comes once for each.

    Args:
      program: the HLO text, from `lowered.compile().as_text()`.

    Raises:
      ValueError: the text has no entry computation, or does not say in a known way which devices work together.
    """
    entry, computations = _computations(program)
    header = program.split("\n", 1)[0]
    counts = [re.search(rf"\b{name}=(\d+)", header) for name in ("num_partitions", "replica_count")]
    devices = math.prod(int(number[1]) for number in counts if number)
    return tuple(_walk(entry, computations, devices, 1, ""))


def _computations(program: str) -> tuple[str, dict[str, list[_Instruction]]]:
    computations: dict[str, list[_Instruction]] = collections.defaultdict(list)
    entry, name = None, ""
    for line in map(_without_comments, program.splitlines()):
        if begin := _COMPUTATION.match(line):
            name = begin[2]
            # The text has computations in any order; only those that ENTRY reaches are run.
            entry = name if begin[1] else entry
        elif match := _INSTRUCTION.match(line):
            text, end = match[1], _end_of_type(match[1])
            if opcode := _OPCODE.match(text, end):
                computations[name].append(_Instruction(opcode[1], text[:end], text[end:]))
    if entry is None:
        raise ValueError(
            "This text has no ENTRY computation, so it is not an HLO program. Give the text of "
            f"`jax.jit(f).lower(...).compile().as_text()`; got {program[:80]!r}."
        )
    return entry, computations


def _without_comments(line: str) -> str:
    return _COMMENT.sub("", line).rstrip() if "/*" in line else line


def _walk(
    name: str, computations: dict[str, list[_Instruction]], devices: int, times: int | None, within: str
) -> Iterator[Collective]:
    for instruction in computations.get(name, ()):
        # An asynchronous collective is two instructions; "-done" is not counted.
        kind = instruction.opcode.removesuffix("-start")
        # What a collective calls, such as the sum of two numbers in an all-reduce, has no collective in it.
        if kind in _KINDS:
            yield _collective(kind, instruction, devices, times, within)
            continue
        attributes = instruction.attributes
        called = _CALLED.findall(attributes)
        for role, listed in _CALLED_LISTS.findall(attributes):
            called += [(role, each.strip().lstrip("%")) for each in listed.split(",") if each.strip()]
        for role, other in called:
            runs, inside = times, within
            if role in ("body", "condition"):
                # Searched in the whole line: the count is in the quoted backend_config, which `attributes` leaves out.
                trips = _TRIPS.search(instruction.line)
                # A condition runs once more than its body.
                here = int(trips[1]) + (role == "condition") if trips else None
                runs = None if here is None or times is None else times * here
                inside = within or "loop"
            elif instruction.opcode == "conditional":
                inside = within or "branch"
            yield from _walk(other, computations, devices, runs, inside)


def _collective(kind: str, instruction: _Instruction, devices: int, times: int | None, within: str) -> Collective:
    result = instruction.result
    if instruction.opcode.endswith("-start"):  # what it returns may hold its arguments too, first
        parts = _elements(result)
        # An all-reduce-start returns only its results, in a tuple if there are several.
        if len(parts) > 1 and (kind != "all-reduce" or parts[0].startswith("(")):
            result = parts[1]
    arrays = tuple((dtype, _shape(dims)) for dtype, dims in _ARRAY.findall(result))
    participants = _participants(kind, instruction, devices)
    size = sum(math.ceil(math.prod(shape) * _bits(dtype) / 8) for dtype, shape in arrays)
    if kind == "reduce-scatter":
        # Its result is one part; a collective moves the bytes of the whole array.
        size *= participants
    typed = tuple((_name(dtype), shape) for dtype, shape in arrays)
    return Collective(kind, typed, size, participants, times, within)


def _participants(kind: str, instruction: _Instruction, devices: int) -> int:
    attributes = instruction.line
    # XLA writes the participants in four forms: pairs, groups as lists, groups as a shape, and axes of a mesh.
    if kind == "collective-permute" and (pairs := _PAIRS.search(attributes)):
        return len(set(re.findall(r"\d+", pairs[1])))
    if groups := _LISTED_GROUPS.search(attributes):
        return max(group.count(",") + 1 for group in re.findall(r"\{[\d, ]+\}", groups[1])) if groups[1] else devices
    if groups := _COUNTED_GROUPS.search(attributes):
        return int(groups[1].split(",")[-1])
    if groups := _MESH_GROUPS.search(attributes):
        sizes = dict(re.findall(r"['\"]?([\w.]+)['\"]?=(\d+)", groups[1]))
        axes = re.findall(r"['\"]([\w.]+)['\"](?::\(\d+\)(\d+))?", groups[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if "replica_groups=" not in attributes:
        return devices
    raise ValueError(f"Which devices work together in this {kind} cannot be read from: {attributes.strip()[:300]}")


def _end_of_type(text: str) -> int:
    """The end of the type at the beginning of an instruction."""
    if not text.startswith("("):
        return text.index(" ") if " " in text else len(text)
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i + 1
    return len(text)


def _elements(type_: str) -> list[str]:
    """The elements of a tuple type; none of an array."""
    if not type_.startswith("("):
        return []
    parts, depth = [""], 0
    for character in type_[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _shape(dims: str) -> tuple[int, ...]:
    return tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n)


def _bits(dtype: str) -> int:
    """The size of an element, the first number in the name of its type, as in f32 or f8e4m3."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else {"pred": 8}.get(dtype, 0)


def _name(dtype: str) -> str:
    if dtype == "pred":
        return "bool"
    match = re.fullmatch(r"([a-z]+)(\d+.*)", dtype)
    return _NAMES.get(match[1], match[1]) + match[2] if match else dtype
