"""moe_jax: mixture-of-experts language models in JAX, on many GPUs, with one plan format for every balancer.

Importing this package imports nothing heavy; import the subpackage that you need, such as `moe_jax.moe`.
"""

__version__ = "0.1.0"
