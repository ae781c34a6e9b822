"""What `explain` finds out: plain values, and their forms as text and as a page."""

from __future__ import annotations

import collections
import dataclasses

from replicate.explain._data import Home, Memory, Split, Transfer, bytes_by_device
from replicate.explain._hlo import Collective


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One training step of a replicated model_fn. `print` shows it as text, `html` as a page.

    Attributes:
      name: of the model_fn.
      towers: the device of each, or those of each, as in "cpu:0, cpu:1".
      distribution: "one device", "mirrored", "sharded", "variable devices" where each variable has one of its own, or
        "local copies" where each tower has its own variables within a block (`block_sync`).
      rows: of the whole batch.
      micro_batches: the parts in which a tower runs its rows, one after another.
      batch: what is split.
      collectives: of the compiled program; where variables have devices of their own, of that of the towers.
      transfers: between the towers and the variables' own devices.
      variables, slots: where each array lives.
      steps_per_program: how many steps `RunConfig(steps_per_loop="auto")` puts into one program, where no hook looks
        more often than the run itself.
      flops: floating point operations of a step on one device, by XLA's count, which takes what is in a loop once;
        None where it does not say.
      memory: on each device; None where XLA does not say.
      bandwidth, latency: what the times are estimated with, in bytes per second and in seconds.
    """

    name: str
    towers: tuple[str, ...]
    distribution: str
    rows: int
    micro_batches: int
    batch: tuple[Split, ...]
    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...]
    variables: tuple[Home, ...]
    slots: tuple[Home, ...]
    steps_per_program: int
    flops: float | None
    memory: Memory | None
    bandwidth: float
    latency: float

    @property
    def communication_seconds(self) -> float:
        """The estimated time of all collectives and transfers, as if nothing were computed meanwhile.

        The devices of variables send and receive side by side, each one array after another.
        """
        by_device: dict[str, float] = collections.defaultdict(float)
        for each in self.transfers:
            by_device[each.device] += self.latency + each.bytes / self.bandwidth
        inside = sum(each.seconds(self.bandwidth, self.latency) for each in self.collectives)
        return inside + max(by_device.values(), default=0.0)

    @property
    def bytes_by_device(self) -> dict[str, int]:
        """What each device has of the variables and slots."""
        return bytes_by_device([*self.variables, *self.slots])

    def __str__(self) -> str:
        from replicate.explain._text import as_text

        return as_text(self)

    def html(self) -> str:
        """The same as one page with a picture, which needs nothing but itself."""
        from replicate.explain._html import as_page

        return as_page(self)
