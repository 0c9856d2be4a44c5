"""The public interface: the names of `moe_jax.moe`. A failure here is a question: break other people's programs?"""

import moe_jax.moe

NAMES = (
    "GateStats GroupedWeights MoEConfig MoELayer balance_loss choose_experts grouped_matmul make_moe reference_moe "
    "z_loss"
)


def test_names():
    assert list(moe_jax.moe.__all__) == NAMES.split() and all(hasattr(moe_jax.moe, name) for name in NAMES.split())
