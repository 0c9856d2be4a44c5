"""Hecate's figures: what its text says of each, and what the one cost model says of the same models and clusters.

`PAPER` lists every row with the paper's numbers (section 1: claims; 5.2: figures 9, 10; 5.3: 11 to 13; 5.4: 14, 15;
4.2: the overlap degree t); a figure's other values stand in no text.
"""

from __future__ import annotations

Range = tuple[float, float] | None

PAPER: dict[str, dict[str, Range]] = {
    "overlap_degree": {"t, experts that hide behind attention": None},
    "figure_9": {
        "Hecate over EP, 16 GPUs": (1.40, 1.58),
        "Hecate over EP, 32 GPUs": (1.34, 1.78),
        "Hecate over the best baseline, geometric mean, 16 GPUs": (1.645, 1.645),
        "Hecate over the best baseline, geometric mean, 32 GPUs": (2.05, 2.05),
    },
    "figure_10": {
        "Hecate over EP": (1.26, 1.70),
        "Hecate over the baselines, geometric mean": (2.945, 2.945),
    },
    "figure_11": {
        "layer of EP over layer of Hecate": (2.8, 18.8),
        "the same, geometric mean": (11.87, 11.87),
    },
    "figure_12": {
        "all-to-all of EP over Hecate's": (12.3, 12.3),
        "exposed sparse collectives, Hecate-RM over Hecate": (3.6, 3.6),
        "Hecate-RM over the best baseline": (1.4, 1.4),
    },
    "figure_13": {
        "parameters, Hecate over EP": (5.73, 5.73),
        "all, Hecate over EP": (1.64, 1.64),
        "all, FlexMoE over Hecate": (1.83, 1.83),
        "all, Hecate-RM over EP": (1.116, 1.116),
        "materialized parameters of Hecate-RM, % of Hecate's": (9.8, 9.8),
    },
    "figure_14": {
        "Hecate-RM slower than Hecate, %": (7.5, 16.9),
        "largest batch of Hecate-RM": (6, 6),
        "largest batch of any other": None,
    },
    "figure_15a": {
        "both over sharding alone": (3.32, 3.32),
        "both over materialization alone": (1.27, 1.27),
    },
    "figure_15b": {"sharding over EP, resharded every 10 to 100 iterations": (1.34, 1.42)},
    "claims": {
        "Hecate over any baseline, at most": (3.54, 3.54),
        "Hecate-RM over any baseline, at most": (1.52, 1.52),
        "imbalanced over balanced EP, cluster A, at most": (5.18, 5.18),
    },
}  # fmt: skip
