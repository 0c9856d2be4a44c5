"""What is in command buffers and what is not, counted by hand in a text of the form that XLA dumps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.toy import LOOP

from moe_jax.analysis import compile_ahead, cuda_wheels
from moe_jax.analysis.program_report import count_thunks
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.targets import parse_target
from moe_jax.errors import UserError

# a loop of 3 turns around a buffer, a transfer, and a conditional with an inner loop in its longer branch
SEQUENCE = """\
000: kCommandBuffer [source       | next=047 (1)]
    001: kCustomKernel [source       | sink        ] fusion_33 grid: [2, 1, 1] threads: [128, 1, 1]
    002: kCopy         [source       | sink        ] kCopy
003: kWhile         [prev=000 (1) | next=017 (1)]
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion_3 grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    005: kDynamicSliceFusion [source        | next=052 (1) ] params=1, results=1
        006: kCopy [source | sink] kCopy
    000: kCommandBuffer      [prev=052 (1)  | next=062 (2) ]
        007: kCustomKernel [source       | next=056 (2)] fusion_6 grid: [96, 1, 1] threads: [128, 1, 1]
        008: kCuDnn        [source       | next=056 (1)] kCuDnn
        009: kCustomKernel [prev=055 (1) | next=057 (1)] gemm_fusion grid: [768, 1, 1] threads: [64, 1, 1]
    010: kAsyncStart         [prev=165 (1)  | next=083 (1) ] stream=communication_stream[0], async_id=10
        011: kAllToAll [source | sink] kAllToAll
    012: kConditional        [prev=170 (1)  | next=210 (1) ]
      false_branch:
        013: kCopy         [source       | next=174 (3)] kCopy
        014: kWhile        [prev=173 (1) | sink        ]
condition:
            015: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
          body:
            016: kCustomCall   [source | sink] kCustomCall
      true_branch:
        018: kCopy [source | sink] kCopy
    019: kAsyncDone          [prev=083 (1)  | next=233 (1) ] async_id=10
020: kCustomKernel  [prev=003 (1) | sink        ] fusion_9 grid: [1, 1, 1] threads: [32, 1, 1]
"""
METADATA = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "while.1"
    thunk_id: 3
  }
  thunk_kind: "kWhile"
}
thunk_metadata {
  thunk_info {
  }
  thunk_kind: "kSequential"
}
"""


def count(folder, sequence, metadata=METADATA):
    (folder / "module_0001.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(sequence)
    (folder / "module_0001.jit_step.thunk_metadata.txt").write_text(metadata)
    return count_thunks(folder, parse_module(LOOP))


def test_every_turn_of_a_loop_counts(tmp_path):
    found = count(tmp_path, SEQUENCE)
    # outside: the loop, in each turn a slice's copy, a transfer, a conditional and its shorter branch; one kernel
    assert found == {
        "buffers": 1 + 3,
        "inside": {"kernels": 1 + 3 * 3, "memory_copies": 1, "collectives": 0, "conditionals": 0, "loops": 0},
        "outside": {"kernels": 1, "memory_copies": 3 * 2, "collectives": 3, "conditionals": 3, "loops": 1},
        "outside_kinds": {"kCopy": 6, "kAllToAll": 3, "kConditional": 3, "kWhile": 1, "kCustomKernel": 1},
    }
    # a loop whose name is not known turns once
    assert count(tmp_path, SEQUENCE, "")["outside"]["collectives"] == 1


def test_a_loop_in_a_command_buffer_is_inside(tmp_path):
    lines = [f"    {line}" if line and line != "condition:" else line for line in SEQUENCE.splitlines()]
    found = count(tmp_path, "\n".join(["000: kCommandBuffer [source | sink]", *lines]))
    assert found["buffers"] == 1 and not any(found["outside"].values())
    assert found["inside"]["loops"] == 1 and found["inside"]["collectives"] == 3


def test_another_text_is_one_line(tmp_path):
    assert count_thunks(tmp_path, parse_module(LOOP)) is None
    with pytest.raises(UserError, match="holds no thunks"):
        count(tmp_path, "nothing")


@pytest.mark.gpu_compile
def test_a_program_compiled_for_a_gpu(tmp_path):
    """Five turns of a few kernels, which fit into one buffer, behind them a conditional, which fits into none."""
    if cuda_wheels.installed_cuda() is None:
        pytest.skip("needs the CUDA wheels")
    devices = compile_ahead.described_devices(parse_target("h200:1x1"))
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), jax.sharding.PartitionSpec())

    def step(x):
        y = jax.lax.fori_loop(0, 5, lambda i, y: jnp.sin(jnp.sort(y @ y, axis=0)) + jnp.cumsum(y, 0) * y.sum(), x)
        return y, jax.lax.cond(y[0, 0] > 0, jnp.sort, lambda a: a @ a, y)

    lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=sharding))
    executable = lowered.compile({"xla_gpu_autotune_level": "0", "xla_dump_to": str(tmp_path)})
    found = count_thunks(tmp_path, parse_module(executable.as_text()))
    assert found["buffers"] == 5 and found["inside"]["kernels"] >= 5 * 5
    assert [found["outside"][group] for group in ("loops", "conditionals", "collectives")] == [1, 1, 0]
