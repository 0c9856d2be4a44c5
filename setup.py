"""Install moe_jax. Requirements stand once, in requirements.txt, by extra; the CUDA wheels are extras of their own."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent


def requirements() -> dict[str, list[str]]:
    """Return heading -> lines of requirements.txt."""
    groups: dict[str, list[str]] = {}
    heading = ""
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(r"# \[(\w+)\]", line.strip())
        if found:
            heading = found.group(1)
            groups[heading] = []
        elif line.strip() and not line.startswith("#"):
            groups[heading].append(line.strip())
    return groups


def version() -> str:
    """Return the version that moe_jax/__init__.py states."""
    text = (ROOT / "moe_jax" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


groups = requirements()
core = groups.pop("core")
jax_range = next(line for line in core if line.startswith("jax>")).removeprefix("jax")
extras = {
    **groups,
    "cuda12": [f"jax[cuda12]{jax_range}"],
    "cuda13": [f"jax[cuda13]{jax_range}"],
    "all": sorted(line for lines in groups.values() for line in lines),
}

setup(
    name="moe_jax",
    version=version(),
    description="Mixture-of-experts language models in JAX, on many GPUs, with one plan format for every balancer",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["moe_jax", "moe_jax.*"]),
    package_data={"moe_jax.cluster": ["devices/*.txt", "measured/*"]},
    install_requires=core,
    extras_require=extras,
)
