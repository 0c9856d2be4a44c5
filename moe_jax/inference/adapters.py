"""Adapters of a run as files: added to the tensors of a checkpoint of transformers, or alone, as peft reads them.

Inputs: a run that trained adapters (`models/lora.py`), and the tensor places of its model. Outputs: whole tensors; or a
folder with adapter_config.json and adapter_model.safetensors. transformers 5 holds all experts of a layer in two
tensors, [E, 2 F, M] of the gate half and the other, and [E, M, F]. peft adapts each by one pair of factors for an
expert (`target_parameters`), so those of the halves become one pair of twice the rank: A the one above the other, B the
two as blocks, which is exactly the same sum.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from moe_jax.config.run_config import RunConfig
from moe_jax.inference.tensor_places import TensorPlace
from moe_jax.models import LanguageModel
from moe_jax.models.counts import shapes_and_layout
from moe_jax.models.language_model import flatten, is_bank
from moe_jax.models.lora import is_adapter
from moe_jax.models.transformer import matrix_dims
from moe_jax.moe.experts import LORA_A, LORA_B
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.storage.checkpoint import Checkpointer

PREFIX = "base_model.model."


class Adapters:
    """The adapters in a checkpoint of a run, on the host."""

    def __init__(self, run: RunConfig, vocab_size: int, checkpoints: Checkpointer, step: int):
        roles = build_mesh(MeshConfig(), 1)
        model = LanguageModel(config=run.model, moe=run.moe, vocab_size=vocab_size, roles=roles, lora=run.lora)
        names = [name for name in flatten(shapes_and_layout(model)[0], "params") if is_adapter(name)]
        self.lora, self._arrays = run.lora, checkpoints.read_arrays(step, names)

    def factors(self, place: TensorPlace) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what adapts the tensor [out, in] of a place: (A [rank, in], B [out, rank]), None without any."""
        if place.leaf + LORA_A not in self._arrays:
            return None
        rank, stacked = self.lora.rank, 2 if is_bank(place.leaf) else 1
        inner, _ = matrix_dims(place.leaf.rsplit("/", 1)[-1])
        of_b = tuple(at for dim, at in enumerate(place.index) if dim - stacked not in inner)
        a, b = self._arrays[place.leaf + LORA_A][place.index], self._arrays[place.leaf + LORA_B][of_b]
        out, into = place.shape
        a = dataclasses.replace(place, shape=(rank, into), pairs=0).to_tensor(a)
        return a, dataclasses.replace(place, shape=(out, rank)).to_tensor(b)

    def merged(self, place: TensorPlace, tensor: np.ndarray) -> np.ndarray:
        """Return the tensor of a place with its adapters added."""
        if (pair := self.factors(place)) is None:
            return tensor
        a, b = pair
        return tensor + (self.lora.alpha / self.lora.rank) * (b @ a)

    def peft_tensors(self, places: list[TensorPlace]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, array) as peft has them: lora_A [rank, in], lora_B [out, rank], of all experts side by side."""
        fused: dict[str, dict[int | None, list[tuple]]] = {}
        for place in places:
            if (pair := self.factors(place)) is None:
                continue
            if place.fused:
                name, _, half = place.fused
                fused.setdefault(name, {}).setdefault(half, []).append(pair)
            else:
                yield from _named(place.name.removesuffix(".weight"), *pair)
        for name, halves in fused.items():
            module, _, tensor = name.rpartition(".")
            all_a, all_b = [], []  # of a half each: [E, rank, in] and [E, out, rank], rows of the other half zero
            for half, pairs in halves.items():
                a, b = map(np.stack, zip(*pairs, strict=True))
                above = (half or 0) * b.shape[1]
                below = 0 if half is None else b.shape[1] - above
                all_a.append(a)
                all_b.append(np.pad(b, ((0, 0), (above, below), (0, 0))))
            a, b = np.concatenate(all_a, axis=1), np.concatenate(all_b, axis=2)
            # peft wraps the module once for each of its tensors, the first one innermost
            if tensor == "gate_up_proj" and f"{module}.down_proj" in fused:
                module += ".base_layer"
            yield from _named(module, a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1))

    def peft_config(self, places: list[TensorPlace]) -> dict:
        """Return adapter_config.json."""
        adapted = [place for place in places if place.leaf + LORA_A in self._arrays]
        modules = sorted({place.name.removesuffix(".weight") for place in adapted if not place.fused})
        fused = [place.fused for place in adapted if place.fused]
        tensors = sorted({re.sub(r"^model\.layers\.\d+\.", "", name) for name, *_ in fused}, reverse=True)
        halves = {half for *_, half in fused}
        rank, alpha = self.lora.rank, self.lora.alpha
        wide = {"mlp.experts.gate_up_proj": 2} if {0, 1} <= halves else {}
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
            "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
            "target_modules": modules, "target_parameters": tensors or None,
            "rank_pattern": {name: times * rank for name, times in wide.items()},
            "alpha_pattern": {name: times * alpha for name, times in wide.items()},
        }  # fmt: skip


def _named(module: str, a: np.ndarray, b: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for letter, array in (("A", a), ("B", b)):
        yield f"{PREFIX}{module}.lora_{letter}.weight", np.ascontiguousarray(array)
