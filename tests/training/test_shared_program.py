"""Two real processes whose programs process 0 compiles: handed out, not to be handed out, failed, never done."""

import re
import sys
from pathlib import Path

import jax
from support.tiny_run import config_of, finish_pair, start_pair

from moe_jax.training import compiling
from moe_jax.training.program import Program
from moe_jax.training.stepper import build_stepper


def test_one_process_compiles_for_two():
    worker = Path(__file__).with_name("shared_program_worker.py")
    done = finish_pair(start_pair([sys.executable, str(worker), ""]))
    said = [[line for line in out.splitlines() if not line.startswith("[Gloo]")] for _, out, _ in done]
    assert [code for code, *_ in done] == [0, 0], done
    ran = ["handed out 12.0", "function 18.0 18.0", "each 24.0", "once more 12.0"]  # 2, 3, 4, 2 times 0 + 1 + 2 + 3
    assert said[0] == [
        *ran,
        "compiled: ['handed out by handed out', 'each by each', 'once more by once more']",
        "held: 1",  # all that both have read are deleted
        "failed: UserError the mesh (3) does not fit",
        "end 1.0",
    ]
    assert said[1] == [
        *ran,
        'compiled: ["each by process 0\'s text", "once more by process 0\'s text"]',
        "failed: UserError process 0 could not compile this program: the mesh (3) does not fit",
        "failed: HostLostError process 0 did not hand out its compiled program within 0.5 s; see its log",
        "end 1.0",
    ]
    assert "cannot be handed to the other processes (ZeroDivisionError: division by zero)" in done[0][2]


def test_the_move_of_experts_is_compiled_for_all(tmp_path, monkeypatch):
    """Homes move often; options as GPUs have them, which say that a program is shared."""
    changes = (
        "MeshConfig.expert = 4", "PlannerConfig.name = 'eplb'", "PlannerConfig.interval = 2",
        "PlannerConfig.swap_after = 2", "ModelConfig.layers = 1",
        "PlannerConfig.cluster = 'configs/cluster/host_devices.gin'",
    )  # fmt: skip
    shared, compile_for_all = [], compiling.compile_for_all

    def spy(lowered, *others):
        shared.append(re.search(r"module @(\w+)", lowered.as_text())[1])
        return compile_for_all(lowered, *others)

    monkeypatch.setattr(compiling, "compile_for_all", spy)
    monkeypatch.setattr(Program, "compiler_options", lambda self: {"xla_embed_ir_in_executable": "False"})
    stepper = build_stepper(config_of(tmp_path, *changes), jax.devices()[:4])
    records = stepper.run(8)
    stepper.engine.close()
    assert sum("reshard_seconds" in record for record in records) > 1
    assert shared == ["jit_move"]  # at the first move; evaluations, which are shared too, are the loop's
