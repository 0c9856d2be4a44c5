"""Expert loads by name, and the one rule that fits them to the devices, experts and tokens of a paper's row.

A name is one of

    top_1, top_2, top_2_of_64       shipped: runs of this project without a balance loss, of 32 experts or of 64
                                    (configs/trace; written by scripts/bench/make_trace.py of commit f2a0f1eb)
    stationary, drifting, bursty    synthetic: Zipf popularity with exponent 1, by seed
    W0_balanced ... W7_burst        the imbalance workloads of Megatron-LM's pull request 7488, by their names and by
                                    what each isolates; shares and lengths are this project's
    a path                          a trace file or a run folder, as `moe_jax.replay` reads them

Loads are int64 [n, L, S, E]: token-expert assignments from source s to expert e. Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np
import scipy.optimize

from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsTrace, read_loads
from moe_jax.shipped import here_or_shipped, shipped
from moe_jax.storage.run_folder import RunFolder

OF_64 = "top_2_of_64"
SHIPPED = ("top_1", "top_2", OF_64)
TRACES = shipped("configs/trace")
SAMPLES, LAYERS, SOURCES, EXPERTS, CHOICES = 50, 12, 32, 32, 2048  # of synthetic loads; choices of one source
EVERY = 10  # iterations from sample to sample, as in the shipped ones
ZIPF = 1.0  # exponent of popularity by rank
DRIFT = 0.1  # of the logarithm of popularity, a sample's normal step
BURST_EVERY, BURST_LENGTH, BURST_SHARE = 10, 2, 0.5  # in samples; share of the choices that one expert then takes
SPREAD = 0.3  # of the logarithm of popularity, from source to source

RANK = EXPERTS // 8  # experts of one of eight devices; as many are hot in W1, W2 and W3, with the same share
# of workloads the share that hot experts take, evenly (the others have the rest), and which are hot in samples in turn
HOT = {
    "W0_balanced": (1.0, [slice(0, EXPERTS)]),
    "W1_hot_expert_set": (0.5, [slice(0, 2 * RANK, 2)]),  # on two devices
    "W2_hot_rank": (0.5, [slice(0, RANK)]),  # on one
    "W3_spread_hot_experts": (0.5, [slice(0, EXPERTS, EXPERTS // RANK)]),  # on four
    "W5_zero_expert_rank": (1.0, [slice(RANK, EXPERTS)]),
    "W6_rotating_hotspot": (0.5, [slice(expert, expert + 1) for expert in range(EXPERTS)]),
    "W7_burst": (0.9, [slice(0, 1)] * BURST_LENGTH + [slice(0, EXPERTS)] * (BURST_EVERY - BURST_LENGTH)),
}
RAGGED = "W4_source_ragged"
SYNTHETIC = ("stationary", "drifting", "bursty", *sorted((*HOT, RAGGED)))
NAMES = (*SHIPPED, *SYNTHETIC)


def popularity(name: str, rng: np.random.Generator) -> np.ndarray:
    """Return the shares of experts under a synthetic name, in any unit: float [n, L, S or 1, E]."""
    if name == RAGGED:  # experts are even, sources have one to three times the tokens of the least
        return np.broadcast_to(rng.uniform(1.0, 3.0, (1, LAYERS, SOURCES, 1)), (SAMPLES, LAYERS, SOURCES, EXPERTS))
    if name in HOT:
        (share, turns), out = HOT[name], np.empty((SAMPLES, LAYERS, 1, EXPERTS))
        for sample in range(SAMPLES):
            hot = np.zeros(EXPERTS, bool)
            hot[turns[sample % len(turns)]] = True
            out[sample] = np.where(hot, share / hot.sum(), (1 - share) / max(1, (~hot).sum()))
        return out
    steps = rng.normal(0.0, DRIFT, (SAMPLES, LAYERS, 1, EXPERTS)) if name == "drifting" else 0.0
    ranks = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)]) + 1.0
    shares = np.repeat((ranks**-ZIPF)[None, :, None], SAMPLES, axis=0)
    if name == "drifting":
        shares *= np.exp(np.cumsum(steps, axis=0))
    if name == "bursty":
        shares /= shares.sum(axis=-1, keepdims=True)
        for start in range(0, SAMPLES, BURST_EVERY):
            hot = rng.integers(EXPERTS, size=LAYERS)
            burst = shares[start : start + BURST_LENGTH]
            burst *= 1 - BURST_SHARE
            burst[:, np.arange(LAYERS), :, hot] += BURST_SHARE
    return shares


def find_loads(name: str, seed: int = 0) -> LoadsTrace:
    """Return the loads of a name, or of a path.

    Raises:
      UserError: neither, or a trace of fewer than two samples.
    """
    if name in SYNTHETIC:
        rng = np.random.default_rng(seed)
        shares = popularity(name, rng)
        if not name.startswith("W"):  # those are exact, without noise from source to source
            shares = shares * np.exp(rng.normal(0.0, SPREAD, (1, LAYERS, SOURCES, EXPERTS)))
        shares = np.broadcast_to(shares, (SAMPLES, LAYERS, SOURCES, EXPERTS))
        total = shares.sum(axis=-1, keepdims=True)
        per_source = CHOICES * total / total.mean(axis=2, keepdims=True)
        return LoadsTrace(round_shares(shares, per_source[..., 0].astype(np.int64)), EVERY * np.arange(SAMPLES))
    path = TRACES / f"{name}.npz" if name in SHIPPED else here_or_shipped(name)
    if not path.exists():
        raise UserError(f"--trace {name!r} is no file and no run folder; give one, or one of {', '.join(NAMES)}")
    trace = read_loads(RunFolder(path, create=False).loads if path.is_dir() else path)
    if (samples := len(trace.loads)) < 2 or not trace.loads.size:
        raise UserError(f"--trace {name}: {samples} samples; two at least are needed, to plan one from the one before")
    return trace


def round_shares(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return integers proportional to `shares` [..., E] that sum to `totals` [...], largest remainders rounded up."""
    exact = shares * (totals / np.maximum(shares.sum(axis=-1), 1e-300))[..., None]
    whole = np.floor(exact).astype(np.int64)
    missing = totals - whole.sum(axis=-1)
    order = np.argsort(whole - exact, axis=-1, kind="stable")  # largest remainder first
    ranked = np.take_along_axis(whole, order, axis=-1) + (np.arange(whole.shape[-1]) < missing[..., None])
    np.put_along_axis(whole, order, ranked, axis=-1)
    return whole


def fit_loads(trace: LoadsTrace, *, devices: int, experts: int, choices: int) -> tuple[LoadsTrace, str]:
    """Return loads [n, L, D, E'] for a row's devices and experts, and the sentence that says how they were made.

    Neighbouring sources are added where there are more of them than devices, and repeated where there are fewer.
    Neighbouring experts are added where there are more than asked for; where there are fewer, those of the next layers
    stand beside a layer's own, with an equal part of its tokens. Then every source is scaled to `choices` of a sample's
    mean source.

    Raises:
      UserError: sizes that do not divide each other.
    """
    loads = np.asarray(trace.loads, np.int64)
    _, layers, sources, traced = loads.shape
    for what, given, asked in (("devices", sources, devices), ("experts", traced, experts)):
        if max(given, asked) % min(given, asked):
            raise UserError(f"the trace's {given} {what} do not fit the table's {asked}: one must divide the other")
    if experts > traced:
        beside = [np.roll(loads, -shift, axis=1) for shift in range(experts // traced)]
        loads = np.concatenate(beside, axis=3)
    else:
        loads = loads.reshape(*loads.shape[:3], experts, -1).sum(axis=4)
    if devices > sources:
        loads = np.repeat(loads, devices // sources, axis=2)
    else:
        loads = loads.reshape(*loads.shape[:2], devices, -1, experts).sum(axis=3)
    of_source = loads.sum(axis=3)
    scaled = choices * of_source / np.maximum(of_source.mean(axis=2, keepdims=True), 1e-300)
    said = f"loads: {sources} sources x {traced} experts to {devices} x {experts}, {choices} choices a device"
    skew = loads.sum(axis=2)
    worst = (skew.max(axis=2) / np.maximum(skew.mean(axis=2), 1e-300)).mean()
    wanted = np.rint(scaled).astype(np.int64)
    loads = loads if (wanted == of_source).all() else round_shares(loads, wanted)
    fitted = LoadsTrace(loads, np.asarray(trace.iterations))
    return fitted, f"{said}; fullest expert over mean {worst:.3g} ({len(loads)} samples, {layers} layers)."


def sharpened(trace: LoadsTrace, hot: float, share: float) -> LoadsTrace:
    """Return loads whose experts' shares are raised to the power at which this part of them has that share of all.

    Args:
      hot: part of the experts, the heaviest of each sample and layer; share: what they have in the mean of all.
    """
    loads = np.asarray(trace.loads, np.int64)
    totals = np.maximum(loads.sum(axis=2, keepdims=True), 1e-3)
    shares, count = totals / totals.sum(axis=3, keepdims=True), int(loads.shape[3] * hot)

    def excess(power):
        part = np.sort(shares**power, axis=3)
        return float((part[..., -count:].sum(axis=3) / part.sum(axis=3)).mean()) - share

    if excess(50.0) < 0:  # even loads stay even
        return trace
    power = scipy.optimize.brentq(excess, 0.0, 50.0)
    return LoadsTrace(round_shares(loads * shares ** (power - 1), loads.sum(axis=3)), trace.iterations)


def with_loads_before(trace: LoadsTrace) -> LoadsTrace:
    """Return a trace that has the iteration before some samples as it is, else with one before each, on a line.

    A run's noise from one iteration to the next is not on a line between samples: plans are better than there by that.
    """
    apart = np.diff(trace.iterations)
    if apart.min() == 1:
        return trace
    step = (np.diff(np.asarray(trace.loads, float), axis=0).T / apart).T
    loads = np.stack([np.rint(trace.loads[1:] - step).astype(np.int64), trace.loads[1:]], axis=1)
    iterations = np.stack([trace.iterations[1:] - 1, trace.iterations[1:]], axis=1)
    return LoadsTrace(loads.reshape(-1, *loads.shape[2:]), iterations.ravel())
