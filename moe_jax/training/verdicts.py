"""The result of a check of a kernel, stored in the user's cache so that the next start need not compute it again.

Inputs: a key, everything that the outcome depends on (kernel, sizes, device, driver, versions). Outputs: the `Verdict`
that was kept under it, or None. A file that is missing, damaged, or of another key is no verdict; with a cache that
cannot be used the check runs at every start, logged once.
"""

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
import jaxlib

from moe_jax.errors import UserError
from moe_jax.user_cache import read_cached, user_cache_folder, write_cached

_LOG = logging.getLogger(__name__)
FOLDER = "verdicts"
DRIVER = Path("/proc/driver/nvidia/version")
PASSES, DIFFERS, FAILS, NO_MEMORY = "passes", "differs", "fails", "no memory"
OUTCOMES = (PASSES, NO_MEMORY, FAILS, DIFFERS)  # from best to worst


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
    """Return a digest of this package's kernels and checks: another version of either is checked again."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for pattern in ("moe/*.py", "collectives/*.py", "training/*_check.py"):
        for path in sorted(package.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


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
