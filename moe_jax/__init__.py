"""moe_jax: mixture-of-experts language models in JAX, on many GPUs, with one plan format for every balancer.

Importing this package imports nothing heavy; import the package that you need (`moe_jax.moe`, `moe_jax.placement`,
...).
"""

__version__ = "0.1.0"
