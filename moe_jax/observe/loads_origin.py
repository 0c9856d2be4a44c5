"""What run a trace of loads was recorded by: sizes of the model, and the mesh.

Inputs: a `LoadsOrigin` for each sample. Outputs: plain arrays that stand beside the loads in an npz file, and back:
    M, F, K           int64 []    model dim, hidden dim of an expert, experts chosen by a token (top_k)
    dtype             str []      the compute dtype, such as 'bfloat16'
    mesh              str [n]     each mesh that the run used, oldest first, as JSON {axis: size}; '' where not known
    devices_per_node  int64 [n]   devices of an expert-parallel group that share a node, 0 where not known
    cluster           str [n]     the cluster file that the run named, '' for none
    mesh_index        int64 [Nt]   which of the n each sample was recorded on
and, since prices need the layer that ran, of the newest start that says them:
    activation        str []      'gelu' or 'swiglu', '' where not known
    moe_every         int64 []    blocks for each MoE layer, 0 where not known, as below
    dense_F           int64 []    hidden dim of a dense FFN
    sequence_length   int64 []    tokens of a sequence
and, where layers differ or have fewer experts than the mesh has expert-parallel devices,
    segments          int64 [s, 4]  MoE layers, E, F and K of each run of equal layers, first layers first; layer l has
                                    the first E experts of the loads and the first min(E, devices) sources
    preceding         int64 [s, 2]  moe_every and dense_F of each of them; files of older versions have none
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from moe_jax.errors import UserError

KEYS = ("M", "F", "K", "dtype", "mesh", "devices_per_node", "cluster", "mesh_index")
LAYER_KEYS = {
    "activation": "activation",
    "moe_every": "moe_every",
    "dense_hidden_dim": "dense_F",
    "sequence_length": "sequence_length",
}  # field -> key; files of older versions have none of them
SEGMENTS, PRECEDING = "segments", "preceding"  # where there are any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadsOrigin:
    """Describe the run that recorded a sample.

    Attributes:
      model_dim, hidden_dim, top_k: M, F and K.
      dtype: what the model computes in.
      mesh: (axis, size) of the device mesh, slowest axis first.
      devices_per_node: devices of an expert-parallel group that share a node.
      cluster: path of the cluster file that the run named, or ''.
      activation, moe_every, dense_hidden_dim, sequence_length: of the layer and what precedes it; '' and 0 where not
        known.
      segments: (MoE layers, E, F, K) of each run of equal layers, where they differ or do not fill the mesh; then F, K,
        moe_every and dense_hidden_dim above are those of the first.
      preceding: (moe_every, dense_hidden_dim) of each of them; () where not known.
    """

    model_dim: int
    hidden_dim: int
    top_k: int
    dtype: str
    mesh: tuple[tuple[str, int], ...]
    devices_per_node: int
    cluster: str = ""
    activation: str = ""
    moe_every: int = 0
    dense_hidden_dim: int = 0
    sequence_length: int = 0
    segments: tuple[tuple[int, int, int, int], ...] = ()
    preceding: tuple[tuple[int, int], ...] = ()

    @property
    def model(self) -> tuple[int, int, int, str, tuple]:
        """M, F, K, dtype and segments, which do not change within a run."""
        return self.model_dim, self.hidden_dim, self.top_k, self.dtype, self.segments

    @property
    def sources(self) -> int:
        """S, members of the largest expert-parallel group."""
        devices = math.prod(size for axis, size in self.mesh if axis.partition("_of_")[0] in ("expert", "expert_mp"))
        return min(devices, max((experts for _, experts, _, _ in self.segments), default=devices))

    @property
    def expert_shards(self) -> int:
        """N_ESP, devices that share the hidden dim of an expert; 1 where the mesh is not known."""
        return math.prod(size for axis, size in self.mesh if axis in ("expert_shard", "expert_shard_mp"))

    def describe_mesh(self) -> str:
        """Return the mesh in words, such as 'data 2 x expert 4'."""
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh)


def origin_arrays(origins: Sequence[LoadsOrigin | None]) -> dict[str, np.ndarray]:
    """Return the arrays of the docstring for one origin per sample; {} where none is known.

    Raises:
      UserError: the samples are of two models.
    """
    models = list(dict.fromkeys(origin.model for origin in origins if origin is not None))
    if not models:
        return {}
    if len(models) > 1:
        raise UserError(
            f"samples have (M, F, K, dtype, segments) {models}: they are not of one model; use one folder for each"
        )
    meshes = list(dict.fromkeys((o.mesh, o.devices_per_node, o.cluster) if o else ((), 0, "") for o in origins))
    places = {mesh: index for index, mesh in enumerate(meshes)}
    M, F, K, dtype, segments = models[0]
    index = [places[(o.mesh, o.devices_per_node, o.cluster) if o else ((), 0, "")] for o in origins]
    return {
        "M": np.int64(M),
        "F": np.int64(F),
        "K": np.int64(K),
        "dtype": np.array(dtype),
        "mesh": np.array([json.dumps(dict(mesh)) if mesh else "" for mesh, _, _ in meshes]),
        "devices_per_node": np.array([per_node for _, per_node, _ in meshes], np.int64),
        "cluster": np.array([cluster for _, _, cluster in meshes]),
        "mesh_index": np.array(index, np.int64),
        **({SEGMENTS: np.array(segments, np.int64)} if segments else {}),
        **_layer_arrays(origins),
    }


def _layer_arrays(origins: Sequence[LoadsOrigin | None]) -> dict[str, np.ndarray]:
    """Return what the newest origin that knows its layer says of it."""
    known = next((origin for origin in reversed(origins) if origin is not None and origin.activation), None)
    if known is None:
        return {}
    preceding = {PRECEDING: np.array(known.preceding, np.int64)} if known.preceding else {}
    return {**{key: np.array(getattr(known, field)) for field, key in LAYER_KEYS.items()}, **preceding}


def _read_segments(arrays: Mapping[str, np.ndarray]) -> tuple[tuple[int, int, int, int], ...]:
    found = []
    for layers, experts, hidden_dim, top_k in arrays.get(SEGMENTS, np.zeros((0, 4), np.int64)).tolist():
        found.append((int(layers), int(experts), int(hidden_dim), int(top_k)))
    return tuple(found)


def _read_preceding(arrays: Mapping[str, np.ndarray]) -> tuple[tuple[int, int], ...]:
    found = []
    for moe_every, dense_hidden_dim in arrays.get(PRECEDING, np.zeros((0, 2), np.int64)).tolist():
        found.append((int(moe_every), int(dense_hidden_dim)))
    if found and len(found) != len(arrays.get(SEGMENTS, ())):
        raise ValueError(f"{PRECEDING} must have a row for each of the {SEGMENTS}")
    return tuple(found)


def read_origins(arrays: Mapping[str, np.ndarray], samples: int, path: object) -> tuple[LoadsOrigin | None, ...]:
    """Return the origin of each of `samples` samples, None where the file does not say.

    Args:
      arrays: of the npz file, those of `KEYS` that it has.
      path: of the file, for errors.

    Raises:
      UserError: the keys are all there and do not fit together.
    """
    if not all(key in arrays for key in KEYS):  # a file of an older version, or of another program
        return (None,) * samples
    try:
        layer = {field: arrays[key].item() for field, key in LAYER_KEYS.items() if key in arrays}
        known: list[LoadsOrigin | None] = [
            None
            if not str(mesh)
            else LoadsOrigin(
                model_dim=int(arrays["M"]),
                hidden_dim=int(arrays["F"]),
                top_k=int(arrays["K"]),
                dtype=str(arrays["dtype"]),
                mesh=tuple((str(axis), int(size)) for axis, size in json.loads(str(mesh)).items()),
                devices_per_node=int(per_node),
                cluster=str(cluster),
                segments=_read_segments(arrays),
                preceding=_read_preceding(arrays),
                **layer,
            )
            for mesh, per_node, cluster in zip(
                arrays["mesh"], arrays["devices_per_node"], arrays["cluster"], strict=True
            )
        ]
        index = arrays["mesh_index"].tolist()
        if len(index) != samples or not all(0 <= place < len(known) for place in index):
            raise ValueError(f"mesh_index must be {samples} numbers below {len(known)}")
        return tuple(known[place] for place in index)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: what it says of its run ({', '.join(KEYS)}) does not fit together ({error}); save it again with "
            "loads and iterations alone"
        ) from error
