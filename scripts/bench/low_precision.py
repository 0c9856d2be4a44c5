"""Price the step of a run whose parameters, sums of gradients and moments are bfloat16, as some systems train.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python scripts/bench/low_precision.py --target=h100:1x8 --out=runs/low \\
        --gin_file=configs/run/qwen3_30b_h100.gin

Training keeps float32: no binding asks for less. This program is compiled and priced as `python -m moe_jax.inspect`
does it, and takes its flags, for comparison with figures that others have published in that precision.
"""

from moe_jax import inspect
from moe_jax.config.command_line import run_command
from moe_jax.models.config import ModelConfig

ModelConfig.param_dtype = property(lambda config: "bfloat16")

if __name__ == "__main__":
    run_command(inspect.command)
