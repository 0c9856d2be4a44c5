"""Install moe_jax. Requirements stand once, in requirements.txt, by extra; the CUDA wheels are extras of their own."""

import re
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED = ("configs", "docs/bench/train_sizes.json")  # what moe_jax/shipped.py finds beside the package, or in a wheel
DEVELOPMENT = ("notebook", "test", "docs")  # extras that [all] leaves out


class BuildWithConfigs(build_py):
    """Copy into a wheel what stands beside the package in a checkout; an editable install finds it there."""

    def run(self):
        super().run()
        if getattr(self, "editable_mode", False):
            return
        for name in SHIPPED:
            target = Path(self.build_lib) / "moe_jax" / "shipped" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            copy(ROOT / name, target, **({"dirs_exist_ok": True} if copy is shutil.copytree else {}))


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
groups["docs"] = ["mkdocs-material>=9.6,<10"]  # no test and no demo needs it
core = groups.pop("core")
jax_range = next(line for line in core if line.startswith("jax>")).removeprefix("jax")
extras = {
    **groups,
    "cuda12": [f"jax[cuda12]{jax_range}"],
    "cuda13": [f"jax[cuda13]{jax_range}"],
    "all": sorted(line for name, lines in groups.items() if name not in DEVELOPMENT for line in lines),
}

setup(
    name="moe_jax",
    version=version(),
    description="Mixture-of-experts language models in JAX, on many GPUs, with one plan format for every balancer",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    keywords="jax mixture-of-experts expert-parallelism load-balancing language-models",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["moe_jax", "moe_jax.*"]),
    package_data={
        "moe_jax": ["py.typed"],
        "moe_jax.cluster": ["devices/*.txt", "measured/*"],
        "moe_jax.observe": ["*.html"],
        "moe_jax.papers": ["*.toml"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["moe-jax = moe_jax.__main__:main"]},
    install_requires=core,
    extras_require=extras,
)
