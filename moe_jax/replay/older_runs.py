"""What a run folder says of its loads, where its loads.npz was written before it said so itself.

Inputs: a run folder's config.gin, of any version, and environment.json. Outputs: a `LoadsOrigin`, as
`observe/loads_origin.py` keeps it now; what the two files do not say is left open, so that replay asks for it.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

from moe_jax.errors import UserError
from moe_jax.observe.loads_origin import LoadsOrigin
from moe_jax.observe.run_folder import RunFolder, read_text
from moe_jax.renames import config_text_of_today


def origin_of_folder(folder: Path, sources: int) -> LoadsOrigin | None:
    """Return the run behind loads of `sources` sources, None where the folder has no config.gin.

    The mesh and the devices of a node are left out where environment.json, which is of the folder's newest start, has
    another mesh.

    Raises:
      UserError: a file of the folder is damaged.
    """
    run = RunFolder(folder, create=False)
    text = read_text(run.config)
    if text is None:
        return None
    values, environment = _values(run.config, text), run.read_environment()
    try:
        origin = LoadsOrigin(
            model_dim=values["ModelConfig.model_dim"],
            hidden_dim=values["ModelConfig.hidden_dim"],
            top_k=values["MoEConfig.top_k"],
            dtype=values["ModelConfig.dtype"],
            mesh=tuple(environment.get("mesh", {}).items()),
            devices_per_node=0,
            cluster=values["PlannerConfig.cluster"] or values["MoEConfig.cluster"],
            activation=values.get("ModelConfig.activation", ""),
            moe_every=values.get("ModelConfig.moe_every", 0),
            dense_hidden_dim=values.get("ModelConfig.dense_hidden_dim") or 0,
            sequence_length=values.get("DataConfig.sequence_length", 0),
        )
        shard, per_node = values["MeshConfig.expert_shard"], values["MeshConfig.devices_per_node"]
    except KeyError as error:
        raise UserError(f"{run.config} does not bind {error.args[0]}; restore the file, or remove it") from error
    if origin.sources != sources:
        return dataclasses.replace(origin, mesh=())
    if not per_node and environment.get("processes") == 1:
        per_node = math.prod(size for _, size in origin.mesh)
    if not per_node:
        return origin
    inside = max(1, per_node // shard)  # as replan/replanner.py's initial_placement
    return dataclasses.replace(origin, devices_per_node=inside if sources % inside == 0 else sources)


def _values(path: Path, text: str) -> dict[str, Any]:
    """Return {binding: value} of a run's config text, under today's names."""
    values = {}
    for number, line in enumerate(config_text_of_today(text).splitlines(), 1):
        binding, equals, value = line.partition(" = ")
        try:
            if equals and not line.startswith("#"):
                values[binding] = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise UserError(f"{path}:{number}: {value!r} is not a value; restore the file, or remove it") from error
    return values
