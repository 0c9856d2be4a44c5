"""Numbers of eight bits with a scale for each block. See README.md."""

from moe_jax.float8.blocks import (
    BLOCK,
    block_of,
    check_blocks,
    dequantise_rows,
    dequantise_weights,
    quantise_rows,
    quantise_weights,
)
from moe_jax.float8.row_bytes import bytes_of_row, bytes_to_rows, rows_to_bytes

COMPUTE, E4M3 = "compute", "float8_e4m3"
DTYPES = (COMPUTE, E4M3)  # what MoEConfig.expert_dtype and MoEConfig.dispatch_dtype may be

__all__ = [
    "BLOCK",
    "COMPUTE",
    "DTYPES",
    "E4M3",
    "block_of",
    "check_blocks",
    "dequantise_rows",
    "dequantise_weights",
    "bytes_of_row",
    "bytes_to_rows",
    "quantise_rows",
    "quantise_weights",
    "rows_to_bytes",
]
