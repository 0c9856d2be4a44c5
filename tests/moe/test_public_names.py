"""The public interface: the names of `moe_jax.moe`, their parameters, and their defaults.

A failure here is a question: is the change worth breaking other people's programs for? If so, change this file too.
"""

import inspect

import moe_jax.moe

SIGNATURES = {
    "GateStats": (
        "(counts, probability, squared_logsumexp, entropy, dropped, first_counts=None, completed=None, "
        "sequence_balance=None, choices=None)"
    ),
    "GroupedWeights": "(*, bank, slots, grad_sink=None, constant=False)",
    "MoEConfig": (
        "(*, num_experts=8, top_k=2, router='topk', capacity_factor=None, min_capacity=4, drop='position', "
        "renormalize=True, gate_noise=0.0, router_dtype='auto', balance_over='batch', cluster='', "
        "record_choices=False, remote_fraction=None, topology_release=False, expert_groups=0, kept_groups=1, "
        "routed_scale=1.0, bias_rate=0.001, "
        "aux_loss_weight=0.01, z_loss_weight=0.001, schedule='deepspeed', transport='all_to_all', pairwise_groups=0, "
        "gather='auto', grouped_matmul='auto', bucket_slack=1.5, overflow_chance=0.0, shared_experts=0, "
        "shared_hidden_dim=0, expert_dtype='compute', dispatch_dtype='compute', residual='sum')"
    ),
    "MoELayer": (
        "(self, config, *, model_dim, hidden_dim, roles, rngs, activation='gelu', dtype=<class 'jax.numpy.float32'>)"
    ),
    "balance_loss": "(counts, probability, tokens, top_k)",
    "choose_experts": "(x, w_gate, config, *, noise_key=None, token_ids=None)",
    "grouped_matmul": "(lhs, group_sizes, operands, *, implementation)",
    "make_moe": "(config, roles, x, activation, plan=None, length=0, options=None)",
    "reference_moe": "(x, w_gate, experts, config, *, noise=None, drop_groups=1, shared=None, route=None)",
    "z_loss": "(squared_logsumexp, tokens)",
}


def signature(function) -> str:
    """Return parameters and defaults without annotations."""
    bare = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in bare.parameters.values()]
    return str(bare.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_names():
    assert sorted(moe_jax.moe.__all__) == list(moe_jax.moe.__all__) == list(SIGNATURES)


def test_signatures():
    found = {name: getattr(moe_jax.moe, name) for name in SIGNATURES}
    found["MoELayer"] = moe_jax.moe.MoELayer.__init__  # Flax hides it behind its metaclass
    assert {name: signature(value) for name, value in found.items()} == SIGNATURES
    assert signature(moe_jax.moe.MoELayer.__call__) == "(self, x, *, noise_key=None)"


def test_records_are_frozen():
    for name in ("GateStats", "GroupedWeights", "MoEConfig"):
        assert getattr(moe_jax.moe, name).__dataclass_params__.frozen, name
