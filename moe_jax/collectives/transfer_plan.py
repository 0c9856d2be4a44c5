"""What a sparse transfer is: its static half, which a program is compiled for, and its data half, of one layer.

Nothing here communicates: see `sparse_all_gather.py`.

Letters: docs/notation.md; n elements of a chunk.
"""

from __future__ import annotations

import dataclasses

import jax

Array = jax.Array
Rounds = tuple[tuple[tuple[int, int], ...], ...]
METHODS = ("shift", "permute", "gather", "broadcast")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """The static half of a transfer; equal plans compile to equal programs.

    Attributes:
      method: 'shift' and 'permute' run rounds of pairs (device, device), in which a device sends and receives at most
        once; 'gather' all-gathers what each device offers; 'broadcast' sums masked chunks over all devices.
      rounds: [layer][round] pairs for the first two; a single list serves all layers.
      home_slots, replica_slots: Hs and Gs.
      axes: mesh axes of the devices that exchange chunks.
    """

    method: str
    home_slots: int
    replica_slots: int
    axes: tuple[str, ...]
    rounds: tuple[Rounds, ...] = ()

    @property
    def branches(self) -> bool:
        """Whether the program holds one branch for each layer's rounds."""
        return len(self.rounds) > 1

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"transfer method {self.method!r} is not one of {', '.join(METHODS)}")
        for pairs in (pairs for rounds in self.rounds for pairs in rounds):
            if len({a for a, _ in pairs}) < len(pairs) or len({b for _, b in pairs}) < len(pairs):
                raise ValueError(f"round {pairs} names a device twice on one side; a round is one message a device")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transfer:
    """The data half of one layer's transfer, for this device.

    Attributes:
      send: int32 [T, X or Y], the home slot of the chunk sent in a round, or offered; Hs where there is none.
      take: in rounds, int32 [T], the replica slot that the round fills, Gs for none; else int32 [Gs], which of the D X
        or Y chunks fills a replica slot, their number for none.
      layer: int32 [], which of the plan's lists of rounds to run.
    """

    send: Array
    take: Array
    layer: Array
