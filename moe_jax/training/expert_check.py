"""Compare an unverified grouped matmul with `reference` in float32 on one expert FFN, before training on it.

Inputs: a `Session`, before it has a state, and the job's processes. Outputs: the session, with a proven grouped matmul
where 'auto' had chosen one that does not hold, and a record for environment.json. Letters: docs/notation.md; F of this
device.
"""

# Some are not proven by the tests of this project: `hopper`, never run here on the GPUs that it is for; and
# `lax.ragged_dot` on GPUs, which newer compilers lower to cuDNN. A run that uses one compares it first.
#
#     outcome                  field says 'auto'                      field names it
#     equal but for rounding   goes on                                goes on
#     differs, or fails        goes on with the proven one, says so   UserError
#     no memory for the check  goes on with the proven one, says so   goes on unchecked, says so
#
# All processes of a job decide alike: by the worst of their outcomes.

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from moe_jax.data.user_cache import read_cached, user_cache_folder, write_cached
from moe_jax.errors import UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.kernels.grouped import GroupedWeights
from moe_jax.models.config import ModelConfig
from moe_jax.moe.experts import expert_ffn, weight_names
from moe_jax.training.compiling import compiler_options
from moe_jax.training.program import Session

_LOG = logging.getLogger(__name__)
DRIVER = Path("/proc/driver/nvidia/version")
PASSES, DIFFERS, FAILS, NO_MEMORY = "passes", "differs", "fails", "no memory"
OUTCOMES = (PASSES, NO_MEMORY, FAILS, DIFFERS)  # from best to worst
PROVEN = "fused"
KERNELS = ("hopper",)  # grouped matmuls that no GPU has run for this project
UNCACHED = "kernels are compared again at every start: %s"
WAIT_SECONDS = 900.0  # for another process' compilations
Verdict = tuple[str, str]  # one of OUTCOMES, and what differs or why it failed, one line


def select_verified_kernels(session: Session, hosts: Hosts) -> tuple[Session, dict]:
    """Compare the unverified grouped matmul that the session uses, before anything large is in the devices' memory.

    Args:
      session: with the config as the user gave it.
      hosts: all processes of the job call this together.

    Returns:
      the session to train with, and {'grouped_matmul': {'wanted', 'compared', 'used', 'outcome', 'detail'}} where one
      was compared, else {}.

    Raises:
      UserError: the config names something that differs or fails, or a kernel has made the device unusable.
    """
    device = next(d for d in session.roles.mesh.devices.flat if d.process_index == jax.process_index())
    unchecked = unverified(session, device)
    if not unchecked:
        return session, {}
    # what concerns several processes is set for all programs of a process (`training/hosts.py`)
    options = compiler_options(device.platform, deterministic=session.config.train.deterministic)
    key, wanted, used = verdict_key(device, options, unchecked), session.config.moe.grouped_matmul, unchecked[0][0]
    # Verdicts are kept in the user's cache under all that they depend on, so the next start costs nothing. A file that
    # is missing, damaged, or of another key is no verdict; with a cache that cannot be used the check runs at every
    # start. A check may be collective, so this process' kept verdict counts only if every process has one.
    path = verdict = None
    try:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        path = user_cache_folder("verdicts") / f"{name}.json"
        verdict = read_verdict(path, key)
    except UserError as error:
        _LOG.warning(UNCACHED, error)
    if "no" in hosts.gather_text("kept verdict of grouped_matmul", "yes" if verdict else "no", WAIT_SECONDS):
        verdict = check_experts(unchecked, device, options)
        if path is not None and verdict[0] != NO_MEMORY:  # more memory may be free next time
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            kept = {"key": key, "outcome": verdict[0], "detail": verdict[1], "date": today}
            try:
                write_cached(path, json.dumps(kept, indent=1) + "\n")
            except UserError as error:
                _LOG.warning(UNCACHED, error)
    elif verdict[0] != PASSES:
        verdict = verdict[0], f"{verdict[1]} (so it was at an earlier start; delete {path} to compare again)"
    texts = hosts.gather_text("check of grouped_matmul", json.dumps(verdict), WAIT_SECONDS)
    outcome, detail = max(map(json.loads, texts), key=lambda verdict: OUTCOMES.index(verdict[0]))  # the first of these
    record = {"wanted": wanted, "compared": used, "used": used, "outcome": outcome, "detail": detail}
    if outcome == PASSES:
        return session, {"grouped_matmul": record}

    what = {
        DIFFERS: f"computes something else than {PROVEN!r}: {detail}",
        FAILS: f"fails before the first step: {detail}",
        NO_MEMORY: f"could not be compared with {PROVEN!r}, since not even that fits into memory: {detail}",
    }[outcome]
    remedy = f"set MoEConfig.grouped_matmul = {PROVEN!r}"
    if wanted != "auto":
        if outcome != NO_MEMORY:
            raise UserError(f"MoEConfig.grouped_matmul ({used!r}) {what}; {remedy}")
        said = f"MoEConfig.grouped_matmul ({used!r}) {what}; the run goes on with it, unchecked"
    else:
        if not device_answers(device):
            raise UserError(
                f"MoEConfig.grouped_matmul ('auto': {used!r}) {what}; the device does not answer any more: give the "
                f"same command again, or {remedy}"
            )
        said = f"MoEConfig.grouped_matmul ('auto'): {used!r} {what}; the run takes {PROVEN!r}, which is slower"

        def proven(owner):  # layout and shardings do not depend on the grouped matmul
            return dataclasses.replace(owner, moe=dataclasses.replace(owner.moe, grouped_matmul=PROVEN))

        teacher, config, model = session.teacher, proven(session.config), proven(session.model)
        if teacher is not None:
            teacher = dataclasses.replace(teacher, model=proven(teacher.model))
        session = dataclasses.replace(session, config=config, model=model, teacher=teacher)
        record["used"] = PROVEN
    if jax.process_index() == 0:
        _LOG.warning("%s", said)
    return session, {"grouped_matmul": record}


def unverified(session: Session, device: jax.Device) -> list[tuple[str, ModelConfig]]:
    """Return the unverified grouped matmuls that the session uses, each with the sizes of its experts on one device."""
    unchecked = []
    for hidden_dim, name in session.grouped_matmuls.items():
        below = name.rpartition(":")[2]  # the one that it stands over
        if below in KERNELS or (below == "ragged" and device.platform in ("gpu", "cuda")):
            unchecked.append((name, dataclasses.replace(session.config.model, hidden_dim=hidden_dim)))
    return unchecked


def check_experts(unchecked: list[tuple[str, ModelConfig]], device: jax.Device, options: dict | None) -> Verdict:
    """Return the verdict on these grouped matmuls; the first that differs counts.

    Raises:
      UserError: what the user has to change, such as dims that the implementation does not take.
    """
    try:
        for implementation, config in unchecked:
            size, limit, where = compare_expert(implementation, config, device, options)
            if size > limit:
                return DIFFERS, where
    except UserError:
        raise
    except Exception as error:  # whatever lowering, compiling or running it may raise
        return verdict_of(error)
    return PASSES, ""


def verdict_of(error: Exception) -> Verdict:
    """Return NO_MEMORY or FAILS, and the first line of what a compiler or a device raised."""
    # A lack of a kernel's shared memory has one size on every start, so the kernel fails always.
    text = str(error).lower()
    full = isinstance(error, MemoryError) or "resource_exhausted" in text or "out of memory" in text
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]  # some have only their name
    return NO_MEMORY if full and "shared memory" not in text else FAILS, (lines or [type(error).__name__])[0]


def device_answers(device: jax.Device) -> bool:
    """Say whether a device still works: an invalid access of a kernel ends CUDA for its whole process."""
    try:
        return int(jnp.sum(jax.device_put(jnp.ones(4, jnp.int32), device))) == 4
    except Exception:  # any error of the backend
        return False


def source_digest() -> str:
    """Return a hash of the package's source."""
    source, package = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for path in sorted(package.rglob("*.py")):
        source.update(path.read_bytes())
    return source.hexdigest()[:16]


def verdict_key(device: jax.Device, options: dict | None, unchecked: list[tuple[str, ModelConfig]]) -> dict:
    """Return all that a verdict depends on, as JSON data."""
    try:
        driver = DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError:  # no NVIDIA driver
        driver = ""
    fields = ("model_dim", "hidden_dim", "dtype", "param_dtype", "activation")
    return {
        "check": "expert",
        "compared": [[name, *(getattr(config, field) for field in fields)] for name, config in unchecked],
        "options": options,
        "device": device.device_kind,
        "platform": device.client.platform_version,  # of CUDA, as jaxlib was built for
        "driver": driver,
        "flags": os.environ.get("XLA_FLAGS", ""),  # kernels depend on them too
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "source": source_digest(),
    }


def read_verdict(path: Path, key: dict) -> Verdict | None:
    """Return the verdict that a file keeps under a key, None where there is none."""
    try:
        held = json.loads(read_cached(path) or b"null")
        outcome, detail = held["outcome"], held["detail"]
        return (outcome, detail) if held["key"] == key and outcome in OUTCOMES and isinstance(detail, str) else None
    except (ValueError, TypeError, KeyError):
        return None


# Whole models cannot be compared: there a rounding that flips a choice of the gate sends a token to another expert, and
# two right kernels come out 3 to 7% apart at 12 layers. Here rows are given, so only rounding is left.
# The cases hold what kernels often get wrong: groups that are empty (first, between, last), of one row, longer than two
# tiles with a part of a tile at the end, and a multiple of a tile; a number of rows that no tile divides; NaN in the
# rows of no group; and weights both as the home experts' param_dtype bank and as replicas of the compute dtype. The
# taller case has 128 rows and more a group on average, where kernels take their tall tiles, the other has fewer.
# rows R, group sizes [G]; the last two groups are replicas
CASES = (
    (1000, (0, 517, 1, 0, 260, 128, 0)),
    (328, (0, 150, 1, 0, 70, 64, 0)),
)
REPLICAS = 2
ROUNDINGS = 16


def rounding_limit(config: ModelConfig, platform: str) -> float:
    """Return the largest difference, as in `compare_expert`, that rounding explains: 16 u + 16 sqrt(n) u32."""
    # u is half the distance from 1 to the next number of the dtype (2^-8 in bfloat16; float32 counts as TF32, 2^-11, on
    # GPUs, whose matmuls round their operands so). On the longest path, to the gradient of `w_in`, values are rounded
    # four times before the last matmul (pre-activation, hidden row or its gradient, gradient of the pre-activation) and
    # once after it. A rounding is off by u / sqrt(3) at most in root mean square and not correlated from entry to
    # entry, so four of them through matmuls give an error of 1.2 u of a row's size in root mean square, and 7 u at the
    # 6 standard deviations that one in 10^9 entries passes; the last rounding adds u of the entry itself. 16 u leaves a
    # factor of two, and what a kernel gets wrong is off by about 1. A sum of n products in float32 (u32 = 2^-24;
    # float64 sums in its own) adds sqrt(n) u32 in root mean square.
    dtype = jnp.dtype(config.dtype)
    unit = float(jnp.finfo(dtype).eps) / 2
    if dtype == jnp.float32 and platform != "cpu":
        unit = 2.0**-11
    acc_unit = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps) / 2
    longest = max(config.model_dim, config.hidden_dim, CASES[0][0])
    return ROUNDINGS * (unit + longest**0.5 * acc_unit)


def compare_expert(
    implementation: str, config: ModelConfig, device, compiler_options: dict | None = None
) -> tuple[float, float, str]:
    """Return how far an implementation is from `reference` in float32, in the case and entry where it is furthest.

    Args:
      implementation: of the grouped matmul.
      config: whose model_dim, hidden_dim (F), dtype, param_dtype and activation count.
      device: that runs both.
      compiler_options: for both programs.

    Returns:
      size |got - want| / (|want| + root mean square of that row or that group's gradient), inf for what is not a
      number, or not zero where it must be; the most that rounding explains; and a line that names the entry.

    Raises:
      whatever lowering, compiling or running the implementation raises.
    """
    limit = rounding_limit(config, device.platform)
    acc_dtype, furthest = jnp.promote_types(config.dtype, jnp.float32), (-1.0, "")
    for rows, sizes in CASES:
        compute = jax.jit(of_implementation, static_argnums=(0, 1), compiler_options=compiler_options)
        with jax.default_device(device):
            arrays, group_sizes = draw_arrays(config, rows, sizes), jnp.array(sizes, jnp.int32)
            got = compute(implementation, config.activation, group_sizes, *arrays)
            # without rounding in between
            arrays = jax.tree.map(lambda array: array.astype(config.dtype).astype(acc_dtype), arrays)
            with jax.default_matmul_precision("highest"):
                want = compute("reference", config.activation, group_sizes, *arrays)
            off = jax.device_get(_compare(got, want))
        for name, per_index in off.items():
            index, size = int(np.argmax(per_index)), float(np.max(per_index))
            part = "row" if name in ("output", "gradient of the rows") else "group"
            where = f"{name}, {part} {index}, is {size:.2g} of its size off, more than {limit:.2g}"
            if size > furthest[0]:
                furthest = size, where
    return furthest[0], limit, furthest[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw_arrays(config: ModelConfig, rows: int, sizes: tuple[int, ...]):
    """Return x [R, M], dout [R, M], and the weights [G, ...] of homes and replicas; entries are uniform, so bounded."""
    keys = iter(jax.random.split(jax.random.key(0), 10))

    def uniform(*dims, dtype, scale=1.0):
        bound = scale * 3.0**0.5
        return jax.random.uniform(next(keys), dims, jnp.float32, -bound, bound).astype(dtype)

    unowned = jnp.arange(rows)[:, None] >= sum(sizes)
    x, dout = (
        jnp.where(unowned, jnp.nan, uniform(rows, config.model_dim, dtype=config.dtype)).astype(config.dtype)
        for _ in range(2)
    )
    homes, replicas = {}, {}
    for name in weight_names(config.activation):
        dims = (config.model_dim, config.hidden_dim)
        dims = dims[::-1] if name == "w_out" else dims
        scale = dims[0] ** -0.5
        homes[name] = uniform(len(sizes) - REPLICAS, *dims, dtype=config.param_dtype, scale=scale)
        replicas[name] = uniform(REPLICAS, *dims, dtype=config.dtype, scale=scale)
    return x, dout, homes, replicas


def of_implementation(implementation: str, activation: str, group_sizes, x, dout, homes, replicas) -> dict:
    """Return {name: parts} of the FFN's output and gradients by an implementation; traced."""

    def ffn(x, grad_sinks):
        served = {}
        for name, bank in homes.items():
            backwards = jnp.arange(bank.shape[0] - 1, -1, -1, dtype=jnp.int32)  # a bank's order is not the groups'
            own = GroupedWeights(bank=bank[::-1], slots=backwards, grad_sink=grad_sinks[0][name])
            slots = jnp.arange(REPLICAS, dtype=jnp.int32)
            served[name] = own, GroupedWeights(bank=replicas[name], slots=slots, grad_sink=grad_sinks[1][name])
        sizes = jnp.asarray(group_sizes, jnp.int32)
        return expert_ffn(x, sizes, served, activation=activation, implementation=implementation)

    out, pull_back = jax.vjp(ffn, x, jax.tree.map(jnp.zeros_like, (homes, replicas)))
    dx, (dhomes, dreplicas) = pull_back(dout)
    dweights = {f"gradient of {name}": (dhomes[name], dreplicas[name]) for name in homes}
    return {"output": (out,), "gradient of the rows": (dx,), **dweights}


@jax.jit
def _compare(got: dict, want: dict) -> dict:
    """Return {name: [R] or [G]}, the largest size, as in `compare_expert`, of each row or group."""
    largest = {}
    for name, parts in want.items():
        acc_dtype = parts[0].dtype
        wanted = jnp.concatenate([part.astype(acc_dtype) for part in parts])
        found = jnp.concatenate([part.astype(acc_dtype) for part in got[name]])
        trailing = tuple(range(1, wanted.ndim))
        scale = jnp.abs(wanted) + jnp.sqrt(jnp.mean(jnp.square(wanted), axis=trailing, keepdims=True))
        off = jnp.where(found == wanted, 0, jnp.abs(found - wanted) / scale)
        largest[name] = jnp.max(jnp.where(jnp.isnan(off), jnp.inf, off), axis=trailing)
    return largest
