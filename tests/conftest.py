"""Every test sees eight CPU devices, strict shapes and strict warnings, whatever the machine has."""

import os

from support.quick_compiles import QUICK

os.environ["JAX_PLATFORMS"] = os.environ.get("MOE_JAX_TEST_PLATFORM", "cpu")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK} {os.environ.get('XLA_FLAGS', '')}"
os.environ.setdefault("XDG_CACHE_HOME", os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "xdg"))

# children that a test starts find this checkout, whether it is installed or not, and tests/support
os.environ["PYTHONPATH"] = os.pathsep.join(
    [os.path.abspath(os.path.join(os.path.dirname(__file__), "..")), os.path.abspath(os.path.dirname(__file__))]
    + list(filter(None, [os.environ.get("PYTHONPATH", "")]))
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_threefry_partitionable", True)
