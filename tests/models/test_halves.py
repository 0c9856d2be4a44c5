"""Two halves of a device's sequences: what waits for what. Equality: test_prefetch.py."""

import dataclasses

import jax
import numpy as np
from support import prefetch_cases
from support.equality_cases import assert_close
from support.prefetch_cases import VOCAB, gradient_step, model_config, placements_of
from support.traced_programs import equations_in, jaxprs_in

from moe_jax.kernels.float8 import E4M3
from moe_jax.moe import MoEConfig


def test_float8_gives_the_same_in_halves_and_whole(monkeypatch):
    """One layer on two devices with replicas, buckets for any routing: there are no later passes to compile."""
    sizes = {"num_experts": 8, "top_k": 2, "bucket_slack": 2.0, "dispatch_dtype": E4M3}
    in_float8 = lambda name: MoEConfig(schedule=name, **sizes)  # noqa: E731
    monkeypatch.setattr(prefetch_cases, "moe_config", in_float8)
    config, found = model_config(layers=1), []
    placements, shape = placements_of(False, config.moe_layers, 2, number=1)
    with jax.enable_x64(True):
        for overlap in ("none", "halves"):
            halved = dataclasses.replace(config, overlap=overlap)
            step, arguments = gradient_step(halved, "s1", {"expert": 2}, shape)
            lowered = step.lower(*arguments(placements[0]))
            assert "f8E4M3FN" in lowered.as_text()
            (value, _), grads = lowered.compile()(*arguments(placements[0]))
            found.append((value, grads))
    assert_close(found[1], found[0])


def ancestors(jaxpr, given, marked, found):
    """Return [the equations among `marked` that a result cannot do without], on any platform.

    Args:
      given: the same of the inputs; found: {id of an equation: the same of its operands}, filled here.
    """
    sources = dict(zip(map(id, jaxpr.invars), given, strict=True))
    of = lambda atoms: [sources.get(id(atom), frozenset()) for atom in atoms]  # noqa: E731
    for equation in jaxpr.eqns:
        operands = of(equation.invars)
        if equation.primitive.name in ("shard_map", "jit"):
            inner = equation.params["jaxpr"]
            results = ancestors(getattr(inner, "jaxpr", inner), operands, marked, found)
        else:
            if equation.primitive.name == "wait_for":  # the others count on CPUs only
                operands = operands[:1]
            found[id(equation)] = frozenset().union(*operands)
            own = found[id(equation)] | ({id(equation)} if marked(equation) else frozenset())
            results = [own] * len(equation.outvars)
        sources |= dict(zip(map(id, equation.outvars), results, strict=True))
    return of(jaxpr.outvars)


def test_some_of_the_loss_waits_for_neither_the_last_exchange_nor_the_first_of_the_backward():
    """The loss comes in three pieces: the beginning of a needs one exchange of rows less than b, whose last it is; and
    b's gradient leaves without the third, the rest of a."""
    config = model_config(overlap="halves", layers=2, stack="unrolled", loss_chunk=2)
    placements, shape = placements_of(False, config.moe_layers, 4, number=1)
    with jax.enable_x64(True):
        step, arguments = gradient_step(config, "s1", {"expert": 4}, shape)
        program = step.trace(*arguments(placements[0])).jaxpr.jaxpr

    def is_loss(equation):
        shapes = [out.aval.shape for inner in equations_in(equation) for out in inner.outvars]
        return equation.primitive.name == "scan" and any(VOCAB in shape for shape in shapes)

    def is_exchange(equation):
        return equation.primitive.name == "all_to_all" and equation.invars[0].aval.dtype == np.float64

    found = {}
    ancestors(program, [frozenset()] * len(program.invars), lambda e: is_loss(e) or is_exchange(e), found)
    order = {id(equation): equation for held in jaxprs_in(program) for equation in held.eqns}
    begin, b, rest = (key for key, equation in order.items() if key in found and is_loss(equation))
    exchanges = [key for key, equation in order.items() if key in found and is_exchange(equation)]
    last = found[b].intersection(exchanges) - found[begin]
    assert len(last) == 1 and list(last)[0] == [key for key in exchanges if key in found[rest]][-1]
    first = [key for key in exchanges if b in found[key] and rest not in found[key]]
    assert len(first) == 1 and first[0] == [key for key in exchanges if b in found[key]][0]
