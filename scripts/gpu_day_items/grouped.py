"""Item 1: every grouped matmul against float32, and its rate next to that of a dense matmul of as many FLOPs.

What is checked: forward, gradient of the rows, gradient of the weights, in bfloat16, with NaN in every row that no
group owns. An error is the largest difference over the largest entry; bfloat16 itself rounds by 0.004 of an entry.
Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import functools

from gpu_day_items.context import NotHere, seconds_of, shown

TOLERANCE = 0.01
KERNELS = ("hopper",)
GROUPS = 8
# rows of each group; R is 1,000, no multiple of 64, and 200 at tiny sizes, where all is a fifth
CASES = {
    "uneven": (3, 480, 60, 130, 5, 200, 40, 30),
    "empty": (0, 500, 0, 0, 450, 0, 25, 0),
    "one row": (1, 1, 0, 1, 900, 1, 1, 1),
    "one owns all": (0, 0, 0, 1000, 0, 0, 0, 0),
    "nothing": (0, 0, 0, 0, 0, 0, 0, 0),
}
# name: (R, K, N, G, share of the rows that groups own)
SHAPES = {
    "32,768 x 768 x 1,536, 64 groups": (32768, 768, 1536, 64, 1.0),
    "49,152 x 768 x 1,536, 2 groups, full": (49152, 768, 1536, 2, 1.0),
    "49,152 x 768 x 1,536, 2 groups, 67%": (49152, 768, 1536, 2, 0.67),
    "32,768 x 2,048 x 768, 128 groups": (32768, 2048, 768, 128, 1.0),
}
TINY_SHAPES = {"200 x 128 x 64, 8 groups, 67%": (200, 128, 64, 8, 0.67)}  # the shapes that are checked
PRODUCTS = ("forward", "d-rows", "d-weights")


def measure(context, implementation: str, of: str = "", option: str = ""):
    """Check and time one implementation.

    Args:
      implementation: what it is called here; of: its registered name, where that is another.
      option: of the compiler, switched on.
    """
    import jax

    from moe_jax.kernels.grouped import HOPPER

    registered, device = of or implementation, jax.devices()[0]
    if registered in KERNELS and str(getattr(device, "compute_capability", "")) != HOPPER:
        raise NotHere(f"{device.device_kind} has no compute capability {HOPPER}")
    products = _registered(registered)
    options = {option: True} if option else None
    jitted = {name: jax.jit(function, compiler_options=options) for name, function in products.items()}
    if option:
        rows, contracted, resulting, groups, _ = next(iter(context.of_size(SHAPES, TINY_SHAPES).values()))
        lowered = jax.jit(products["forward"]).lower(*_operands(rows, contracted, resulting, groups, rows))
        plain = lowered.compile()
        try:
            changed = lowered.compile(compiler_options=options)
        except Exception as error:
            if "No such compile option" in str(error):
                raise NotHere(f"this jax's compiler has no {option}") from error
            raise
        changes = plain.as_text() != changed.as_text()
        context.record(option=option, changes_program=changes)
        if not changes and not context.tiny:
            raise NotHere(f"{option} changes nothing in the compiled program of {of!r} here")
    _check(context, implementation, jitted)
    for name, shape in context.of_size(SHAPES, TINY_SHAPES).items():
        _time(context, implementation, jitted, name, shape)


def _registered(name: str):
    """Return {product: function} of a registered implementation; each computes that product alone."""
    import jax
    import jax.numpy as jnp

    from moe_jax.kernels.grouped import MATMULS, GroupedWeights

    found = MATMULS.find(name)()

    def operands(bank, with_grad_sink):
        slots = jnp.arange(bank.shape[0], dtype=jnp.int32)
        grad_sink = jax.ShapeDtypeStruct(bank.shape, jnp.float32) if with_grad_sink else None
        return (GroupedWeights(bank=bank, slots=slots, grad_sink=grad_sink),)

    return {
        "forward": lambda lhs, dout, bank, sizes: found.multiply(lhs, sizes, operands(bank, False)),
        "d-rows": lambda lhs, dout, bank, sizes: found.gradients(lhs, dout, sizes, operands(bank, False))[0],
        "d-weights": lambda lhs, dout, bank, sizes: found.gradients(lhs, dout, sizes, operands(bank, True))[1][0],
    }


def _check(context, implementation: str, products):
    """Record the errors of each case and the verdict."""
    import jax.numpy as jnp
    import numpy as np

    part = context.of_size(1, 5)
    rows, contracted, resulting = 1000 // part, context.of_size(256, 128), context.of_size(192, 64)
    rng = np.random.default_rng(0)
    round_off = lambda array: np.asarray(jnp.asarray(array, jnp.bfloat16))  # noqa: E731
    bank = round_off(rng.normal(size=(GROUPS, contracted, resulting)) * contracted**-0.5)
    bank_read, errors = bank.astype(np.float32), {}
    for case, full in CASES.items():
        sizes = np.array([-(-size // part) for size in full], np.int32)
        sizes[np.argmax(sizes)] -= max(int(sizes.sum()) - rows, 0)
        lhs, dout = rng.normal(size=(rows, contracted)), rng.normal(size=(rows, resulting))
        lhs[sizes.sum() :], dout[sizes.sum() :] = np.nan, np.nan
        lhs, dout = round_off(lhs), round_off(dout)
        lhs_read, dout_read = lhs.astype(np.float32), dout.astype(np.float32)
        wanted = {
            "forward": np.zeros((rows, resulting), np.float32),
            "d-rows": np.zeros(lhs.shape, np.float32),
            "d-weights": np.zeros(bank.shape, np.float32),
        }
        for group, end in enumerate(np.cumsum(sizes)):
            own = slice(end - sizes[group], end)
            wanted["forward"][own] = lhs_read[own] @ bank_read[group]
            wanted["d-rows"][own] = dout_read[own] @ bank_read[group].T
            wanted["d-weights"][group] = lhs_read[own].T @ dout_read[own]
        arguments = tuple(map(jnp.asarray, (lhs, dout, bank, sizes)))
        errors[case] = {}
        for name in PRODUCTS:
            apart = np.abs(np.asarray(products[name](*arguments), np.float32) - wanted[name]).max(initial=0.0)
            error = float(apart / max(np.abs(wanted[name]).max(initial=0.0), 1e-6))
            errors[case][name] = error if np.isfinite(error) else 1e9
        context.record(errors=errors)
    worst = {name: max(found[name] for found in errors.values()) for name in PRODUCTS}
    wrong = [
        f"{name} of {case!r} ({found[name]:.2g})"
        for case, found in errors.items()
        for name in PRODUCTS
        if not found[name] <= TOLERANCE
    ]
    context.record(right=not wrong, worst_error=worst, tolerance=TOLERANCE)
    listed = ", ".join(f"{name} {error:.2g}" for name, error in worst.items())
    context.row(f"{implementation}, errors", ("right: " if not wrong else f"WRONG in {'; '.join(wrong)}: ") + listed)


def _time(context, implementation: str, products, name: str, shape):
    """Record seconds, TFLOP/s and the share of a dense matmul's rate; memory that runs out is recorded and no more."""
    import jax

    rows, contracted, resulting, groups, filled = shape
    owned = int(rows * filled)
    arguments = _operands(rows, contracted, resulting, groups, owned)
    cases = {product: (function, arguments) for product, function in products.items()}
    weight = arguments[2][0]
    cases["dense"] = (jax.jit(lambda lhs, weight: lhs @ weight), (arguments[0], weight))
    try:
        seconds = seconds_of(cases, rounds=context.of_size(5, 2), calls=context.of_size(8, 1))
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise
        context.record(**{name: {"error": "out of memory"}})
        context.row(f"{implementation}, {name}", "out of memory")
        return
    flops = 2.0 * owned * contracted * resulting
    dense = 2.0 * rows * contracted * resulting / seconds["dense"]
    found = {
        product: {"seconds": seconds[product], "tflops": flops / seconds[product] / 1e12,
                  "share_of_dense": flops / seconds[product] / dense}
        for product in PRODUCTS
    }  # fmt: skip
    context.record(**{name: {**found, "dense_tflops": dense / 1e12}})
    listed = ", ".join(
        f"{product} {shown(record['seconds'])} = {record['tflops']:.3g} TFLOP/s ({record['share_of_dense']:.0%})"
        for product, record in found.items()
    )
    context.row(f"{implementation}, {name}", f"{listed}; dense {dense / 1e12:.3g} TFLOP/s")


@functools.lru_cache(maxsize=1)
def _operands(rows, contracted, resulting, groups, owned):
    """Return (lhs, dout, bank, sizes): groups of equal sizes; the rest of the rows belongs to no group."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    keys = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(keys[0], (rows, contracted), jnp.bfloat16)
    dout = jax.random.normal(keys[1], (rows, resulting), jnp.bfloat16)
    bank = jax.random.normal(keys[2], (groups, contracted, resulting), jnp.bfloat16)
    sizes = np.full(groups, owned // groups, np.int32)
    sizes[: owned % groups] += 1
    return lhs, dout, bank, jnp.asarray(sizes)
