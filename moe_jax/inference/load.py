"""A run folder as a `Generator`, and what of its config differs when the model generates."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from moe_jax.config import parse_run_config
from moe_jax.config.run_config import RunConfig
from moe_jax.data import Tokenizer, build_tokenizer
from moe_jax.data.tokenizer import END_FILES, read_end_ids
from moe_jax.errors import UserError
from moe_jax.inference.generator import Generator, even_placement
from moe_jax.kernels.float8 import COMPUTE
from moe_jax.models import LanguageModel, ModelConfig
from moe_jax.models.attention import resolve_attention
from moe_jax.models.config import expert_counts
from moe_jax.moe import MoEConfig
from moe_jax.moe.routers import find
from moe_jax.observe import RunFolder
from moe_jax.parallel.mesh import build_mesh
from moe_jax.training.checkpoint import Checkpointer
from moe_jax.training.feed import padded_vocabulary

MATRICES = ("qkv", "q", "kv", "out", "w_in", "w_gate", "w_out", "head")  # of attention, FFNs, and an untied head
TOKENIZER = "tokenizer.json"


def inference_configs(model: ModelConfig, moe: MoEConfig) -> tuple[ModelConfig, MoEConfig]:
    """Return both as a generating program takes them: nothing saved for a backward, no noise, no capacity.

    Raises:
      UserError: a model that does not predict the next token, or a router that chooses for a whole batch at once.
    """
    if model.kind != "gpt":
        raise UserError(
            f"ModelConfig.kind ({model.kind!r}) cannot generate: it sees what follows a token; give a run with "
            "ModelConfig.kind = 'gpt'"
        )
    names = dict.fromkeys([moe.router, *(str(run.get("router", moe.router)) for run in model.runs)])
    for name in names:
        if not find(name).by_token:
            raise UserError(
                f"MoEConfig.router ({name!r}) lets a token's experts depend on the other tokens of its batch, so text "
                f"would depend on what is generated beside it; bind MoEConfig.router = 'topk', by which each "
                "token chooses for itself"
            )
    changes = {"remat": "none", "prefetch": "none", "refetch_replicas": False, "sequence_parallel": False}
    model = dataclasses.replace(model, **changes)
    # A capacity bounds what an expert takes of the tokens gated together, so a prompt's text would depend on what is
    # generated beside it, on its batch's padding, and on whether a token is read with its prompt or by itself.
    moe = dataclasses.replace(moe, capacity_factor=None, gate_noise=0.0, balance_over="batch", record_choices=False)
    # float8 is how a run trains faster, and is not how single tokens are decoded
    moe = dataclasses.replace(moe, expert_dtype=COMPUTE, dispatch_dtype=COMPUTE)
    return model, moe


def load(
    workdir: str | os.PathLike[str], *, step: int | None = None, averaged: bool = False, bindings: Sequence[str] = (),
    devices: Sequence | None = None, quantize: str = "none", decode: str = "gather",
) -> Generator:  # fmt: skip
    """Return a finished or running run's model, ready to generate.

    Args:
      workdir: the run folder; step: of a checkpoint, None is the newest.
      averaged: take the moving average of the parameters.
      bindings: lines 'Name.field = value' that win over the run's config, such as MoEConfig.schedule, or the sizes in
        MeshConfig, which must make the number of devices.
      devices: to run on; None takes all.
      quantize: 'int8' keeps the experts' weights so, for a small change of the loss.
      decode: how single tokens meet their experts, 'gather' or 'exchange', as `Generator` says.

    Raises:
      UserError: no such run or checkpoint, a model that cannot generate, or a mesh that does not fit it.
    """
    config, folder = run_config(workdir, bindings), RunFolder(workdir, create=False)
    checkpoints = Checkpointer(folder.checkpoints, keep=1)
    try:
        steps = checkpoints.steps()
        if not steps:
            raise UserError(
                f"run folder {folder.path} has no finished checkpoint; train first, with the same --workdir"
            )
        if step is not None and step not in steps:
            raise UserError(
                f"run folder {folder.path} has no checkpoint of step {step}, only of {', '.join(map(str, steps))}; "
                "take one of these"
            )
        step = steps[-1] if step is None else step
        if averaged and not checkpoints.has_ema(step):
            raise UserError(
                f"the checkpoint of step {step} of {folder.path} holds no averaged parameters; leave --averaged out, "
                "or train with train.ema_decay"
            )
        tokenizer = find_tokenizer(config, folder.path)
        model = build_model(config, jax.devices() if devices is None else list(devices), tokenizer)
        abstract = jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(model.roles.mesh, spec)
            ),
            model.shapes(),
            model.layout().params,
        )
        homes = {segment.name: even_placement(model, segment).home for segment in model.expert_segments}
        params = checkpoints.restore_params(step, abstract, homes, "ema" if averaged else "params")
    finally:
        checkpoints.close()
    leaves, tree = jax.tree.flatten_with_path(params)
    dtype, cast = model.config.dtype, []
    for path, leaf in leaves:
        # Experts and matrices of blocks are kept as every step would cast them. Norms, gates, biases and embeddings
        # stay as trained, but for an untied output head: they are read in their own dtype.
        if leaf.dtype == dtype or not is_matrix(path):
            cast.append(leaf)
            continue
        own = jax.jit(lambda leaf: leaf.astype(dtype), out_shardings=leaf.sharding)(leaf)
        cast.append(jax.block_until_ready(own))
        leaf.delete()  # not two banks at once
    return Generator(
        model,
        jax.tree.unflatten(tree, cast),
        tokenizer=tokenizer,
        # of generation_config.json, else of config.json, else the tokenizer's
        end_ids=read_end_ids(folder.path) or (() if tokenizer is None else tokenizer.end_ids),
        vocabulary=model.vocab_size if tokenizer is None else min(tokenizer.vocab_size, model.vocab_size),
        quantize=quantize,
        decode=decode,
    )


def run_config(workdir: str | os.PathLike[str], bindings: Sequence[str] = ()) -> RunConfig:
    """Return the config of a run folder; `bindings` win over it. A UserError if there is no such run."""
    folder = RunFolder(workdir, create=False)
    if not folder.config.exists():
        raise UserError(f"run folder {folder.path} holds no config.gin; give the --workdir of a run that has trained")
    return parse_run_config([str(folder.config)], bindings)[0]


def build_model(config: RunConfig, devices: Sequence, tokenizer: Tokenizer | None) -> LanguageModel:
    """Return the model of a run on a mesh of `devices`, as it generates; nothing is allocated."""
    model, moe = inference_configs(config.model, config.moe)
    roles = build_mesh(config.mesh, devices, expert_counts(model, moe, config.mesh, len(devices)))
    if tokenizer is None and not model.vocab_size:
        raise UserError(
            f"DataConfig.tokenizer ({config.data.tokenizer!r}) is not there, and only it says how many ids the "
            f"vocabulary has; put it back, or bind ModelConfig.vocab_size"
        )
    return LanguageModel(
        config=resolve_attention(model, roles.mesh.devices.flat[0]),
        moe=moe,
        vocab_size=model.vocab_size or padded_vocabulary(tokenizer, model),
        roles=roles,
        zero_stage=0,
        expert_zero_stage=0,
    )


def find_tokenizer(config: RunConfig, folder: Path) -> Tokenizer | None:
    """Return the run's tokenizer, that of its folder where its own path is gone; None where neither is there.

    A conversion of a checkpoint without a tokenizer leaves 'byte' in the config; its vocabulary is not that of bytes.
    """
    named, inside = config.data.tokenizer, folder / TOKENIZER
    if named == "byte":
        converted = config.model.vocab_size > 0 and (folder / END_FILES[-1]).exists()
        return None if converted else build_tokenizer(config.data)
    if os.path.exists(os.path.expanduser(named)):
        return build_tokenizer(config.data)
    return build_tokenizer(dataclasses.replace(config.data, tokenizer=str(inside))) if inside.exists() else None


def is_matrix(path) -> bool:
    """Say whether the leaf at a key path of {'dense', 'bank'} is an expert's or a block's matrix."""
    keys = [entry.key for entry in path]
    return keys[0] == "bank" or "gate" not in keys[:-1] and keys[-1] in MATRICES
