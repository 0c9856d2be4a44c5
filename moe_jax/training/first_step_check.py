"""Compare an unproven exchange or kernel with a proven one before training on it.

Inputs: a `Session`, before it has a state, and the job's processes. Outputs: the session, with a proven grouped matmul
where 'auto' had chosen one that does not hold, and a record for environment.json. Some things that a run may use are
not proven by the tests of this project: `ragged_all_to_all`, which is new, with reports of wrong gradients; the
`hopper` and `mosaic` grouped matmuls, never run here on the GPUs that they are for; and `lax.ragged_dot` on GPUs, which
newer compilers lower to cuDNN. A run that uses one compares it first, with a few MB: one expert FFN (`expert_check`),
one exchange on the run's mesh (`exchange_check`). Outcomes are kept (`verdicts`), so the next start costs nothing, and
neither does a run that uses none of them.

    outcome                  field says 'auto'                      field names it
    equal but for rounding   goes on                                goes on
    differs, or fails        goes on with the proven one, says so   UserError
    no memory for the check  goes on with the proven one, says so   goes on unchecked, says so

All processes of a job decide alike: by the worst of their outcomes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp

from moe_jax.distributed.hosts import Hosts
from moe_jax.errors import UserError
from moe_jax.float8 import E4M3
from moe_jax.grouped_matmul import choose_implementation
from moe_jax.training.compiler_options import compiler_options
from moe_jax.training.exchange_check import compare_exchange
from moe_jax.training.expert_check import ExpertShape, compare_expert
from moe_jax.training.session import Session
from moe_jax.training.verdicts import (
    DIFFERS,
    FAILS,
    NO_MEMORY,
    OUTCOMES,
    PASSES,
    Verdict,
    keep_verdict,
    read_verdict,
    verdict_key,
    verdict_path,
)

_LOG = logging.getLogger(__name__)
PROVEN = {"transport": "all_to_all", "grouped_matmul": "fused"}  # fields of MoEConfig: what to take instead
KERNELS = ("hopper", "mosaic", "mosaic_sparing")  # grouped matmuls that no GPU has run for this project
WAIT_SECONDS = 900.0  # for another process' compilations


def settle_unproven(session: Session, hosts: Hosts) -> tuple[Session, dict]:
    """Compare the unproven parts that the session uses, before anything large is in the devices' memory.

    Args:
      session: with the config as the user gave it.
      hosts: all processes of the job call this together.

    Returns:
      the session to train with, and {field of MoEConfig: {'wanted', 'used', 'outcome', 'detail'}} of what was compared.

    Raises:
      UserError: the config names something that differs or fails, or a kernel has made the device unusable.
    """
    record = {}
    for field, (used, check, key) in unproven(session).items():
        wanted, instead = getattr(session.config.moe, field), PROVEN[field]
        verdict = agree(hosts, field, kept_by_all(hosts, field, key) or fresh_verdict(check, key))
        taken = used
        if verdict.outcome != PASSES:
            taken = decide(field, wanted, used, instead, verdict, session)
            if taken != used:
                session = with_field(session, field, taken)
        record[field] = {"wanted": wanted, "compared": used, "used": taken, **dataclasses.asdict(verdict)}
    return session, record


def unproven(session: Session) -> dict[str, tuple[str, Callable[[], Verdict], dict]]:
    """Return {field: (what is used, its check, the verdict's key)} of what the session uses unproven."""
    config, roles = session.config, session.roles
    device = local_device(session)
    # what concerns several processes is set for all programs of a process (`distributed/hosts.py`)
    options = compiler_options(device.platform, deterministic=config.train.deterministic)
    found = {}
    if config.moe.transport == "ragged" and roles.size(roles.expert + roles.expert_shard) > 1:
        width, dtype = config.model.model_dim, config.model.dtype
        mesh = {axis: int(size) for axis, size in roles.mesh.shape.items()}
        key = verdict_key(
            device, check="exchange", transport="ragged", width=width, dtype=dtype, mesh=mesh,
            per_node=roles.config.devices_per_node, processes=jax.process_count(), options=options,
        )  # fmt: skip
        found["transport"] = "ragged", lambda: check_exchange(session, "ragged", options), key
    matmuls = [(matmul_in_use(session, shape), shape) for shape in expert_shapes(session)]
    doubted = [(name, shape) for name, shape in matmuls if _is_doubted(name, device)]
    if doubted:
        (matmul, shape), *others = doubted
        rest = {"others": [(name, dataclasses.asdict(other)) for name, other in others]} if others else {}
        key = verdict_key(
            device, check="expert", implementation=matmul, options=options, **dataclasses.asdict(shape), **rest
        )
        found["grouped_matmul"] = matmul, lambda: check_experts(doubted, device, options), key
    return found


def _is_doubted(name: str, device: jax.Device) -> bool:
    """Say whether a grouped matmul, or the one that it stands over, is not proven on this device."""
    below = name.rpartition(":")[2]
    return below in KERNELS or (below == "ragged" and on_gpu(device))


def on_gpu(device: jax.Device) -> bool:
    """Say whether a device is a GPU."""
    return device.platform in ("gpu", "cuda")


def expert_shapes(session: Session) -> list[ExpertShape]:
    """Return the shapes of the experts' FFN, one for each hidden dim that a segment of the model has."""
    config, shards = session.config.model, session.roles.size(session.roles.expert_shard)
    hidden_dims = dict.fromkeys(segment.config.hidden_dim for segment in session.model.expert_segments)
    return [
        ExpertShape(
            model_dim=config.model_dim,
            hidden_dim=hidden_dim // shards,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            activation=config.activation,
        )
        for hidden_dim in hidden_dims
    ]


def matmul_in_use(session: Session, shape: ExpertShape) -> str:
    """Return the grouped matmul that layers with experts of this shape use, 'auto' resolved."""
    device, dims = session.roles.mesh.devices.flat[0], (shape.model_dim, shape.hidden_dim)
    moe, dtype = session.config.moe, jnp.dtype(shape.dtype)
    return choose_implementation(moe.grouped_matmul, device, dtype, dims, moe.expert_dtype == E4M3)


def local_device(session: Session) -> jax.Device:
    """Return the first device of the mesh that belongs to this process."""
    return next(d for d in session.roles.mesh.devices.flat if d.process_index == jax.process_index())


def kept_by_all(hosts: Hosts, field: str, key: dict) -> Verdict | None:
    """Return this process' kept verdict if every process has one: a check may be collective, so all or none run it."""
    kept = read_verdict(key)
    if "no" in hosts.gather_text(f"kept verdict of {field}", "no" if kept is None else "yes", WAIT_SECONDS):
        return None
    assert kept is not None
    if kept.outcome == PASSES:
        return kept
    where = f"{kept.detail} (so it was at an earlier start; delete {verdict_path(key)} to compare again)"
    return dataclasses.replace(kept, detail=where)


def fresh_verdict(check: Callable[[], Verdict], key: dict) -> Verdict:
    """Return the verdict of a check, and keep it under its key.

    Raises:
      UserError: what the user has to change, such as dims that the implementation does not take.
    """
    try:
        verdict = check()
    except UserError:
        raise
    except Exception as error:  # whatever lowering, compiling or running it may raise
        verdict = Verdict(outcome=NO_MEMORY if out_of_memory(error) else FAILS, detail=first_line(error))
    keep_verdict(key, verdict)
    return verdict


def check_expert(implementation: str, shape: ExpertShape, device, options: dict | None = None) -> Verdict:
    """Compare a grouped matmul with plain matmuls on one expert FFN of these dims."""
    worst = compare_expert(implementation, shape, device, options)
    return Verdict(outcome=PASSES) if worst.explained else Verdict(outcome=DIFFERS, detail=str(worst))


def check_experts(used: list[tuple[str, ExpertShape]], device, options: dict | None = None) -> Verdict:
    """Compare each of these grouped matmuls on its FFN; the first verdict that is not good counts."""
    verdicts = [check_expert(implementation, shape, device, options) for implementation, shape in used]
    return next((verdict for verdict in verdicts if verdict.outcome != PASSES), verdicts[0])


def check_exchange(session: Session, transport: str, options: dict | None = None) -> Verdict:
    """Compare a transport with the padded all-to-all on the session's mesh."""
    model = session.config.model
    off = compare_exchange(session.roles, transport, model.model_dim, model.dtype, PROVEN["transport"], options)
    wrong = ", ".join(f"{count} entries with rows spread {name!r}" for name, count in off.items() if count)
    return Verdict(outcome=DIFFERS, detail=wrong) if wrong else Verdict(outcome=PASSES)


def agree(hosts: Hosts, field: str, verdict: Verdict) -> Verdict:
    """Return the worst verdict of all processes, of the first process that has it; a barrier."""
    texts = hosts.gather_text(f"check of {field}", json.dumps(dataclasses.asdict(verdict)), WAIT_SECONDS)
    return max((Verdict(**json.loads(text)) for text in texts), key=lambda given: OUTCOMES.index(given.outcome))


def decide(field: str, wanted: str, used: str, instead: str, verdict: Verdict, session: Session) -> str:
    """Return the implementation that the run takes, and log the reason; see the table at the top.

    Raises:
      UserError: as in the table, or because the device no longer works.
    """
    what = {
        DIFFERS: f"computes something else than {instead!r}: {verdict.detail}",
        FAILS: f"fails before the first step: {verdict.detail}",
        NO_MEMORY: f"could not be compared with {instead!r}, since not even that fits into memory: {verdict.detail}",
    }[verdict.outcome]
    remedy = f"set MoEConfig.{field} = {instead!r}"
    if wanted != "auto":
        if verdict.outcome != NO_MEMORY:
            raise UserError(f"MoEConfig.{field} ({used!r}) {what}; {remedy}")
        _say(f"MoEConfig.{field} ({used!r}) {what}; the run goes on with it, unchecked")
        return used
    if not usable(local_device(session)):
        raise UserError(
            f"MoEConfig.{field} ('auto': {used!r}) {what}; the device does not answer any more: give the same command "
            f"again, or {remedy}"
        )
    _say(f"MoEConfig.{field} ('auto'): {used!r} {what}; the run takes {instead!r}, which is slower")
    return instead


def usable(device: jax.Device) -> bool:
    """Return whether a device still computes: an invalid access of a kernel ends CUDA for its whole process."""
    try:
        return int(jnp.sum(jax.device_put(jnp.ones(4, jnp.int32), device))) == 4
    except Exception:  # any error of the backend
        return False


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device has no memory left.

    A lack of a kernel's shared memory does not count: that has one size on every start, so the kernel fails always.
    """
    text = str(error)
    if "shared memory" in text.lower():
        return False
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def first_line(error: BaseException) -> str:
    """Return an error's message in one line; some have only their name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def with_field(session: Session, field: str, value: str) -> Session:
    """Return the session with a field of its MoEConfig changed; layout and shardings do not depend on those."""
    config, teacher = session.config, session.teacher

    def changed(owner):  # the config, or a model
        return dataclasses.replace(owner, moe=dataclasses.replace(owner.moe, **{field: value}))

    if teacher is not None:
        teacher = dataclasses.replace(teacher, model=changed(teacher.model))
    return dataclasses.replace(session, config=changed(config), model=changed(session.model), teacher=teacher)


def _say(text: str) -> None:
    if jax.process_index() == 0:
        _LOG.warning("%s", text)
