"""The cost of a sum over many towers: sequential messages, bytes sent, and time.

A small model of the network. Hosts of several towers are linked: each tower to the others of its host, and each host to
the other hosts by a link that its towers share. A message takes its link's latency, and the time of its bytes;
the messages of a round are sent at once, and the next round waits for them.

    ring                         each tower sends a piece to the next one, around all of them and around again
    tree                         pairs are added up, then pairs of pairs; the sum goes back the same way
    recursive_halving_doubling   pairs halve what they add up between them, the farthest towers first
    hierarchical                 a ring within each host, until each tower has the sum of a piece; rings of the towers
                                 with the same piece across hosts; and round the host again
"""

import math
from typing import NamedTuple


class Link(NamedTuple):
    latency: float  # seconds per message
    bandwidth: float  # bytes per second, in each direction


class Network(NamedTuple):
    towers_per_host: int
    inside: Link  # of a tower, to the others of its host; no slower than `across`
    across: Link  # of a host, to the others


class Traffic(NamedTuple):
    """The messages of one sum."""

    rounds_inside: int  # in which messages stay within hosts
    bytes_inside: float  # that go over the link of a tower in them
    rounds_across: int  # in which some go to other hosts
    bytes_across: float  # that go over the link of a host in them

    @property
    def rounds(self) -> int:
        return self.rounds_inside + self.rounds_across

    def seconds(self, network: Network) -> float:
        return (
            self.rounds_inside * network.inside.latency
            + self.bytes_inside / network.inside.bandwidth
            + self.rounds_across * network.across.latency
            + self.bytes_across / network.across.bandwidth
        )


def traffic(algorithm: str, hosts: int, towers_per_host: int, size: float) -> Traffic:
    """The traffic of a sum of `size` bytes over all towers of all hosts.

    >>> traffic("ring", hosts=2, towers_per_host=1, size=100)
    Traffic(rounds_inside=0, bytes_inside=0, rounds_across=2, bytes_across=100.0)
    >>> traffic("hierarchical", hosts=2, towers_per_host=4, size=100)
    Traffic(rounds_inside=6, bytes_inside=150.0, rounds_across=2, bytes_across=100.0)

    Args:
      algorithm: one of `ALGORITHMS`.
      hosts: how many there are; for a tree, and halving and doubling, a power of two, and so are their towers.
      towers_per_host: how many towers each has.
      size: of what each tower has, in bytes.
    """
    return ALGORITHMS[algorithm](hosts, towers_per_host, size)


def _ring(hosts: int, towers: int, size: float) -> Traffic:
    # Of each host one tower sends to the next host; what the others send meanwhile takes no longer.
    rounds, sent = _around(hosts * towers, size)
    return Traffic(0, 0, rounds, sent) if hosts > 1 else Traffic(rounds, sent, 0, 0)


def _tree(hosts: int, towers: int, size: float) -> Traffic:
    inside, across = 2 * _levels(towers), 2 * _levels(hosts)
    return Traffic(inside, inside * size, across, across * size)


def _halving_doubling(hosts: int, towers: int, size: float) -> Traffic:
    # All towers of a host send to other hosts as long as what they have is large.
    across = towers * _around(hosts, size)[1]
    return Traffic(2 * _levels(towers), _around(towers, size / hosts)[1], 2 * _levels(hosts), across)


def _hierarchical(hosts: int, towers: int, size: float) -> Traffic:
    return Traffic(*_around(towers, size), *_around(hosts, size))


def _around(n: int, size: float) -> tuple[int, float]:
    """Rounds, and bytes that each of n sends, for the sum of each piece to come together and to go to all."""
    return 2 * (n - 1), 2 * (n - 1) / n * size


def _levels(n: int) -> int:
    if n & (n - 1):
        raise ValueError(f"hosts and towers_per_host must be powers of two for this algorithm; got {n}.")
    return int(math.log2(n))


ALGORITHMS = {
    "ring": _ring,
    "hierarchical": _hierarchical,
    "recursive_halving_doubling": _halving_doubling,
    "tree": _tree,
}
