"""DeepSpeed-MoE (Rajbhandari et al. 2022, arXiv 2201.05596): its numbers, and ours beside them.

The paper's text is at hand as its abstract and a summary; numbers that neither has are those of its authors' posts,
"DeepSpeed-MoE for NLG" (P) and the tutorial on MoE inference (T) of DeepSpeed's documentation, and of the lists in
configs/model. What is only drawn has no number here.

    sizes           section 3, 4: 350M+MoE-128 13 B, 1.3B+MoE-128 52 B (P); PR-MoE 4 B, 31 B; 2.4B+MoE-128 107.7 B,
                    24B+MoE-128 1,046.9 B (T); up to 3.7 x smaller with PR-MoE and MoS (abstract)
    parallelism     section 4: on 128 GPUs, layers of 32, 64, 128 experts have EP 32, 64, 128 and DP 4, 2, 1
    training_cost   section 3: 70 samples/s of the 6.7B model, 372 of 1.3B+MoE-128, 128 A100 (P); "5x" (abstract)
    equal_loss      section 3: 350M+MoE-128 has the loss of a dense model of 4 x its base, 1.3B+MoE-128 of 5 x (P)
    pr_moe_mos      section 4: as good as MoE with fewer parameters; staged distillation best: no loss in the texts
    inference       section 5: up to 4.5 x faster, 9 x cheaper than the dense model of equal quality (abstract)
    latency         section 5: up to 7.3 x lower latency than the MoE baseline (abstract); 2 to 3.2 x on 8 to 32 GPUs at
                    52 B (T); by devices to 256: drawn only
    gating          section 5: index tables instead of one-hot einsums: no number in the texts
"""

from __future__ import annotations

from moe_jax.papers.table import Tables

TABLES: Tables = {}
