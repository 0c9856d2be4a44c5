"""Compare an unproven grouped matmul with a proven one before training on it.

Inputs: a `Session`, before it has a state, and the job's processes. Outputs: the session, with a proven grouped matmul
where 'auto' had chosen one that does not hold, and a record for environment.json.
"""

# Some are not proven by the tests of this project: `hopper` and `mosaic`, never run here on the GPUs that they are for;
# and `lax.ragged_dot` on GPUs, which newer compilers lower to cuDNN. A run that uses one compares it first
# (`expert_check`).
#
#     outcome                  field says 'auto'                      field names it
#     equal but for rounding   goes on                                goes on
#     differs, or fails        goes on with the proven one, says so   UserError
#     no memory for the check  goes on with the proven one, says so   goes on unchecked, says so
#
# All processes of a job decide alike: by the worst of their outcomes.

from __future__ import annotations

import ast
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

from moe_jax.data.user_cache import read_cached, user_cache_folder, write_cached
from moe_jax.errors import UserError
from moe_jax.models.config import ModelConfig
from moe_jax.training.compiling import compiler_options
from moe_jax.training.expert_check import compare_expert
from moe_jax.training.program import Session
from moe_jax.training.watchdog import Hosts

_LOG = logging.getLogger(__name__)
DRIVER = Path("/proc/driver/nvidia/version")
PASSES, DIFFERS, FAILS, NO_MEMORY = "passes", "differs", "fails", "no memory"
OUTCOMES = (PASSES, NO_MEMORY, FAILS, DIFFERS)  # from best to worst
PROVEN = "fused"
KERNELS = ("hopper", "mosaic", "mosaic_sparing")  # grouped matmuls that no GPU has run for this project
WAIT_SECONDS = 900.0  # for another process' compilations
Verdict = tuple[str, str]  # one of OUTCOMES, and what differs or why it failed, one line


def settle_unproven(session: Session, hosts: Hosts) -> tuple[Session, dict]:
    """Compare the unproven grouped matmul that the session uses, before anything large is in the devices' memory.

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
    doubted = unproven(session, device)
    if not doubted:
        return session, {}
    # what concerns several processes is set for all programs of a process (`training/hosts.py`)
    options = compiler_options(device.platform, deterministic=session.config.train.deterministic)
    key, wanted, used = verdict_key(device, options, doubted), session.config.moe.grouped_matmul, doubted[0][0]
    # A check may be collective, so this process' kept verdict counts only if every process has one.
    path = _verdict_path(key)
    verdict = read_verdict(path, key)
    if "no" in hosts.gather_text("kept verdict of grouped_matmul", "yes" if verdict else "no", WAIT_SECONDS):
        verdict = check_experts(doubted, device, options)
        if path is not None and verdict[0] != NO_MEMORY:  # more memory may be free next time
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            kept = {"key": key, "outcome": verdict[0], "detail": verdict[1], "date": today}
            try:
                write_cached(path, json.dumps(kept, indent=1) + "\n")
            except UserError as error:
                _say_uncached(str(error))
    elif verdict[0] != PASSES:
        verdict = verdict[0], f"{verdict[1]} (so it was at an earlier start; delete {path} to compare again)"
    found = [
        json.loads(text) for text in hosts.gather_text("check of grouped_matmul", json.dumps(verdict), WAIT_SECONDS)
    ]
    worst = max(OUTCOMES.index(outcome) for outcome, _ in found)
    outcome, detail = next(verdict for verdict in found if verdict[0] == OUTCOMES[worst])
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
        try:  # an invalid access of a kernel ends CUDA for its whole process
            usable = int(jnp.sum(jax.device_put(jnp.ones(4, jnp.int32), device))) == 4
        except Exception:  # any error of the backend
            usable = False
        if not usable:
            raise UserError(
                f"MoEConfig.grouped_matmul ('auto': {used!r}) {what}; the device does not answer any more: give the "
                f"same command again, or {remedy}"
            )
        said = f"MoEConfig.grouped_matmul ('auto'): {used!r} {what}; the run takes {PROVEN!r}, which is slower"
        # layout and shardings do not depend on the grouped matmul
        changed, owners = {}, {"config": session.config, "model": session.model}
        if session.teacher is not None:
            owners["teacher"] = session.teacher.model
        for name, owner in owners.items():
            changed[name] = dataclasses.replace(owner, moe=dataclasses.replace(owner.moe, grouped_matmul=PROVEN))
        if session.teacher is not None:
            changed["teacher"] = dataclasses.replace(session.teacher, model=changed["teacher"])
        session, record["used"] = dataclasses.replace(session, **changed), PROVEN
    if jax.process_index() == 0:
        _LOG.warning("%s", said)
    return session, {"grouped_matmul": record}


def unproven(session: Session, device: jax.Device) -> list[tuple[str, ModelConfig]]:
    """Return the unproven grouped matmuls that the session uses, each with the sizes of its experts on one device."""
    doubted = []
    for hidden_dim, name in session.grouped_matmuls.items():
        below = name.rpartition(":")[2]  # the one that it stands over
        if below in KERNELS or (below == "ragged" and device.platform in ("gpu", "cuda")):
            doubted.append((name, dataclasses.replace(session.config.model, hidden_dim=hidden_dim)))
    return doubted


def check_experts(doubted: list[tuple[str, ModelConfig]], device: jax.Device, options: dict | None) -> Verdict:
    """Return the verdict on these grouped matmuls; the first that differs counts.

    Raises:
      UserError: what the user has to change, such as dims that the implementation does not take.
    """
    try:
        for implementation, config in doubted:
            size, limit, where = compare_expert(implementation, config, device, options)
            if size > limit:
                return DIFFERS, where
    except UserError:
        raise
    except Exception as error:  # whatever lowering, compiling or running it may raise
        # A lack of a kernel's shared memory has one size on every start, so the kernel fails always.
        text = str(error).lower()
        full = isinstance(error, MemoryError) or "resource_exhausted" in text or "out of memory" in text
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]  # some have only their name
        return NO_MEMORY if full and "shared memory" not in text else FAILS, (lines or [type(error).__name__])[0]
    return PASSES, ""


# Verdicts are kept in the user's cache under all that they depend on, so the next start costs nothing. A file that is
# missing, damaged, or of another key is no verdict; with a cache that cannot be used the check runs at every start,
# logged once.
def verdict_key(device: jax.Device, options: dict | None, doubted: list[tuple[str, ModelConfig]]) -> dict:
    """Return all that a verdict depends on, as JSON data."""
    try:
        driver = DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError:  # no NVIDIA driver
        driver = ""
    fields = ("model_dim", "hidden_dim", "dtype", "param_dtype", "activation")
    return {
        "check": "expert",
        "compared": [[name, *(getattr(config, field) for field in fields)] for name, config in doubted],
        "options": options,
        "device": device.device_kind,
        "platform": device.client.platform_version,  # of CUDA, as jaxlib was built for
        "driver": driver,
        "flags": os.environ.get("XLA_FLAGS", ""),  # kernels depend on them too
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "source": source_digest(),
    }


@functools.cache
def source_digest() -> str:
    """Return a digest of this file, of the check, and of what that imports of this package, in functions too."""
    package = Path(__file__).resolve().parents[1]
    waiting, found = ["moe_jax.training.expert_check"], {}
    while waiting:
        name = waiting.pop()
        base = package.parent.joinpath(*name.split("."))
        path = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
        if name in found or path is None or package not in path.parents:
            continue
        found[name] = path
        # A parent's __init__ runs too, but counts only where it is named itself: that of `moe` exports the whole layer.
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in sorted(found):
        digest.update(found[name].read_bytes())
    return digest.hexdigest()[:16]


def _verdict_path(key: dict) -> Path | None:
    """Return the file of a key, None where the user's cache cannot be used."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    try:
        return user_cache_folder("verdicts") / f"{name}.json"
    except UserError as error:
        _say_uncached(str(error))
        return None


@functools.cache
def _say_uncached(why: str) -> None:
    _LOG.warning("kernels are compared again at every start: %s", why)


def read_verdict(path: Path | None, key: dict) -> Verdict | None:
    """Return the verdict that a file keeps under a key, None where there is none."""
    text = None if path is None else read_cached(path)
    try:
        held = json.loads(text or b"null")
        outcome, detail = held["outcome"], held["detail"]
        return (outcome, detail) if held["key"] == key and outcome in OUTCOMES and isinstance(detail, str) else None
    except (ValueError, TypeError, KeyError):
        return None
