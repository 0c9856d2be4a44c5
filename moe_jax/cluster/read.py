"""Read and write cluster files.

Inputs: the path of a preset (lines `Cluster.field = value`, valid gin too) or of calibrate's JSON, with the same
fields. Outputs: a `Cluster`. Values are Python literals; nothing is executed and no gin is needed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pathlib
import re

from moe_jax.cluster.cluster import Cluster
from moe_jax.errors import UserError
from moe_jax.renames import fit_of_today

_LINE = re.compile(r"^Cluster\.(\w+)\s*=\s*(.+)$")


def read_cluster(path: str | pathlib.Path) -> Cluster:
    """Return the cluster of a `.gin` preset or a `.json` calibration file.

    Raises:
      UserError: no such file, a line that is no binding of Cluster, or a field that Cluster does not have.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(
            f"cluster file {str(path)!r} does not exist; give a configs/cluster/NAME.gin or calibrate's file"
        )
    text = path.read_text(encoding="utf-8")
    fields = _from_json(path, text) if path.suffix == ".json" else _from_bindings(path, text)
    if isinstance(fields.get("fits"), dict):
        fields["fits"] = {fit_of_today(str(name)): fit for name, fit in fields["fits"].items()}
    known = [field.name for field in dataclasses.fields(Cluster)]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise UserError(f"{path.name}: Cluster has no field {unknown[0]!r}; its fields are {', '.join(known)}")
    return Cluster(**{"name": path.stem, **fields})


def read_named_cluster(path: str) -> Cluster:
    """Read a cluster file, named from here or from beside the package."""
    beside = pathlib.Path(__file__).parents[2] / path
    return read_cluster(beside if not os.path.exists(path) and beside.exists() else path)


def write_cluster(cluster: Cluster, path: str | pathlib.Path) -> None:
    """Write a cluster as JSON with the fields of a preset; absent ones are null."""
    fields = dataclasses.asdict(cluster)
    fields["fits"] = {name: dataclasses.asdict(fit) for name, fit in cluster.fits}
    pathlib.Path(path).write_text(json.dumps({"cluster": fields}, indent=1) + "\n", encoding="utf-8")


def _from_json(path: pathlib.Path, text: str) -> dict:
    try:
        fields = json.loads(text)["cluster"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path.name} is not a calibration file (JSON with an object 'cluster'): {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path.name}: 'cluster' must be an object of Cluster's fields, not {type(fields).__name__}")
    return fields


def _from_bindings(path: pathlib.Path, text: str) -> dict:
    fields: dict = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise UserError(f"{path.name}:{number}: {line!r} is not a line 'Cluster.field = value'")
        name, value = match.groups()
        if name in fields:
            raise UserError(f"{path.name}:{number}: Cluster.{name} is bound twice")
        try:
            fields[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise UserError(f"{path.name}:{number}: {value!r} of Cluster.{name} is not a Python literal") from error
    return fields
