"""How many rows buckets have: by the chance that one overflows, and of a segment under a plan, within a limit.

Inputs: expected rows, or a placement and the loads of a step. Outputs: rows. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from moe_jax.parallel.static_sizes import KINDS, BucketRows
from moe_jax.planning import routing
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape

# Rows of a planned bucket for another device over their mean, at most. Such a bucket is as large as the fullest pair of
# its kind that is predicted (same node, other nodes), which under skewed loads can be all tokens of a device, for each
# destination: memory would grow with the devices. What does not fit takes another pass.
BUCKET_LIMIT = 4.0
FEWEST = 0.25  # rows of a planned bucket over the mean: fewer would make an overflow, where it comes, take many passes
LOOKED_AT = 1 << 22  # pairs of all layers: all that four of 1,024 devices have
HEADROOM = 1.25  # of a new bucket over the predicted rows, so that slow growth needs few executables
TOO_OFTEN = 10.0  # times `chance`: buckets grow when they overflow more often, for the same reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The rule for the buckets of one exchange of one microbatch, between the members of an expert-parallel group.

    Attributes:
      sizes: `LayerSizes` of `moe/schedule.py`, of a layer without a plan; even: the rows of its buckets.
      devices: D, members; devices_per_node: of them on a node.
      chance: `MoEConfig.overflow_chance`, for a layer's exchange in one data-parallel group; 0 for rows that no
        predicted pair exceeds.
      multiple: of which rows are a multiple.
      summed: how many such exchanges the loads of a step are sums of.
      parts: halves of a microbatch, each of which has an exchange of its own.
      one_length: the bucket of the own device is as long as the others, because MP groups cut all of them.
    """

    sizes: Any
    even: int
    devices: int
    devices_per_node: int
    chance: float
    multiple: int
    summed: float
    parts: int
    one_length: bool

    @property
    def choices(self) -> int:
        """K t, of an MP group."""
        return self.sizes.config.top_k * self.sizes.tokens

    def there(self, shape: PlanShape) -> BucketRows:
        """Return the rows that buckets have under a shape."""
        planned = shape.bucket_rows or self.sizes.planned_rows or BucketRows.even(self.even)
        return dataclasses.replace(self.sizes, groups=shape.slots, planned_rows=planned).bucket_rows(self.devices)

    def most(self, shape: PlanShape) -> BucketRows:
        """Return the rows that planned buckets may have: the worst case, or what `BUCKET_LIMIT` allows.

        Never fewer than without a plan. The limit is not for the own bucket: there is one of it, and it does not
        travel; except where others have its length.
        """
        worst = dataclasses.replace(self.sizes, groups=shape.slots).worst_rows()
        most = min(max(math.ceil(BUCKET_LIMIT * (self.choices / self.devices)), self.even), worst)
        return BucketRows(own=most if self.one_length else worst, node=most, far=most)

    def needed(
        self, shape: PlanShape, placement: Placement, loads: np.ndarray, error: float, more_often: float = 1.0
    ) -> BucketRows:
        """Return the rows that buckets need by prediction.

        A step's loads are sums over microbatches and data-parallel groups, and over the N_ESP devices of a member; a
        bucket is of one microbatch's tokens of one MP group, which are those of N_MP devices.

        Args:
          placement: with what is decided after the gate; loads: int [L, S, E], predicted for a step.
          error: of the loads, relative; more_often: how many times as often as `chance` says buckets may overflow.
        """
        if self.chance:
            # Each kind of bucket has a third of the chance. Where a microbatch travels in two halves, buckets are
            # twice as long as those of a half.
            chance, choices = more_often * self.chance * len(loads) / 3, self.choices // self.parts
            pairs = routing.pair_loads(placement, loads) * ((1 + error) / self.summed)
            by_kind = pairs_by_kind(pairs, self.devices_per_node)
            of_part = {kind: means / self.parts for kind, means in by_kind.items() if means.size}
            rows = {kind: expected_rows(means, choices, chance, self.multiple) for kind, means in of_part.items()}
            rows = BucketRows(**{kind: self.parts * rows.get(kind, 0) for kind in by_kind})
        else:
            rows = fullest(placement, loads).each(lambda pair: pair / self.summed * (1 + error)).rounded(self.multiple)
        fewest = BucketRows.even(FEWEST * self.choices / self.devices).rounded(self.multiple)
        return rows.each(max, fewest).each(min, self.most(shape))

    def enlarged(self, shape: PlanShape, needed: BucketRows) -> PlanShape:
        """Return the shape with headroom for what its buckets have too few rows for, the others as they are.

        The first planned buckets are all by prediction: one that was larger without a plan gets smaller.
        """
        headroom = 1.0 if self.chance else HEADROOM
        larger = needed.each(lambda size: math.ceil(headroom * size)).each(min, self.most(shape))
        larger = larger.rounded(self.multiple)
        have = shape.bucket_rows or larger
        rows = {kind: getattr(larger if getattr(needed, kind) > getattr(have, kind) else have, kind) for kind in KINDS}
        return dataclasses.replace(shape, bucket_rows=BucketRows(**rows))


def fullest(placement: Placement, loads: np.ndarray) -> BucketRows:
    """Return the most tokens of a pair (source, destination) of each kind, 0 where there is none: loads [L, S, E].

    Of more than `LOOKED_AT` pairs those of some sources are counted, one in every so many.
    """
    sources = np.arange(0, placement.devices, -(-placement.layers * placement.devices**2 // LOOKED_AT))
    pairs = routing.pair_loads(placement, loads, sources)
    kinds = pairs_by_kind(pairs, placement.devices_per_node, sources)
    return BucketRows(**{kind: int(own.max(initial=0)) for kind, own in kinds.items()})


def pairs_by_kind(pairs: np.ndarray, devices_per_node: int, sources: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return {'own', 'node', 'far'}: the loads [..., n] of the pairs of each kind of bucket, of int [..., s, D].

    Args:
      sources: int [s], the devices that they are of; None: all, [..., D, D].
    """
    index = np.arange(pairs.shape[-1])
    source = (index if sources is None else sources)[:, None]
    own = source == index
    near = (source // devices_per_node == index // devices_per_node) & ~own
    return {"own": pairs[..., own], "node": pairs[..., near], "far": pairs[..., ~near & ~own]}


def overflow_chance(means, choices: int, rows: int) -> float:
    """Return a bound, close to exact where it is small, on the chance that some pair has more than `rows` rows.

    The rows of a pair are a binomial count: each of the source's choices goes to the destination or not. (That a
    token's K experts differ makes the count vary a little less.) Chances of pairs are added: they may depend on each
    other.

    Args:
      means: float [n], expected rows of each pair.
      choices: of one source.
    """
    mean = np.minimum(np.asarray(means, np.float64).ravel(), choices)
    least = rows + 1  # the fewest rows that overflow
    if least > choices:
        return 0.0
    sure = mean >= least
    p = np.clip(mean[~sure] / choices, 1e-300, None)
    log_ways = math.lgamma(choices + 1) - math.lgamma(least + 1) - math.lgamma(choices - least + 1)
    log_terms = log_ways + least * np.log(p) + (choices - least) * np.log1p(-p)
    ratio = (choices - least) / (least + 1) * p / (1 - p)  # of a term to the one before; it falls from term to term
    tail = np.exp(np.minimum(log_terms, 0.0)) / np.maximum(1 - ratio, 1e-9)
    return float(np.sum(np.minimum(tail, 1.0)) + np.count_nonzero(sure))


def expected_rows(means, choices: int, chance: float, step: int = 8) -> int:
    """Return the fewest rows, a multiple of `step`, of which some pair needs more with this `overflow_chance`."""
    fewest, most = 1, max(1, math.ceil(choices / step))
    while fewest < most:
        middle = (fewest + most) // 2
        if overflow_chance(means, choices, middle * step) <= chance:
            most = middle
        else:
            fewest = middle + 1
    return fewest * step
