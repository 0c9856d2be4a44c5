"""FasterMoE (PPoPP 2022): its figures 5, 10 to 14 and table 3, computed again.

    figure_5   the DDL-Roofline of one layer: data, model and expert parallelism, shadowing, and the smart schedule
    figure_10  speed-up over ZeRO stage 3 of stages 1 and 2, FastMoE and FasterMoE, by model
    figure_11  shadowed experts and latency, by iteration and layer of MoE-BERT-Deep
    figure_12  speed-up of the smart schedule, bound and reached, by layer and model
    figure_13  speed-up of shadowing, the smart schedule and both, by model
    table_3    gates: hours and iterations to a loss of 4.0, milliseconds of an iteration (and figure 14, the same
               losses over time)

Machines, layers, precision and rules: `docs/deviations.md`. Letters: docs/notation.md; n samples.
"""

from __future__ import annotations

# What the text states, by section, before anything was computed here.
STATED = {
    "figure_5": (  # section 3.3, and 4.1, 4.2 for the arrows; no coordinate stands in the text
        "data parallelism has the least ratio",
        "overlapped with the backward it lies above the semi-ideal curve",
        "model parallelism has a larger ratio than data parallelism",
        "model parallelism has a ratio above 1",
        "model parallelism is not above the semi-ideal curve",
        "expert parallelism has a larger ratio than model parallelism",
        "expert parallelism lies below the semi-ideal curve",
        "shadowing lowers the ratio and raises the throughput",
        "the smart schedule lies above the semi-ideal curve",
    ),
    "figure_10": {  # experiments, overall speed-up; FasterMoE's
        "over ZeRO-3, johnny": 6.63,
        "over ZeRO-3, trevor": 17.87,
        "over ZeRO-2, at most": 3.94,
        "over ZeRO-1": None,
        "FastMoE over ZeRO-3": None,  # 'better'
    },
    "figure_11": {"experts shadowed": 0.19, "speed-up with one expert shadowed, at most": 1.97},
    "figure_12": {"bound, at most": 1.71, "reached, at most": 1.42, "reached over bound, best layer": 0.99},
    "figure_13": {
        "shadowing, johnny": 1.95,
        "shadowing, trevor": 4.74,
        "smart schedule": 1.40,
        "both, johnny": 2.20,
        "both, trevor": 5.72,
    },
    "table_3": {  # experiments, gates; ratios of the text
        "iteration, FastMoE over FasterMoE": 1.33,
        "iteration, FasterMoE over the topology gate": 1.094,
        "iterations, GShard over top-2": 2.38,
        "iterations, topology gate over top-2": 1.18,
        "time, GShard over the topology gate": 1.37,
        "time, BASE over the topology gate": 2.19,
    },
}
# table 3 as printed in the paper: hours, thousands of iterations, ms of one. Its cells are not in the text that this
# project has; their ratios are the text's, but for FastMoE over FasterMoE, 1.32 there.
TABLE_3 = {
    "FastMoE": (7.19, 12.2, 2117),
    "GShard": (8.58, 30.9, 1000),
    "BASE": (13.7, 21.0, 2355),
    "FasterMoE": (5.81, 13.0, 1609),
    "topology gate": (6.25, 15.3, 1471),
}
