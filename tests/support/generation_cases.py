"""A tiny model that generates on any mesh, and the reference that its tokens must follow."""

import jax
import jax.numpy as jnp
import numpy as np
from support.equality_cases import EXPERTS, VOCAB, model_config, moe_config, reference_params
from support.placements import to_bank
from support.reference_model import reference_logits

from moe_jax.inference import Generator
from moe_jax.inference.generator import inference_configs
from moe_jax.models import LanguageModel
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.placement import Placement

LENGTH = 16
PROMPTS = [[1, 2, 3], [5], [7, 8, 9, 10, 11, 12, 13, 14, 15]]


def configs(moe=None, **changes):
    """Return (ModelConfig, MoEConfig) for inference: a dense and an MoE block, 32 positions."""
    changes = {"layers": 2, "moe_every": 2, "max_length": 32, "attention": "blocks", **changes}
    return inference_configs(model_config(**changes), moe_config(**(moe or {})))


def build(config, moe, mesh, **options):
    """Return (Generator on a mesh {name: size}, parameters as the reference takes them)."""
    devices = int(np.prod([size for name, size in mesh.items() if name not in ("model", "devices_per_node")]))
    roles = build_mesh(MeshConfig(**mesh), jax.devices()[:devices])
    model = LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles, zero_stage=0)
    params = reference_params(config, moe, "uniform")
    bank = to_bank(params["experts"], Placement.even(config.moe_layers, EXPERTS, roles.size(roles.expert)))
    placed = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(roles.mesh, spec)),
        {"dense": params["dense"], "bank": bank},
        model.layout().params,
    )
    return Generator(model, placed, **options), params


def recorded_logits(generator):
    """Return a list to which each later step of a generator appends its logits, [B, V] in at least float32."""
    logits, program = [], generator.program

    def recorded(*key):
        def call(*inputs):
            state, chosen = program(*key)(*inputs)
            logits.append(np.asarray(chosen[1]))
            return state, chosen

        return call

    generator.program = recorded
    return logits


def reference_of(params, config, moe, prompt, new):
    """Return log probabilities [new, V] of the tokens after a prompt, all positions computed anew without a cache."""
    last = len(prompt) + len(new) - 1
    ids = np.zeros((1, LENGTH), np.int32)  # one length for all, so that one program serves: what follows is not seen
    ids[0, :last] = [*prompt, *new][:last]
    logits = _reference(params, jnp.asarray(ids), config, moe)[0]
    return np.asarray(jax.nn.log_softmax(logits, -1))[0, len(prompt) - 1 : last]


_reference = jax.jit(reference_logits, static_argnums=(2, 3))
