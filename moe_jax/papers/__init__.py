"""The tables and figures of the five papers, and `scale`, past them: a file each for `moe_jax.reproduce`."""

import importlib

PAPERS = ("pro_prophet", "fastermoe", "parm", "hecate", "deepspeed_moe", "scale")


def tables_of(paper: str) -> dict:
    """Return {name: function(Inputs) -> Table} of a name of `PAPERS`; only its file is loaded."""
    return importlib.import_module(f"{__name__}.{paper}").TABLES
