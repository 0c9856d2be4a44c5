"""Rows of the buckets of an exchange: to the own device, to devices of the own node, to those of other nodes.

Sizes only, which a program is compiled for; nothing here communicates, and nothing imports jax.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketRows:
    """Rows of one (source, destination) bucket.

    Attributes:
      own: where the destination is the source's own member of the expert-parallel group; these rows do not travel
        between members. node: of another member on the same node. far: on another node.
    """

    own: int
    node: int
    far: int
