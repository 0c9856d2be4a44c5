"""How much of moe_jax one training step is traced through: files, and frames that stand on each other.

    python scripts/trace_step.py --gin_file=configs/run/deepspeed_moe.gin

Inputs: a run's gin file. Output: one line of JSON, {"program": {"files", "depth"}, "lowering": {"files", "depth"}}:
files of moe_jax of which a function runs, and the most of its frames on the stack at once, from the RunConfig to the
lowered training step, and while the step is lowered. All modules are imported before; planning is left out. Every frame
counts, those of comprehensions too, so figures compare under one version of Python alone: 3.11.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path

import jax

import moe_jax

PACKAGE = str(Path(moe_jax.__file__).parent)


class Frames:
    """Counts frames of moe_jax between `on` and `off`, which may be called again.

    Attributes:
      files: their names so far; depth: the most frames that stood on each other.
    """

    def __init__(self):
        self.files: set[str] = set()
        self.depth = 0
        self._now = 0

    def on(self):
        self._now = 0
        sys.setprofile(self._hook)

    def off(self):
        sys.setprofile(None)

    def _hook(self, frame, event, _):
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "return":
            self._now -= 1
            return
        self._now += 1
        self.files.add(frame.f_code.co_filename)
        self.depth = max(self.depth, self._now)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file", required=True)
    parser.add_argument("--gin_bindings", action="append", default=[])
    parser.add_argument("--host_devices", type=int, default=8)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.host_devices)
    for module in pkgutil.walk_packages([PACKAGE], "moe_jax."):  # but commands, whose flags would be defined twice
        is_command = module.name.count(".") == 1 and not module.ispkg
        if not is_command and not module.name.endswith(("__main__", "train_tokenizer")):
            importlib.import_module(module.name)
    from moe_jax.analysis.compile_ahead import planned_shapes
    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.training.program import build_program

    config = parse_run_config([args.gin_file], args.gin_bindings)[0]
    program, lowering = Frames(), Frames()
    program.on()
    built = build_program(config, jax.devices())
    program.off()
    shape = planned_shapes(built.config, built.roles, skew=1.0)
    for frames in (program, lowering):
        frames.on()
        built.trace_step(shape).lower()
        frames.off()
        jax.clear_caches()
    sides = {"program": program, "lowering": lowering}
    print(json.dumps({name: {"files": len(side.files), "depth": side.depth} for name, side in sides.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
