"""Find sums in 16 bits in a traced program: every reduction over tokens, devices, chunks or turns of a loop.

Inputs: a jaxpr. Outputs: one `Sum` per place that adds many terms, and keeps the running or final sum in bfloat16.
"""

import dataclasses

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

ADDS = ("add", "add_any", "add_jaxvals")
REDUCTIONS = (
    "reduce_sum", "cumsum", "scatter-add", "scatter_add", "psum", "psum_invariant", "reduce_scatter", "psum_scatter",
    "reduce_window_sum", "unreduced_psum",
)  # fmt: skip
MATMULS = ("dot_general", "ragged_dot", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum in bfloat16: its primitive ('carry' for one over the turns of a loop), shape and place in the program."""

    primitive: str
    shape: tuple[int, ...]
    scope: str


def is_narrow(atom) -> bool:
    return getattr(atom.aval, "dtype", None) in (jnp.bfloat16, jnp.float16)


def narrow_sums(jaxpr, most_terms: int, parameters=frozenset(), outer=""):
    """Yield every `Sum` of a jaxpr.

    Args:
      most_terms: a matmul that contracts fewer elements sums over features, not over tokens.
      parameters: shapes; two arrays of such a shape must not be added in bfloat16 anywhere.
    """
    for equation in jaxpr.eqns:
        name, scope = equation.primitive.name, f"{outer}/{equation.source_info.name_stack}"
        narrow = any(map(is_narrow, equation.outvars))
        shape = tuple(getattr(equation.outvars[0].aval, "shape", ())) if equation.outvars else ()
        if narrow and (name in REDUCTIONS or (name in ADDS and shape in parameters)):
            yield Sum(name, shape, scope)
        elif narrow and name in MATMULS and contracted(equation) >= most_terms:
            yield Sum(name, shape, scope)
        for inner in jaxprs_in_params(equation.params):
            yield from narrow_sums(inner, most_terms, parameters, scope)
        if name in ("scan", "while"):
            yield from carried_sums(equation, scope)


def contracted(equation) -> int:
    """Return how many elements a matmul sums over."""
    numbers = equation.params.get("dimension_numbers") or equation.params["ragged_dot_dimension_numbers"]
    numbers = getattr(numbers, "dot_dimension_numbers", numbers)
    terms = 1
    for dim in numbers[0][0]:
        terms *= equation.invars[0].aval.shape[dim]
    return terms


def constants_and_carries(params, outputs):
    """Return how many inputs of a loop's body are constants, and how many that follow are carries."""
    if "body_nconsts" in params:  # while: all outputs are carries
        return params["body_nconsts"], outputs
    if "num_consts" in params:  # scan until jax 0.10
        return params["num_consts"], params["num_carry"]
    constants, carries, _ = params["ft_in"].unpack()
    return len(constants.vals), len(carries.vals)


def carried_sums(equation, scope):
    """Yield the carries of a loop that are added to in bfloat16."""
    body = equation.params["jaxpr" if equation.primitive.name == "scan" else "body_jaxpr"].jaxpr
    consts, number = constants_and_carries(equation.params, len(body.outvars))
    makers = {id(out): inner for inner in body.eqns for out in inner.outvars}
    for before, after in zip(body.invars[consts : consts + number], body.outvars[:number], strict=True):
        maker = makers.get(id(after))
        if maker is not None and maker.primitive.name in ADDS and is_narrow(after):
            if any(atom is before for atom in maker.invars):
                yield Sum("carry", tuple(after.aval.shape), scope)
