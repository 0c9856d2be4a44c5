"""Time FasterMoE's search for shadowed experts as its release does it, step by step in PyTorch on the host.

    python scripts/bench/torch_search.py

It restates `global_policy` of fmoe/fastermoe/shadow_policy.py (github.com/laekov/fastmoe): an empty tensor for each
GPU's counts, their sum, a sort, and a loop over 0-dimensional tensors with the default rates. Left out is what needs
GPUs: the all-gather and the copies. Counts are the shipped ones of 16 experts, K = 1. Prints microseconds for one
layer: the median over all samples and layers, by M. Needs torch, which nothing else here does; one thread.
"""

import statistics
import time

import torch

from moe_jax.papers.loads import find_loads, fit_loads

DEVICES, NETWORK, FLOPS = 16, 50e9 / 8, 11.5e12


def search(counts: torch.Tensor, model_dim: int) -> torch.Tensor:
    """Return the experts that are shadowed, of counts [D, E]."""
    gathered = [torch.empty_like(counts[0]) for _ in range(DEVICES)]
    gathered[:] = counts.unbind()
    loads, order = torch.stack(gathered).sum(0).cpu().flatten().sort(0, descending=True)
    numbers = 2 * model_dim**2  # of one of an expert's two matrices: F = 2 M
    token, row, expert = 4 * numbers / FLOPS, 4 * model_dim / NETWORK, 2 * 4 * numbers / NETWORK
    least, chosen, moved = 3 * token * loads[0] + 4 * row * loads[0], torch.zeros(DEVICES, dtype=torch.bool), 0.0
    for place, index in enumerate(order[:-1]):
        moved += expert
        seconds = 3 * token * loads[place + 1] + 4 * row * loads[place + 1] + moved
        if seconds >= least:
            break
        least, chosen[index] = seconds, True
    return chosen


def main():
    torch.set_num_threads(1)
    trace, _ = fit_loads(find_loads("top_1"), devices=DEVICES, experts=DEVICES, choices=1024)
    for model_dim in (512, 1024, 2048):
        spent = []
        for counts in torch.tensor(trace.loads.reshape(-1, DEVICES, DEVICES)):
            began = time.perf_counter()
            search(counts, model_dim)
            spent.append(time.perf_counter() - began)
        print(f"M = {model_dim}: {1e6 * statistics.median(spent):.0f} us (torch {torch.__version__})")


if __name__ == "__main__":
    main()
