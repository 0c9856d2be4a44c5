"""The expert FFN of every implementation against loops over experts, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import grouped_cases

from moe_jax.moe.experts import expert_ffn, weight_names

MODEL, HIDDEN = 6, 10
SIZES = {
    "balanced": (24, [6, 6, 6, 6]),
    "empty": (24, [0, 13, 0, 11]),
    "one_owns_all": (40, [0, 0, 40, 0]),
    "unowned_tail": (37, [5, 0, 9, 3]),
    "nothing": (16, [0, 0, 0, 0]),
    "beyond_a_block": (1300, [3, 1100, 0, 60]),
}


def make_case(name, activation, dtype=np.float64, operands=1):
    """Return rows, group_sizes, cotangent and {weight: [(bank, slots) per operand]}."""
    height, sizes = SIZES[name]
    given, cases = {"dtype": dtype, "counts": [len(cut) for cut in np.array_split(sizes, operands)]}, {}
    for seed, weight in enumerate(weight_names(activation)):
        contracted, resulting = (HIDDEN, MODEL) if weight == "w_out" else (MODEL, HIDDEN)
        given |= {"contracted": contracted, "resulting": resulting, "seed": seed}
        cases[weight] = grouped_cases.make_case(height, sizes, **given)
    (rows, group_sizes, *_), (_, _, dout, _) = cases["w_in"], cases["w_out"]
    return rows, group_sizes, dout, {weight: case[3] for weight, case in cases.items()}


def as_operands(weights, grad_sinks):
    return {name: grouped_cases.as_operands(parts, grad_sinks[name]) for name, parts in weights.items()}


def zero_grad_sinks(weights):
    return {
        name: [jnp.zeros((len(slots), *bank.shape[1:]), bank.dtype) for bank, slots in parts]
        for name, parts in weights.items()
    }


def hidden_of(up, gate):
    """Return the hidden rows and their derivatives by `up` and by `gate` (None: GELU), written out."""
    if gate is None:
        inner = np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3))
        slope = (1 - inner**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * up**2)
        return 0.5 * up * (1 + inner), 0.5 * (1 + inner) + 0.5 * up * slope, None
    sigmoid = 1 / (1 + np.exp(-gate))
    return gate * sigmoid * up, gate * sigmoid, up * sigmoid * (1 + gate * (1 - sigmoid))


def loop_oracle(rows, group_sizes, dout, weights):
    """Return out, the gradient of rows and of each group's weights, product by product."""

    def product(lhs, cotangent, name):
        return grouped_cases.loop_oracle(lhs, group_sizes, cotangent, weights[name])

    no_cotangent = np.zeros((len(rows), HIDDEN), rows.dtype)
    up, *_ = product(rows, no_cotangent, "w_in")
    gate = product(rows, no_cotangent, "w_gate")[0] if "w_gate" in weights else None
    hidden, by_up, by_gate = hidden_of(up, gate)
    out, dhidden, d_out = product(hidden, dout, "w_out")
    drows, dweights = np.zeros_like(rows), {"w_out": d_out}
    for name, slope in (("w_in", by_up), ("w_gate", by_gate)):
        if name in weights:
            _, added, dweights[name] = product(rows, dhidden * slope, name)
            drows += added
    return out, drows, dweights


def run(rows, group_sizes, dout, weights, activation, implementation):
    @jax.jit
    def both(rows, grad_sinks, dout):
        def out_of(rows, grad_sinks):
            return expert_ffn(
                rows,
                jnp.asarray(group_sizes),
                as_operands(weights, grad_sinks),
                activation=activation,
                implementation=implementation,
            )

        out, pull_back = jax.vjp(out_of, rows, grad_sinks)
        return out, *pull_back(dout)

    out, drows, d_grad_sinks = both(rows, zero_grad_sinks(weights), dout)
    return out, drows, {name: jnp.concatenate(parts) for name, parts in d_grad_sinks.items()}


@pytest.mark.parametrize("name", SIZES)
def test_expert_ffn_float64(name):
    activation = ("gelu", "swiglu")[(list(SIZES).index(name) + 1) % 2]
    with jax.enable_x64(True):
        case = make_case(name, activation, operands=2)
        got, wanted = run(*case, activation, "fused"), loop_oracle(*case)
        jax.tree.map(lambda a: np.testing.assert_equal(a.dtype, np.float64), got)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-11), got, wanted)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_backward_keeps_hidden_rows_narrow(activation):
    """Of the size of the hidden rows it keeps what enters the activation and what leaves it, nothing of its float32."""
    rows, group_sizes, _, weights = make_case("balanced", activation, jnp.bfloat16)
    grad_sinks = zero_grad_sinks(weights)

    def apply(rows, grad_sinks):
        operands = as_operands(weights, grad_sinks)
        return expert_ffn(rows, jnp.asarray(group_sizes), operands, activation=activation, implementation="reference")

    _, pull_back = jax.vjp(apply, jnp.asarray(rows), grad_sinks)
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if getattr(leaf, "shape", ()) == (len(rows), HIDDEN)]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16] * len(weights)
