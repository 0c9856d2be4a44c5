"""The frozen model under the adapters of a run: found in the folder that it started from, checked, put on the mesh.

Inputs: a `RunConfig` with a `LoraConfig.rank`, and the run folder that --init_from names, or a checkpoint remembers.
Outputs: the identity of the base, which checkpoints hold instead of its weights, and its parameters on the devices.
"""

from __future__ import annotations

import contextlib
import json
import os

from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.models import LanguageModel
from moe_jax.models.lora import base_of, joined
from moe_jax.storage.bank_order import Homes
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.storage.run_folder import RunFolder

_HASHING_SECONDS = 1800.0  # that the others wait while process 0 reads a model: about a GB a second


def settle_base(config: RunConfig, init_from: str, past: dict, hosts: Hosts) -> dict | None:
    """Return the identity of the model that a run adapts, {'folder', 'step', 'parameters': hash}; None without LoRA.

    Args:
      init_from: run folder that the command names, or ''; it wins over the one that the checkpoint remembers.
      past: host data of the checkpoint that the run goes on from, {} for a new run.

    Raises:
      UserError: no such folder, one that holds adapters itself, or not the model that the run adapted so far.
    """
    before = past.get("base")
    if init_from and not past:
        with contextlib.closing(Checkpointer(RunFolder(init_from, create=False).checkpoints, keep=1)) as other:
            if (step := other.latest()) is not None and (base := other.read_host(step).get("base")):
                raise UserError(
                    f"--init_from={init_from} holds adapters of {base['folder']} and no model; make one of both with "
                    "moe_jax.convert --to_hf, which --from_hf turns into a run folder"
                )
    if not config.lora.rank:
        return None
    folder = os.path.abspath(os.path.expanduser(init_from)) if init_from else before["folder"] if before else ""
    if not folder:
        raise UserError(
            f"LoraConfig.rank ({config.lora.rank}) adapts a model that is there already; name its run folder with "
            "--init_from=DIR, or set LoraConfig.rank = 0"
        )
    with contextlib.closing(_open(folder)) as checkpoints:
        step = _step(checkpoints, before["step"] if before else None)
        parameters = checkpoints.digest(step) if hosts.is_main else ""
    told = hosts.gather_text("base", json.dumps([folder, step, parameters]), _HASHING_SECONDS)
    told = [json.loads(text) for text in told]
    if any(own[:2] != [folder, step] for own in told):
        raise UserError(f"{folder} is not the same run on all processes; name one folder that all machines share")
    identity = {"folder": folder, "step": step, "parameters": told[0][2]}
    if before is not None and before["parameters"] != identity["parameters"]:
        raise UserError(
            f"{folder}, step {step}, is not the model that these adapters are for: its parameters have the hash "
            f"{identity['parameters']:.8}, and {before['folder']} had {before['parameters']:.8}; give its folder with "
            "--init_from"
        )
    return identity


def check_base(identity: dict) -> None:
    """Raise a UserError where the folder of a base does not hold the parameters that adapters were trained on."""
    with contextlib.closing(_open(identity["folder"])) as checkpoints:
        found = checkpoints.digest(_step(checkpoints, identity["step"]))
    if found != identity["parameters"]:
        raise UserError(
            f"{identity['folder']} is not the model that these adapters are for: its parameters have the hash "
            f"{found:.8}, and had {identity['parameters']:.8}; put it back"
        )


def _open(folder: str) -> Checkpointer:
    """Return the checkpoints of a base, or raise a UserError that says what they are needed for."""
    try:
        return Checkpointer(RunFolder(folder, create=False).checkpoints, keep=1)
    except UserError as error:
        raise UserError(
            f"the model under the adapters: {error}; put it back there, or resume the run with --init_from=DIR"
        ) from error


def _step(checkpoints: Checkpointer, step: int | None) -> int:
    """Return the step of a base, its newest for None, or raise a UserError where it is gone."""
    if step is not None and step not in (there := checkpoints.steps()):
        raise UserError(
            f"{checkpoints.folder} has the steps {', '.join(map(str, there)) or 'none'}, and these adapters are for "
            f"step {step}: put that one back"
        )
    return checkpoints.choose(step)


def load_base(model: LanguageModel, abstract_params: dict, identity: dict, home: Homes) -> dict:
    """Return the frozen parameters {'dense', 'bank'} on the devices, in the dtypes in which a run keeps them.

    Args:
      model: with adapters; abstract_params: its parameters as ShapeDtypeStructs with shardings.
      home: where the experts are to be stored.
    """
    wanted, stored = base_of(abstract_params), model.config.param_dtype
    with contextlib.closing(_open(identity["folder"])) as checkpoints:
        return checkpoints.restore_params(identity["step"], wanted, home, stored_dtype=stored)


def restore_params(
    checkpoints: Checkpointer, step: int, model: LanguageModel, abstract_params: dict, home: Homes, part: str = "params"
) -> dict:
    """Return the parameters of a checkpoint; where it holds adapters, with the model under them, which is checked."""
    if not model.lora.rank:
        return checkpoints.restore_params(step, abstract_params, home, part)
    adapters = checkpoints.restore_params(step, model.trained(abstract_params), home, part)
    identity = checkpoints.read_host(step)["base"]
    check_base(identity)
    return joined(load_base(model, abstract_params, identity, home), adapters)
