"""What one MoE layer moves under each schedule, as formulas: the cost model, the automatic choice and tests read these.

Enters: static sizes of one layer. Leaves: the transfers of one device, forward and backward, for one pass. A size
counts elements as its collective's formula does: what a device hands in, and for an all-gather what it gets. Sums of
gradients over data-parallel devices, and integers (counts, routes), are not in here.

Letters: N tokens of an MP group, M model dim, D EP members, S shards (N_ESP), n = N_MP, P = D S, G steps of `pairwise`,
C rows of a bucket: of one device's N / n tokens under s1, pairwise and dp, of all N under deepspeed and s2. With a
capacity, D C is the papers' E C.
"""

from __future__ import annotations

import dataclasses
import typing

from moe_jax.errors import UserError


class Transfer(typing.NamedTuple):
    """Hold one collective: its kind, the group it spans, elements per call, and calls."""

    collective: str
    group: str
    elements: int
    calls: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Hold the sizes that decide what travels; see the letters above."""

    tokens: int
    model_dim: int
    rows: int
    members: int
    shards: int = 1
    copies: int = 1
    top_k: int = 1

    @property
    def x(self) -> int:
        """Elements of one EP&ESP all-to-all of s1 (rows of one device) or deepspeed (rows of an MP group)."""
        return self.members * self.rows * self.model_dim * self.shards


def layer_transfers(schedule: str, shape: LayerShape, gather: str = "saa") -> tuple[list[Transfer], list[Transfer]]:
    """Return (forward, backward) transfers of one device in one layer and pass.

    Args:
      schedule: a name of the schedules; 'parm' is 's1' or 's2'.
      shape: sizes; gather: how s2 returns, 'saa' or 'aas'.

    Source: Parm, sections III and IV, restated for buckets; FasterMoE, section 4.2.
    """
    if schedule not in _FORMULAS:
        raise UserError(f"schedule {schedule!r} has no volume formula; choose one of {', '.join(_FORMULAS)}")
    forward, backward = _FORMULAS[schedule](shape, gather)
    return _present(forward, shape), _present(backward, shape)


def _present(transfers: list[Transfer], shape: LayerShape) -> list[Transfer]:
    """Leave out what spans a group of one device."""
    sizes = {"model": shape.copies, "expert": shape.members, "expert_shard": shape.shards}
    sizes["expert+expert_shard"] = shape.members * shape.shards
    return [transfer for transfer in transfers if sizes[transfer.group] > 1 and transfer.calls]


_BOTH = "expert+expert_shard"


def _s1(shape: LayerShape, _):
    exchange = Transfer("all_to_all", _BOTH, shape.x, 2)
    whole = Transfer("all_gather", "model", shape.tokens * shape.model_dim)
    return [exchange, whole], [exchange, whole]


def _s2(shape: LayerShape, gather: str):
    part = shape.rows // shape.copies * shape.model_dim
    send = Transfer("all_to_all", _BOTH, shape.x // shape.copies)
    y = shape.members * shape.rows * shape.model_dim
    if shape.copies == 1:
        both = [send._replace(calls=2)]
    elif gather == "aas":
        both = [send._replace(calls=2), Transfer("all_gather", "model", y)]
    else:
        rounds = Transfer("permute", _BOTH, part, shape.members * shape.shards - 1)
        both = [send, rounds, Transfer("all_gather", "model", y // shape.members, shape.members)]
    return both, both


def _deepspeed(shape: LayerShape, _):
    if shape.shards == shape.copies == 1:
        return _s1(shape, _)
    tokens = shape.tokens * shape.model_dim * shape.shards
    exchange = Transfer("all_to_all", "expert", shape.x, 2)
    forward = [
        Transfer("all_gather", "expert_shard", tokens),
        exchange,
        Transfer("all_reduce", "expert_shard", shape.x),
    ]
    backward = [
        Transfer("all_gather", "expert_shard", shape.x),
        exchange,
        Transfer("reduce_scatter", "expert_shard", tokens),
    ]
    return forward, backward


def _pairwise(shape: LayerShape, _):
    rounds = Transfer("permute", _BOTH, shape.rows * shape.model_dim, 2 * (shape.members * shape.shards - 1))
    whole = Transfer("all_gather", "model", shape.tokens * shape.model_dim)
    return [rounds, whole], [rounds, whole]


def _ring(shape: LayerShape, _):
    size = shape.members * shape.shards
    tokens = shape.tokens // shape.copies * size
    whole = Transfer("all_gather", "model", shape.tokens * shape.model_dim)
    both_ways = [
        Transfer("all_gather", _BOTH, tokens * shape.model_dim),
        Transfer("reduce_scatter", _BOTH, tokens * shape.model_dim),
        whole,
    ]
    weights = tokens * shape.top_k
    return (
        [*both_ways, Transfer("all_gather", _BOTH, weights)],
        [*both_ways, Transfer("reduce_scatter", _BOTH, weights)],
    )


def _dp(shape: LayerShape, _):
    return [], []


_FORMULAS = {"deepspeed": _deepspeed, "s1": _s1, "s2": _s2, "pairwise": _pairwise, "ring": _ring, "dp": _dp}
