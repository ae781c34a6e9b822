"""The model of the network in benchmarks/, against towers that send each other messages, round by round."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from network_model import ALGORITHMS, Link, Network, traffic  # noqa: E402

# Hosts and towers per host.
SIZES = [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2), (4, 4), (8, 1)]


class Towers:
    """Towers that have a vector each, and send parts of it."""

    def __init__(self, hosts, per_host, length):
        self.n, self.per_host = hosts * per_host, per_host
        self.values = np.random.default_rng(0).integers(0, 100, (self.n, length)).astype(float)
        self.total = self.values.sum(0)
        self.rounds = []

    def send(self, messages):
        """A round: each message is `(from, to, part, whether it is to be added)`."""
        sent = [self.values[sender, part].copy() for sender, _, part, _ in messages]
        for (_, to, part, added), values in zip(messages, sent, strict=True):
            self.values[to, part] = values + self.values[to, part] * added
        self.rounds.append(
            [(sender, to, values.nbytes) for (sender, to, *_), values in zip(messages, sent, strict=True)]
        )

    def seconds(self, network):
        """A round takes as long as the link that has the most to do."""
        return sum(self._round(messages, network) for messages in self.rounds)

    def _round(self, messages, network):
        busy = {}
        for sender, to, size in messages:
            host = sender // self.per_host
            inside = host == to // self.per_host
            link, name = (network.inside, ("tower", sender)) if inside else (network.across, ("host", host))
            latency, before = busy.get(name, (link.latency, 0))
            busy[name] = latency, before + size / link.bandwidth
        return max(map(sum, busy.values()))


def halves(begin, end, n):
    return [
        slice(*pair) for pair in zip(*(np.linspace(begin, end, n + 1, dtype=int)[i:][:n] for i in (0, 1)), strict=True)
    ]


def rings(towers, groups, parts, scatter=True, gather=True):
    """A ring in each group, of which tower i ends up with the sum of part i + 1, and then all have all."""
    size = len(groups[0])
    for added in [True] * scatter + [False] * gather:
        for step in range(size - 1):
            towers.send(
                [
                    (group[i], group[(i + 1) % size], parts[k][(i - step + (not added)) % size], added)
                    for k, group in enumerate(groups)
                    for i in range(size)
                ]
            )


def ring(towers, everything):
    rings(towers, [list(range(towers.n))], [halves(0, everything, towers.n)])


def hierarchical(towers, everything):
    size, parts = towers.per_host, halves(0, everything, towers.per_host)
    hosts = [list(range(begin, begin + size)) for begin in range(0, towers.n, size)]
    mine = [parts[(i + 1) % size] for i in range(size)]
    peers = [list(range(i, towers.n, size)) for i in range(size)]
    rings(towers, hosts, [parts] * len(hosts), gather=False)
    rings(towers, peers, [halves(part.start, part.stop, len(hosts)) for part in mine])
    rings(towers, hosts, [parts] * len(hosts), scatter=False)


def tree(towers, everything):
    distances = [1 << level for level in range(towers.n.bit_length() - 1)]
    for distance in distances:
        pairs = [(i + distance, i) for i in range(0, towers.n, 2 * distance)]
        towers.send([(*pair, slice(everything), True) for pair in pairs])
    for distance in reversed(distances):
        pairs = [(i, i + distance) for i in range(0, towers.n, 2 * distance)]
        towers.send([(*pair, slice(everything), False) for pair in pairs])


def recursive_halving_doubling(towers, everything):
    has, before = [slice(0, everything)] * towers.n, []
    distances = [towers.n >> level for level in range(1, towers.n.bit_length())]
    for distance in distances:
        parts = [halves(part.start, part.stop, 2) for part in has]
        upper = [i & distance != 0 for i in range(towers.n)]
        towers.send([(i, i ^ distance, parts[i][not upper[i]], True) for i in range(towers.n)])
        before.append(has)
        has = [parts[i][upper[i]] for i in range(towers.n)]
    for distance in reversed(distances):
        towers.send([(i, i ^ distance, has[i], False) for i in range(towers.n)])
        has = before.pop()


ALL = {function.__name__: function for function in (ring, hierarchical, tree, recursive_halving_doubling)}


def summed(algorithm, hosts, per_host):
    length = 4 * hosts * per_host
    towers = Towers(hosts, per_host, length)
    ALL[algorithm](towers, length)
    assert (towers.values == towers.total).all()
    return towers, length * 8


@pytest.mark.parametrize(("hosts", "per_host"), SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_time_matches_messages_sent_round_by_round(algorithm, hosts, per_host):
    towers, size = summed(algorithm, hosts, per_host)
    network = Network(per_host, Link(3e-6, 7e9), Link(2e-5, 5e8))
    step = traffic(algorithm, hosts, per_host, size)
    assert step.rounds == len(towers.rounds)
    assert step.seconds(network) == pytest.approx(towers.seconds(network))


@pytest.mark.parametrize("towers", [2, 3, 5, 8])
def test_a_ring_sends_the_least_that_a_sum_can_do_with(towers):
    step = traffic("ring", towers, 1, 1000)
    assert step.rounds == 2 * (towers - 1)
    assert step.bytes_across * towers == pytest.approx(2 * (towers - 1) * 1000)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_tower_sends_nothing(algorithm):
    assert traffic(algorithm, 1, 1, 1000) == (0, 0, 0, 0)


def test_a_tree_needs_powers_of_two():
    with pytest.raises(ValueError, match="must be powers of two for this algorithm; got 3"):
        traffic("tree", 3, 2, 1000)
