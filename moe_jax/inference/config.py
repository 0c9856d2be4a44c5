"""What of a run's config differs when its model generates text. Host side; no arrays.

Inputs: `ModelConfig` and `MoEConfig` of a run. Outputs: the same for inference, or the one line that says why this
model cannot generate.

At inference routers drop nothing: a run's `capacity_factor` is left out. A capacity bounds what an expert takes of the
tokens that are gated together, so a prompt's text would depend on the prompts that happen to be generated beside it, on
the padding of its batch, and on whether a token is read with its prompt or by itself. What keeps buffers small while
training is bounded here by passes, as in every dropless run.
"""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError
from moe_jax.float8 import COMPUTE
from moe_jax.models import ModelConfig
from moe_jax.moe import MoEConfig
from moe_jax.routers.registry import find

PER_TOKEN = "topk"  # what a user may choose by token instead


def inference_configs(model: ModelConfig, moe: MoEConfig) -> tuple[ModelConfig, MoEConfig]:
    """Return both as a generating program takes them: nothing saved for a backward, no noise, no capacity,
    and experts in the compute dtype: float8 is how a run trains faster, and is not how single tokens are decoded.

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
        if not find(name).router.by_token:
            raise UserError(
                f"MoEConfig.router ({name!r}) lets a token's experts depend on the other tokens of its batch, so text "
                f"would depend on what is generated beside it; bind MoEConfig.router = {PER_TOKEN!r}, by which each "
                "token chooses for itself"
            )
    changes = {"remat": "none", "prefetch": "none", "refetch_replicas": False, "sequence_parallel": False}
    model = dataclasses.replace(model, **changes)
    moe = dataclasses.replace(moe, capacity_factor=None, gate_noise=0.0, balance_over="batch", record_choices=False)
    moe = dataclasses.replace(moe, expert_dtype=COMPUTE, dispatch_dtype=COMPUTE)
    return model, moe
