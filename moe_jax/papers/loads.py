"""Expert loads by name, and the one rule that fits them to the devices, experts and tokens of a paper's row.

A name is one of

    top_1, top_2, top_2_of_64       shipped: runs of this project without a balance loss, of 32 experts or of 64
                                    (configs/trace; written by scripts/bench/make_trace.py of commit f2a0f1eb)
    stationary, drifting, bursty    synthetic: Zipf popularity with exponent 1, by seed
    W0_balanced ... W7_burst        the imbalance workloads of Megatron-LM's pull request 7488, by their names and by
                                    what each isolates; shares and lengths are this project's
    a path                          a trace file or a run folder, as `moe_jax.replay` reads them, or a folder of
                                    FasterMoE's public dump (`read_dump`)

Loads are int64 [n, L, S, E]: token-expert assignments from source s to expert e. Letters: docs/notation.md.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Callable

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

Popularity = Callable[[np.random.Generator], np.ndarray]  # -> float [n, L, S or 1, E], shares in any unit


def _zipf(rng: np.random.Generator) -> np.ndarray:
    """Return [1, L, 1, E]: Zipf popularity, the order of experts drawn for every layer."""
    ranks = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)]) + 1.0
    return (ranks**-ZIPF)[None, :, None]


def _stationary(rng):
    return np.repeat(_zipf(rng), SAMPLES, axis=0)


def _drifting(rng):
    steps = rng.normal(0.0, DRIFT, (SAMPLES, LAYERS, 1, EXPERTS))
    return _zipf(rng) * np.exp(np.cumsum(steps, axis=0))


def _bursty(rng):
    shares = np.repeat(_zipf(rng), SAMPLES, axis=0)
    shares /= shares.sum(axis=-1, keepdims=True)
    for start in range(0, SAMPLES, BURST_EVERY):
        hot = rng.integers(EXPERTS, size=LAYERS)
        burst = shares[start : start + BURST_LENGTH]
        burst *= 1 - BURST_SHARE
        burst[:, np.arange(LAYERS), :, hot] += BURST_SHARE
    return shares


def _hot(experts: Callable[[int], slice], share: float) -> Popularity:
    """Return loads of which `experts(sample)` take `share`, evenly; the others the rest."""

    def shares(rng):
        del rng
        out = np.empty((SAMPLES, LAYERS, 1, EXPERTS))
        for sample in range(SAMPLES):
            hot = np.zeros(EXPERTS, bool)
            hot[experts(sample)] = True
            out[sample] = np.where(hot, share / hot.sum(), (1 - share) / max(1, (~hot).sum()))
        return out

    return shares


def _ragged_sources(rng):
    """Return even experts whose sources have one to three times the tokens of the least."""
    return np.broadcast_to(rng.uniform(1.0, 3.0, (1, LAYERS, SOURCES, 1)), (SAMPLES, LAYERS, SOURCES, EXPERTS))


RANK = EXPERTS // 8  # experts of one of eight devices; as many are hot in W1, W2 and W3, with the same share
SYNTHETIC: dict[str, Popularity] = {
    "stationary": _stationary,
    "drifting": _drifting,
    "bursty": _bursty,
    "W0_balanced": _hot(lambda sample: slice(0, EXPERTS), 1.0),
    "W1_hot_expert_set": _hot(lambda sample: slice(0, 2 * RANK, 2), 0.5),  # on two devices
    "W2_hot_rank": _hot(lambda sample: slice(0, RANK), 0.5),  # on one
    "W3_spread_hot_experts": _hot(lambda sample: slice(0, EXPERTS, EXPERTS // RANK), 0.5),  # on four
    "W4_source_ragged": _ragged_sources,
    "W5_zero_expert_rank": _hot(lambda sample: slice(RANK, EXPERTS), 1.0),
    "W6_rotating_hotspot": _hot(lambda sample: slice(sample % EXPERTS, sample % EXPERTS + 1), 0.5),
    "W7_burst": _hot(lambda sample: slice(0, 1 if sample % BURST_EVERY < BURST_LENGTH else EXPERTS), 0.9),
}
NAMES = (*SHIPPED, *SYNTHETIC)


def find_loads(name: str, seed: int = 0) -> LoadsTrace:
    """Return the loads of a name, or of a path.

    Raises:
      UserError: neither, or a trace of fewer than two samples.
    """
    if name in SYNTHETIC:
        rng = np.random.default_rng(seed)
        shares = SYNTHETIC[name](rng)
        even = name.startswith("W")  # exact, without noise from source to source
        if not even:
            shares = shares * np.exp(rng.normal(0.0, SPREAD, (1, LAYERS, SOURCES, EXPERTS)))
        shares = np.broadcast_to(shares, (SAMPLES, LAYERS, SOURCES, EXPERTS))
        total = shares.sum(axis=-1, keepdims=True)
        per_source = CHOICES * total / total.mean(axis=2, keepdims=True)
        return LoadsTrace(round_shares(shares, per_source[..., 0].astype(np.int64)), EVERY * np.arange(SAMPLES))
    path = TRACES / f"{name}.npz" if name in SHIPPED else here_or_shipped(name)
    if not path.exists():
        raise UserError(f"--trace {name!r} is no file and no run folder; give one, or one of {', '.join(NAMES)}")
    if (path / "0").is_dir():
        trace = read_dump(path)
    else:
        trace = read_loads(RunFolder(path, create=False).loads if path.is_dir() else path)
    if len(trace.loads) < 2 or not trace.loads.size:
        raise UserError(f"--trace {name}: loads {list(trace.loads.shape)}; two samples at least are needed, to plan "
                        "one from the one before")  # fmt: skip
    return trace


class _Arrays(pickle.Unpickler):
    """Reads pickles of plain Python and numpy arrays; what names anything else is refused, and nothing of it runs."""

    def find_class(self, module, name):
        parts = ("multiarray", "_reconstruct"), ("numeric", "_frombuffer")
        arrays = {(f"numpy.{core}.{file}", function) for core in ("core", "_core") for file, function in parts}
        if (module, name) not in arrays | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_dump(folder: pathlib.Path) -> LoadsTrace:
    """Return the loads of FasterMoE's public dump: RANK/ITERATION.pkl, {(layer, iteration): experts [tokens, K]}.

    Ranks have one expert each; -1 is a choice that was dropped. Source: gates.py and trace2lec.py of
    github.com/laekov/fastermoe-ae, whose paper names the dump.

    Raises:
      UserError: a file that is no such pickle, or counts that are missing.
    """
    ranks = len([path for path in folder.iterdir() if path.name.isdigit()])
    counts: dict[tuple[int, int, int], np.ndarray] = {}
    for rank in range(ranks):
        for path in sorted((folder / str(rank)).glob("*.pkl")):
            try:
                with path.open("rb") as file:
                    choices = _Arrays(file).load().items()
                for (layer, iteration), experts in choices:
                    chosen = np.asarray(experts, np.int64)
                    of_expert = np.bincount(chosen[chosen >= 0] % ranks, minlength=ranks)
                    counts[int(iteration), int(layer), rank] = of_expert
            except (pickle.UnpicklingError, OSError, EOFError, AttributeError, TypeError, ValueError) as error:
                raise UserError(f"{path} is no pickle of FasterMoE's dump ({error}); give a folder of ranks") from error
    samples, layers = (sorted({key[at] for key in counts}) for at in (0, 1))
    if not counts or len(counts) != len(samples) * len(layers) * ranks:
        whole = f"{len(samples)} iterations x {len(layers)} layers x {ranks} ranks"
        raise UserError(f"{folder} is cut off: {len(counts)} counts of {whole}; unpack FasterMoE's dump again")
    loads = [[[counts[sample, layer, rank] for rank in range(ranks)] for layer in layers] for sample in samples]
    return LoadsTrace(np.array(loads), np.array(samples))


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
