"""What the machine is, as jax sees it."""

from __future__ import annotations

import sys
from importlib import metadata


def describe(context):
    """Record versions and the first device."""
    import jax

    versions = {}
    for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    context.record(
        **versions,
        python=".".join(map(str, sys.version_info[:3])),
        platform=device.platform,
        device_kind=device.device_kind,
        devices=len(jax.devices()),
        compute_capability=str(getattr(device, "compute_capability", "")),
        memory_bytes=int((device.memory_stats() or {}).get("bytes_limit", 0)),
    )
