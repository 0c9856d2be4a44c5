"""The equations of a traced program, those inside of others too.

Inputs: a jaxpr, or an equation. Outputs: the jaxprs, or equations, that it holds.
"""

from jax.extend.core import jaxprs_in_params


def jaxprs_in(jaxpr):
    """Yield a jaxpr and all that its equations hold."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in jaxprs_in_params(equation.params):
            yield from jaxprs_in(inner)


def equations_of(jaxpr):
    """Return all equations of a jaxpr, those inside of others too."""
    return [equation for held in jaxprs_in(jaxpr) for equation in held.eqns]


def equations_in(equation):
    """Return the equations that one holds."""
    return [e for held in jaxprs_in_params(equation.params) for e in equations_of(held)]
