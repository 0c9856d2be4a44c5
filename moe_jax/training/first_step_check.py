"""Compare an unproven grouped matmul with a proven one before training on it.

Inputs: a `Session`, before it has a state, and the job's processes. Outputs: the session, with a proven grouped matmul
where 'auto' had chosen one that does not hold, and a record for environment.json. Some are not proven by the tests of
this project: `hopper` and `mosaic`, never run here on the GPUs that they are for; and `lax.ragged_dot` on GPUs, which
newer compilers lower to cuDNN. A run that uses one compares it first, with a few MB, on one expert FFN
(`expert_check`). Outcomes are kept (`Verdict`), so the next start costs nothing, and neither does a run that uses none
of them.

    outcome                  field says 'auto'                      field names it
    equal but for rounding   goes on                                goes on
    differs, or fails        goes on with the proven one, says so   UserError
    no memory for the check  goes on with the proven one, says so   goes on unchecked, says so

All processes of a job decide alike: by the worst of their outcomes.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib

from moe_jax.data.user_cache import read_cached, user_cache_folder, write_cached
from moe_jax.errors import UserError
from moe_jax.training.compiling import compiler_options
from moe_jax.training.expert_check import ExpertShape, compare_expert
from moe_jax.training.hosts import Hosts
from moe_jax.training.program import Session

_LOG = logging.getLogger(__name__)
FOLDER = "verdicts"
DRIVER = Path("/proc/driver/nvidia/version")
PASSES, DIFFERS, FAILS, NO_MEMORY = "passes", "differs", "fails", "no memory"
CHECKS = ("moe_jax.training.expert_check",)
OUTCOMES = (PASSES, NO_MEMORY, FAILS, DIFFERS)  # from best to worst


# Outcomes are kept in the user's cache under all that they depend on (kernel, sizes, device, driver, versions). A file
# that is missing, damaged, or of another key is no verdict; with a cache that cannot be used the check runs at every
# start, logged once.
@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of one check.

    Attributes:
      outcome: 'passes', 'differs', 'fails' (it raised), or 'no memory' (it did not fit, so nothing is known).
      detail: what differs, or why it failed; one line.
    """

    outcome: str
    detail: str = ""

    def __post_init__(self):
        if self.outcome not in OUTCOMES or not isinstance(self.detail, str):
            raise ValueError(f"no verdict: {self.outcome!r}, {self.detail!r}")


def verdict_key(device: jax.Device, **what) -> dict:
    """Return the key of a check on a device: `what`, and what runs it.

    Args:
      what: plain data for JSON.
    """
    return {
        **what,
        "device": device.device_kind,
        "platform": device.client.platform_version,  # of CUDA, as jaxlib was built for
        "driver": driver_version(),
        "flags": os.environ.get("XLA_FLAGS", ""),  # kernels depend on them too
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "source": source_digest(),
    }


def driver_version() -> str:
    """Return the line in which the NVIDIA driver names its version, empty without one."""
    try:
        return DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


@functools.cache
def source_digest() -> str:
    """Return a digest of the checks and of what they import of this package: another version is checked again."""
    digest = hashlib.sha256()
    for path in (Path(__file__).resolve().with_name("first_step_check.py"), *imported_sources(CHECKS)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def imported_sources(modules: Iterable[str]) -> list[Path]:
    """Return the files of these modules and of those of this package that their imports name, in functions too."""
    package = Path(__file__).resolve().parents[1]
    waiting, found = list(modules), {}
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
    return [found[name] for name in sorted(found)]


def read_verdict(key: dict) -> Verdict | None:
    """Return the verdict kept under a key, None where there is none."""
    path = verdict_path(key)
    text = None if path is None else read_cached(path)
    try:
        held = json.loads(text or b"null")
        return Verdict(outcome=held["outcome"], detail=held["detail"]) if held["key"] == key else None
    except (ValueError, TypeError, KeyError):
        return None


def keep_verdict(key: dict, verdict: Verdict) -> None:
    """Keep a verdict under a key; where that cannot be done, log it once and go on."""
    path = verdict_path(key)
    if path is None or verdict.outcome == NO_MEMORY:  # more memory may be free next time
        return
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    record = {"key": key, **dataclasses.asdict(verdict), "date": today}
    try:
        write_cached(path, json.dumps(record, indent=1) + "\n")
    except UserError as error:
        _say_uncached(str(error))


def verdict_path(key: dict) -> Path | None:
    """Return the file of a key, None where the user's cache cannot be used."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    try:
        return user_cache_folder(FOLDER) / f"{name}.json"
    except UserError as error:
        _say_uncached(str(error))
        return None


@functools.cache
def _say_uncached(why: str) -> None:
    _LOG.warning("kernels are compared again at every start: %s", why)


PROVEN = "fused"
KERNELS = ("hopper", "mosaic", "mosaic_sparing")  # grouped matmuls that no GPU has run for this project
WAIT_SECONDS = 900.0  # for another process' compilations


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
    found = unproven(session)
    if found is None:
        return session, {}
    compared, check, key = found
    wanted, used = session.config.moe.grouped_matmul, compared
    verdict = agree(hosts, kept_by_all(hosts, key) or fresh_verdict(check, key))
    if verdict.outcome != PASSES:
        used = decide(wanted, compared, verdict, session)
        if used != compared:
            session = with_grouped_matmul(session, used)
    record = {"wanted": wanted, "compared": compared, "used": used, **dataclasses.asdict(verdict)}
    return session, {"grouped_matmul": record}


def unproven(session: Session) -> tuple[str, Callable[[], Verdict], dict] | None:
    """Return (the unproven grouped matmul that the session uses, its check, the verdict's key), None without one."""
    device = local_device(session)
    config, doubted = session.config.model, []
    for hidden_dim, name in session.grouped_matmuls.items():
        below = name.rpartition(":")[2]  # the one that it stands over
        if below in KERNELS or (below == "ragged" and device.platform in ("gpu", "cuda")):
            shape = ExpertShape(
                model_dim=config.model_dim,
                hidden_dim=hidden_dim,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                activation=config.activation,
            )
            doubted.append((name, shape))
    if not doubted:
        return None
    # what concerns several processes is set for all programs of a process (`training/hosts.py`)
    options = compiler_options(device.platform, deterministic=session.config.train.deterministic)
    (matmul, shape), *others = doubted
    rest = {"others": [(name, dataclasses.asdict(other)) for name, other in others]} if others else {}
    key = verdict_key(
        device, check="expert", implementation=matmul, options=options, **dataclasses.asdict(shape), **rest
    )
    return matmul, lambda: check_experts(doubted, device, options), key


def local_device(session: Session) -> jax.Device:
    """Return the first device of the mesh that belongs to this process."""
    return next(d for d in session.roles.mesh.devices.flat if d.process_index == jax.process_index())


def kept_by_all(hosts: Hosts, key: dict) -> Verdict | None:
    """Return this process' kept verdict if every process has one: a check may be collective, so all or none run it."""
    kept = read_verdict(key)
    if "no" in hosts.gather_text("kept verdict of grouped_matmul", "no" if kept is None else "yes", WAIT_SECONDS):
        return None
    assert kept is not None
    if kept.outcome == PASSES:
        return kept
    where = f"{kept.detail} (so it was at an earlier start; delete {verdict_path(key)} to compare again)"
    return dataclasses.replace(kept, detail=where)


def fresh_verdict(check: Callable[[], Verdict], key: dict) -> Verdict:
    """Return the verdict of a check, and keep it under its key.

    Raises:
      UserError: what the user has to change, such as dims that the implementation does not take.
    """
    try:
        verdict = check()
    except UserError:
        raise
    except Exception as error:  # whatever lowering, compiling or running it may raise
        # A lack of a kernel's shared memory has one size on every start, so the kernel fails always.
        text = str(error).lower()
        full = isinstance(error, MemoryError) or "resource_exhausted" in text or "out of memory" in text
        outcome = NO_MEMORY if full and "shared memory" not in text else FAILS
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]  # some have only their name
        verdict = Verdict(outcome=outcome, detail=lines[0] if lines else type(error).__name__)
    keep_verdict(key, verdict)
    return verdict


def check_experts(used: list[tuple[str, ExpertShape]], device, options: dict | None = None) -> Verdict:
    """Compare each of these grouped matmuls with plain matmuls on its FFN; the first that differs counts."""
    worst = [compare_expert(implementation, shape, device, options) for implementation, shape in used]
    differing = [str(found) for found in worst if not found.explained]
    return Verdict(outcome=DIFFERS, detail=differing[0]) if differing else Verdict(outcome=PASSES)


def agree(hosts: Hosts, verdict: Verdict) -> Verdict:
    """Return the worst verdict of all processes, of the first process that has it; a barrier."""
    own = json.dumps(dataclasses.asdict(verdict))
    texts = hosts.gather_text("check of grouped_matmul", own, WAIT_SECONDS)
    return max((Verdict(**json.loads(text)) for text in texts), key=lambda given: OUTCOMES.index(given.outcome))


def decide(wanted: str, used: str, verdict: Verdict, session: Session) -> str:
    """Return the grouped matmul that the run takes, and log the reason; see the table at the top.

    Raises:
      UserError: as in the table, or because the device no longer works.
    """
    what = {
        DIFFERS: f"computes something else than {PROVEN!r}: {verdict.detail}",
        FAILS: f"fails before the first step: {verdict.detail}",
        NO_MEMORY: f"could not be compared with {PROVEN!r}, since not even that fits into memory: {verdict.detail}",
    }[verdict.outcome]
    remedy = f"set MoEConfig.grouped_matmul = {PROVEN!r}"
    if wanted != "auto":
        if verdict.outcome != NO_MEMORY:
            raise UserError(f"MoEConfig.grouped_matmul ({used!r}) {what}; {remedy}")
        _say(f"MoEConfig.grouped_matmul ({used!r}) {what}; the run goes on with it, unchecked")
        return used
    if not usable(local_device(session)):
        raise UserError(
            f"MoEConfig.grouped_matmul ('auto': {used!r}) {what}; the device does not answer any more: give the same "
            f"command again, or {remedy}"
        )
    _say(f"MoEConfig.grouped_matmul ('auto'): {used!r} {what}; the run takes {PROVEN!r}, which is slower")
    return PROVEN


def usable(device: jax.Device) -> bool:
    """Return whether a device still computes: an invalid access of a kernel ends CUDA for its whole process."""
    try:
        return int(jnp.sum(jax.device_put(jnp.ones(4, jnp.int32), device))) == 4
    except Exception:  # any error of the backend
        return False


def with_grouped_matmul(session: Session, name: str) -> Session:
    """Return the session with another grouped matmul; layout and shardings do not depend on it."""
    config, teacher = session.config, session.teacher

    def changed(owner):  # the config, or a model
        return dataclasses.replace(owner, moe=dataclasses.replace(owner.moe, grouped_matmul=name))

    if teacher is not None:
        teacher = dataclasses.replace(teacher, model=changed(teacher.model))
    return dataclasses.replace(session, config=changed(config), model=changed(session.model), teacher=teacher)


def _say(text: str) -> None:
    if jax.process_index() == 0:
        _LOG.warning("%s", text)
