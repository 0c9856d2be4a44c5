"""The constants of the cost model: fitted to measured kernels, written to a file, read again.

Inputs: samples of measured kernels, or a file. Outputs: values for `Model`. A fit is a weighted median over the
kernels, so a few kernels that are slow for another reason do not move it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from moe_jax.errors import UserError
from moe_jax.inspection.timeline import Model

LEAST_SAMPLES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One kernel of the program text.

    Attributes:
      matmul_seconds: of its FLOPs at the device's peak; memory_seconds: of its bytes at the full bandwidth.
      measured_seconds: of one execution; executions: of a step.
    """

    matmul_seconds: float
    memory_seconds: float
    measured_seconds: float
    executions: int


def fit_constants(samples: Sequence[Sample], model: Model, pauses: Sequence[float] = ()) -> tuple[dict, dict]:
    """Fit each constant of the model to the samples.

    matmul_efficiency: over kernels that the model counts as bound by their FLOPs, weighted by measured seconds.
    memory_efficiency: over kernels without matmuls that move bytes for at least four launches.
    launch: over kernels with less than a quarter of a launch of work, weighted by executions.
    conditional: the median of `pauses`, less one launch, which the model charges the next kernel anyway.

    Args:
      samples: of one program.
      model: whose constants sort the samples.
      pauses: seconds that the device was idle around each conditional.

    Returns:
      ({name: value}, for a file that `read_constants` takes, without those that have no samples;
      {name: {value, before, samples, quartiles}}).
    """
    points: dict[str, list[tuple[float, float]]] = {field.name: [] for field in dataclasses.fields(Model)}
    for sample in samples:
        took = sample.measured_seconds
        work = max(sample.matmul_seconds, sample.memory_seconds)
        if took <= 0:
            continue
        weight = took * sample.executions
        if work < model.launch / 4:
            points["launch"].append((took, sample.executions))
        elif sample.matmul_seconds / model.matmul_efficiency >= sample.memory_seconds / model.memory_efficiency:
            if sample.matmul_seconds >= model.launch:
                points["matmul_efficiency"].append((min(sample.matmul_seconds / took, 1.0), weight))
        elif not sample.matmul_seconds and sample.memory_seconds >= 4 * model.launch:
            points["memory_efficiency"].append((min(sample.memory_seconds / took, 1.0), weight))
    points["conditional"] = [(max(pause - model.launch, 0.0), 1.0) for pause in pauses]
    fit = {}
    for name, known in points.items():
        enough = len(known) >= LEAST_SAMPLES
        fit[name] = {
            "value": weighted_quantile(known, 0.5) if enough else None,
            "before": getattr(model, name),
            "samples": len(known),
            "quartiles": [weighted_quantile(known, q) for q in (0.25, 0.75)] if enough else None,
        }
    return {name: record["value"] for name, record in fit.items() if record["value"] is not None}, fit


def weighted_quantile(points: Sequence[tuple[float, float]], share: float) -> float:
    """Return the least value so that points (value, weight) of at most it have `share` of the weight."""
    ordered = sorted(points)
    goal, sum_of_weights = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        sum_of_weights += weight
        if sum_of_weights >= goal * (1 - 1e-12):
            return value
    return ordered[-1][0]


def read_constants(path: str) -> Model:
    """Return the model with the constants of a file; those that it leaves out keep their defaults.

    Args:
      path: JSON, {"matmul_efficiency": 0.6, ...}, or such a record under "constants" as `gpu_day.json` and a report of
        `inspect --profile` hold it.

    Raises:
      UserError: no such file, no constants in it, an unknown name, or a value out of range.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--constants ({path!r}) cannot be read as JSON: {error}") from error
    if isinstance(record, dict) and "constants" in record:
        record = record["constants"]
    names = [field.name for field in dataclasses.fields(Model)]
    if not isinstance(record, dict) or not record:
        raise UserError(f"--constants ({path!r}) holds no constants; write some of {', '.join(names)}")
    for name, value in record.items():
        if name not in names:
            raise UserError(f"--constants ({path!r}) names {name!r}; the model has {', '.join(names)}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and _is_float(value)
        efficiency = name.endswith("efficiency")
        if not is_number or value < 0 or (efficiency and not 0 < value <= 1):
            rule = "a share above 0 and at most 1" if efficiency else "seconds, at least 0"
            raise UserError(f"--constants ({path!r}): {name} ({value!r}) must be {rule}")
    return Model(**{name: float(value) for name, value in record.items()})


def _is_float(value: int | float) -> bool:
    """Say whether a number of a JSON file is a finite float; its integers have no bound."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
