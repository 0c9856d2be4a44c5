"""The frozen model under the adapters of a run: read from the folder that it started from, checked, put on the mesh.

Inputs: a `RunConfig` with a `LoraConfig.rank`, and the run folder that --init_from names, or a checkpoint remembers.
Outputs: the identity of the base, which checkpoints hold instead of its weights, and its parameters on the devices.
"""

from __future__ import annotations

import os

from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.models import LanguageModel
from moe_jax.models.lora import base_of, joined
from moe_jax.storage.bank_order import Homes
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.storage.host_data import HostData, ModelIdentity
from moe_jax.storage.run_folder import RunFolder

_HASHING_SECONDS = 1800.0  # that the others wait while process 0 reads a model: about a GB a second


def settle_base(config: RunConfig, init_from: str, before: ModelIdentity | None, hosts: Hosts) -> ModelIdentity | None:
    """Return the identity of the model that a run adapts; None without LoRA.

    Args:
      init_from: run folder that the command names, or ''; it wins over the one that the checkpoint remembers.
      before: the base as the checkpoint names it that the run goes on from, None for a new run.

    Raises:
      UserError: no such folder, or not the model that the run adapted so far.
    """
    if not config.lora.rank:
        return None
    folder = os.path.abspath(os.path.expanduser(init_from)) if init_from else before.folder if before else ""
    if not folder:
        raise UserError(
            f"LoraConfig.rank ({config.lora.rank}) adapts a model that is there already; name its run folder with "
            "--init_from=DIR, or set LoraConfig.rank = 0"
        )
    checkpoints, step = _open(folder, before.step if before else None)
    hosts.agree("base", f"{folder}, step {step}", lambda *_: f"{folder} is not the same run on all processes; name one "
        "folder that all machines share")  # fmt: skip
    parameters = hosts.gather_text("hash of base", checkpoints.digest(step) if hosts.is_main else "", _HASHING_SECONDS)
    identity = ModelIdentity(folder=folder, step=step, parameters=parameters[0])
    if before is not None and before.parameters != identity.parameters:
        raise UserError(
            f"{folder}, step {step}, is not the model that these adapters are for: its parameters have the hash "
            f"{identity.parameters:.8}, and {before.folder} had {before.parameters:.8}; give its folder with "
            "--init_from"
        )
    return identity


def check_base(base: ModelIdentity) -> None:
    """Raise a UserError where the folder of a base does not hold the parameters that adapters were trained on."""
    checkpoints, step = _open(base.folder, base.step)
    parameters = checkpoints.digest(step)
    if parameters != base.parameters:
        raise UserError(
            f"{base.folder} is not the model that these adapters are for: its parameters have the hash "
            f"{parameters:.8}, and had {base.parameters:.8}; put it back"
        )


def _open(folder: str, step: int | None) -> tuple[Checkpointer, int]:
    """Return the checkpoints of a base and the step of the one that is meant, the newest for None.

    Raises:
      UserError: one of them is gone; it says what they are needed for.
    """
    try:
        checkpoints = Checkpointer(RunFolder(folder, create=False).checkpoints, keep=1)
    except UserError as error:
        raise UserError(
            f"the model under the adapters: {error}; put it back there, or resume the run with --init_from=DIR"
        ) from error
    if step is not None and step not in (there := checkpoints.steps()):
        raise UserError(
            f"{checkpoints.folder} has the steps {', '.join(map(str, there)) or 'none'}, and these adapters are for "
            f"step {step}: put that one back"
        )
    return checkpoints, checkpoints.choose(step)


def load_base(model: LanguageModel, abstract_params: dict, base: ModelIdentity, home: Homes) -> dict:
    """Return the frozen parameters {'dense', 'bank'} on the devices, in the dtypes in which a run keeps them.

    Args:
      model: with adapters; abstract_params: its parameters as ShapeDtypeStructs with shardings.
      home: where the experts are to be stored.
    """
    checkpoints, step = _open(base.folder, base.step)
    stored = model.config.param_dtype
    return checkpoints.restore_params(step, base_of(abstract_params), home, stored_dtype=stored)


def restore_params(
    checkpoints: Checkpointer, step: int, model: LanguageModel, abstract_params: dict, home: Homes, part: str = "params"
) -> dict:
    """Return the parameters of a checkpoint; where it holds adapters, with the model under them, which is checked."""
    if not model.lora.rank:
        return checkpoints.restore_params(step, abstract_params, home, part)
    adapters = checkpoints.restore_params(step, model.trained(abstract_params), home, part)
    base = HostData.from_json(checkpoints.read_host(step)).base
    check_base(base)
    return joined(load_base(model, abstract_params, base, home), adapters)
