"""A published step priced by counting: NeMo AutoModel's Qwen3-30B-A3B on 8 H100, which took 1.361 s a microbatch.

    python scripts/checks/automodel.py

Prints JSON: seconds by kind at each level of the cost model, their sum, and its ratio to what was measured. Counted is
what its recipe runs (docs/performance-summary.mdx of NeMo-Automodel: sequences of 4,096, 4 a GPU, expert parallel 8,
FSDP 8, bfloat16 parameters, every layer computed again in the backward, DeepEP, a forced-balanced gate), in order and
with nothing hidden: a token is sent once to each GPU that has one of its experts. NumPy only.
"""

from __future__ import annotations

import json

from moe_jax.cluster import Links, cluster_of
from moe_jax.cluster.fits import LEVELS
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import parse_target

MEASURED = 21.773 / 16  # seconds of a step over its microbatches
LAYERS, M, HEADS, KV_HEADS, HEAD, EXPERTS, TOP_K, F, VOCAB = 48, 2048, 32, 4, 128, 128, 8, 768, 151936
DEVICES, SEQUENCES, LENGTH, ITEM = 8, 4, 4096, 2
TOKENS = SEQUENCES * LENGTH  # of a GPU
ROWS = TOKENS * TOP_K  # of its experts, evenly loaded
# of the tokens of a GPU, copies on all GPUs together: 8 experts drawn at random touch so many of 8 GPUs
COPIES = DEVICES * (1 - (1 - 1 / DEVICES) ** TOP_K)


def seconds_by_kind(prices: Prices) -> dict[str, float]:
    """Return the seconds of one microbatch: forward, the same again, and a backward of all layers; the head once."""
    cluster, held = cluster_of(prices), EXPERTS // DEVICES
    whole = (HEADS + 2 * KV_HEADS) * HEAD

    def dense(k: int, n: int, turns: int) -> float:
        """Forward `turns` times, and the gradients of the rows and of the weights."""
        rows, weights = prices.matmul("bf16", 1, TOKENS, k, n), prices.matmul("bf16", 1, k, n, TOKENS)
        return (turns + 1) * rows + weights

    def grouped(k: int, n: int) -> float:
        sizes = (ROWS, k, n, held)
        times = [prices.grouped_matmul("bf16", kind, *sizes) for kind in ("forward", "dlhs", "drhs")]
        return 2 * times[0] + times[1] + times[2]

    sizes = (SEQUENCES, HEADS, LENGTH, HEAD, HEAD)
    attention = [prices.attention(kind, sizes, causal=True) for kind in ("forward", "backward")]
    sent = TOKENS * COPIES * (1 - 1 / DEVICES) * M * ITEM
    exchange = float(Links(cluster, DEVICES, DEVICES, "AutoModel").uniform(sent, 0.0))
    x, row = TOKENS * M * ITEM, M * ITEM
    # bytes of a forward: two norms, two sums, norms and rotation of q and k, SwiGLU, rows copied per expert and back
    heads = TOKENS * (HEADS + KV_HEADS) * HEAD * ITEM
    rows = 2 * (ROWS + TOKENS * COPIES) * row
    moved = 2 * 2 * x + 2 * 3 * x + 2 * 2 * heads + 3 * ROWS * F * ITEM + rows
    parameters = (M * whole + HEADS * HEAD * M) * ITEM
    gather, scatter = (prices.collective(kind, DEVICES) for kind in ("all-gather", "reduce-scatter"))
    size = parameters**0.5, parameters
    return {
        "projections": LAYERS * (dense(M, whole, 2) + dense(HEADS * HEAD, M, 2) + dense(M, EXPERTS, 2)),
        "attention": LAYERS * (2 * attention[0] + attention[1]),
        "experts": LAYERS * (grouped(M, 2 * F) + grouped(F, M)),
        "exchanges": LAYERS * 6 * exchange,
        "other kernels": LAYERS * prices.memory(4 * moved) + prices.memory(6 * TOKENS * VOCAB * ITEM),
        "head": dense(M, VOCAB, 1),
        "FSDP": LAYERS * float(2 * gather.seconds(*size) + scatter.seconds(*size)),
    }


def main():
    target, answer = parse_target(f"h100:1x{DEVICES}"), {"measured_seconds": MEASURED}
    for level in LEVELS:
        kinds = seconds_by_kind(Prices(target, level))
        total = sum(kinds.values())
        answer[level] = {**{kind: round(own, 4) for kind, own in kinds.items()}, "seconds": round(total, 4)}
        answer[level]["over_measured"] = round(total / MEASURED, 3)
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
