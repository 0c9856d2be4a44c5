"""Memory of replicas as the GPU compiler counts it: expert parallelism, Hecate, Hecate-RM, FlexMoE.

    python scripts/bench/memory.py --gin_file=configs/model/hecate_gpt_moe_s.gin --target=h200:4x8

needs the CUDA wheels of this jax in the environment, and no GPU. A row is the arguments of the step (parameters and
optimizer state) and what its temporaries have above those of expert parallelism under the same checkpointing of
activations, in GB a device, and the ratio of that sum to the arguments of expert parallelism. Replicas are placed as in
`overlap.py`. The memory of grouped matmuls must not grow with the number of groups, as that of XLA's expansion of
`ragged_dot` does (--matmul=ragged shows it): so it is 'auto' for bfloat16, which is the kernel on Hopper, and blocks
for float32. FlexMoE is not compiled but computed, as its authors run it: standing replicas in all layers, each with
parameters, two moments and gradients in float32. Hecate's figure 13 has +64% without re-materialisation, +11.6% with
it, and 83% more than Hecate for FlexMoE; it does not say how many replicas. The last line is one JSON object.
"""

from __future__ import annotations

import json
import pathlib
import sys

from absl import app, flags
from compile_cases import Case, compile_case

SYSTEMS = {
    "Hecate": ("ModelConfig.prefetch = 'hecate'",),
    "Hecate-RM": ("ModelConfig.prefetch = 'hecate'", "ModelConfig.refetch_replicas = True"),
}
_GIN_FILES = flags.DEFINE_multi_string("gin_file", [], "Config file; may repeat.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding; may repeat.")
_TARGET = flags.DEFINE_string("target", "h200:4x8", "DEVICE:NODESxDEVICES.")
_TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens of a device.")
_REPLICAS = flags.DEFINE_multi_integer("replicas", [9, 4], "Replicas on each device in each layer; may repeat.")
_DTYPES = flags.DEFINE_multi_enum("dtype", ["bfloat16", "float32"], ["bfloat16", "float32"], "Compute dtype.")
_REMAT = flags.DEFINE_string("remat", "block", "ModelConfig.remat.")
_MATMUL = flags.DEFINE_string("matmul", "", "MoEConfig.grouped_matmul; else 'auto' for bfloat16, 'fused' for float32.")
_BY_NODE = flags.DEFINE_bool("by_node", False, "Whether replicas travel node by node.")
_OUT = flags.DEFINE_string("out", "", "File of JSON lines, one for each row.")
ROW = "{:9} {:>6} {:16} {:>9} {:>9} {:>9} {:>7}"


def compiled(bindings: tuple[str, ...], dtype: str, replicas: int):
    """Return the outcome of one case."""
    narrow = dtype == "bfloat16"
    common = (
        f"ModelConfig.dtype = '{dtype}'",
        f"ModelConfig.remat = '{_REMAT.value}'",
        f"MoEConfig.grouped_matmul = '{_MATMUL.value or ('auto' if narrow else 'fused')}'",
    )
    case = Case(
        files=tuple(_GIN_FILES.value),
        bindings=(*common, *bindings, *_GIN_BINDINGS.value),
        target=_TARGET.value,
        tokens=_TOKENS.value,
        replicas=replicas,
        by_node=_BY_NODE.value,
    )
    return compile_case(case, guided=False)[0]


def flexmoe_bytes(program, replicas: int) -> int:
    """Return the bytes of standing replicas: parameters, two moments and gradients of each, in the master dtype."""
    model = program.config.model
    matrices = 3 if model.activation == "swiglu" else 2
    param_itemsize = 8 if model.dtype == "float64" else 4
    return 4 * param_itemsize * matrices * model.model_dim * model.hidden_dim * replicas * model.moe_layers


def main(argv: list[str]) -> None:
    print(ROW.format("dtype", "replicas", "system", "arguments", "above EP", "sum", "of EP"))
    records = []

    def add(dtype, replicas, system, arguments, above, base):
        record = {"dtype": dtype, "replicas": replicas, "system": system, "arguments": arguments, "above": above,
                  "ratio": (arguments + above) / base}  # fmt: skip
        records.append(record)
        print(ROW.format(dtype, replicas, system, *(f"{v / 1e9:.3f}" for v in (arguments, above, arguments + above)),
                         f"{record['ratio']:.3f}"), flush=True)  # fmt: skip
        if _OUT.value:
            with pathlib.Path(_OUT.value).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    for dtype in _DTYPES.value:
        plain = compiled((), dtype, 0)
        base, temporaries = plain.memory["arguments"], plain.memory["temporaries"]
        add(dtype, 0, "expert parallel", base, 0, base)
        for replicas in _REPLICAS.value:
            add(dtype, replicas, "FlexMoE", base, flexmoe_bytes(plain.program, replicas), base)
            for system, bindings in SYSTEMS.items():
                memory = compiled(bindings, dtype, replicas).memory
                add(dtype, replicas, system, memory["arguments"], memory["temporaries"] - temporaries, base)
    print(json.dumps(records))


if __name__ == "__main__":
    sys.argv[0] = "bench_memory"
    app.run(main)
