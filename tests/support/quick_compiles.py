"""Flags with which XLA:CPU compiles sooner and its code runs slower: the suite compiles far more than it computes.

LLVM at -O0 halves the time of the suite. In one piece instead of 32 a program compiles sooner where every core is busy
anyway, and the older of the two emitters of fusions, which jaxlib 0.10 still has, needs less code: together another
third. Imports no jax, which reads the flags once.
"""

import importlib.metadata

QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    QUICK += " --xla_cpu_use_fusion_emitters=false"
