"""The training step: what is compiled, with every leaf's place on the mesh fixed.

Inputs: state {'step', 'params', 'opt_state'} and, where it is kept, 'ema' (donated), one step's batch
[Nm, B / Nm, Sq], the plan's tables, and the hosts' signals. Outputs: the new state and a dictionary of metrics.
The gradient is taken outside the model's `shard_map`; clipping and the optimizer see global arrays, split over the mesh
by the layout's specs (ZeRO).
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.config.train_config import TrainConfig
from moe_jax.models import LanguageModel, make_loss
from moe_jax.models.language_model import first_pass_model, summed, with_own_leaves, with_router_state
from moe_jax.models.lora import joined
from moe_jax.planning.plan_shape import Shapes
from moe_jax.training.optimizer import build_learning_rate, build_optimizer, state_specs


# Of one microbatch the model sums each layer's gradient over the data-parallel devices while the layers before it run
# backward; under ZeRO-1 those of embedding and head are reduce-scattered at the end. Of several, each device sums those
# of its own sequences first, and the devices are summed once a step: with Nm microbatches an Nm-th of the bytes. That
# is for the parameters that every device holds; ZeRO-3's parts and experts that several devices hold are summed in
# every microbatch.
def make_gradients(
    model: LanguageModel, config: TrainConfig, length: int, plan: Shapes | None = None,
    teacher: LanguageModel | None = None,
) -> Callable:  # fmt: skip
    """Return gradients(params, batch, tables, key, taught=None) -> (gradients, StepStats [Nm, ...]).

    They are of what is trained, `LanguageModel.trained`; `taught`: the parameters of a teacher.
    """
    microbatches = config.grad_accum_steps
    rows = config.batch_size // microbatches
    roles = model.roles
    apart = "all" if microbatches > 1 else "outer" if model.zero_stage == 1 else "none"
    if roles.size(roles.dense) == 1:
        apart = "none"
    layout = model.layout(apart)
    loss = make_loss(model, layout, rows, length, microbatches=microbatches, plan=plan, teacher=teacher)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def value_and_grad(trained, params, inputs, sums=None):
        return loss(joined(params, trained), *inputs, sums=sums)

    def gradients(params, batch, tables, key, taught=None):
        frozen = () if taught is None else (taught,)
        normalizer = jnp.maximum(jnp.sum(batch.weights), 1)
        if apart != "none":
            params = with_own_leaves(params, layout, roles)
        if microbatches == 1:
            microbatch = jax.tree.map(lambda array: array[0], batch)
            inputs = microbatch, tables, key, jnp.int32(0), normalizer, *frozen
            (_, stats), grads = value_and_grad(model.trained(params), params, inputs)
            stats = jax.tree.map(lambda leaf: leaf[None], stats)
        else:

            def body(carry, inputs):
                (total, counted), (microbatch, index) = carry, inputs
                microbatch = dataclasses.replace(microbatch, counted=counted)
                inputs = microbatch, tables, key, index * rows, normalizer, *frozen
                trained = model.trained(params)
                (_, stats), grads = value_and_grad(trained, params, inputs, sums=total)
                if "dense" in total:  # those of bank and units are sums already
                    outer = {name: leaf for name, leaf in total["dense"].items() if name != "units"}
                    outer = {name: jax.tree.map(jnp.add, leaf, grads["dense"][name]) for name, leaf in outer.items()}
                    grads = {**grads, "dense": {**grads["dense"], **outer}}
                total = grads
                counted = None if counted is None else counted + jnp.sum(stats.loads, axis=1, dtype=jnp.int32)
                return (total, counted), stats

            layers, experts = model.config.moe_layers, max(part.moe.num_experts for part in model.expert_segments)
            counted = jnp.zeros((layers, experts), jnp.int32) if model.moe.balance_over == "step" else None
            start = jax.tree.map(jnp.zeros_like, model.trained(params)), counted
            (grads, _), stats = lax.scan(body, start, (batch, jnp.arange(microbatches, dtype=jnp.int32)))
        return grads if apart == "none" else summed(grads, layout, roles), stats

    return gradients


@dataclasses.dataclass(frozen=True)
class StateShardings:
    """Shardings of the inputs and outputs of a step, as pytrees of NamedSharding."""

    state: dict
    batch: NamedSharding  # of every array [Nm, B / Nm, Sq] of a `Batch`
    tables: dict[str, NamedSharding]  # {segment: of every array of the plan's `Tables`}
    host_signals: NamedSharding  # of int32 [devices] or [devices, 3], what each host sends to the step
    replicated: NamedSharding  # of everything else


def build_state_shardings(
    model: LanguageModel, optimizer: optax.GradientTransformation, ema: bool = False
) -> StateShardings:
    """Return where state and inputs lie for this model on its mesh; `ema` says whether a moving average is kept."""
    mesh, roles = model.roles.mesh, model.roles
    named = functools.partial(jax.tree.map, functools.partial(NamedSharding, mesh))
    shapes, layout = model.shapes(), model.layout()
    opt_specs = state_specs(jax.eval_shape(optimizer.init, model.trained(shapes)), shapes, layout.state)
    replicated = NamedSharding(mesh, P())
    state = {"step": replicated, "params": named(layout.params), "opt_state": named(opt_specs)}
    if ema:
        state["ema"] = named(layout.state)
    return StateShardings(
        state=state,
        batch=NamedSharding(mesh, P(None, roles.dense)),
        tables=named(model.tables_specs),
        host_signals=NamedSharding(mesh, P(roles.all)),
        replicated=replicated,
    )


def abstract_state(
    model: LanguageModel, optimizer: optax.GradientTransformation, state_shardings: StateShardings
) -> dict:
    """Return the state as ShapeDtypeStructs with shardings; nothing is computed."""
    shapes = jax.eval_shape(lambda params: first_state(params, model, optimizer, state_shardings), model.shapes())
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings.state,
    )


def first_state(
    params, model: LanguageModel, optimizer: optax.GradientTransformation, state_shardings: StateShardings
) -> dict:
    """Return the state of step 0; traced."""
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": optimizer.init(model.trained(params))}
    if "ema" in state_shardings.state:
        state["ema"] = jax.tree.map(jnp.copy, params)
    return state


def make_train_step(
    model: LanguageModel, config: TrainConfig, state_shardings: StateShardings, length: int,
    plan: Shapes | None = None, teacher: LanguageModel | None = None, common: bool = False,
) -> Callable:  # fmt: skip
    """Return train_step(state, batch, tables, host_signals[, taught]) -> (state, metrics), jitted.

    The state is donated. See `make_update` for metrics and arguments.

    It is the complete program, with all passes that an overflow may need; or the `common` one, train_step(state,
    halted, batch, ...), for a step without overflow: pass 0 alone, so it has no conditional. `halted` is bool [], and
    so is `metrics['halted']`: where some bucket of some layer overflows, or `halted` holds already, the state leaves
    bit for bit as it came, and the other metrics mean nothing. A step is given what the step before it returned, so
    that nothing happens after an overflow until the host has read it (`training/stepper.py`).
    """
    given = (state_shardings.batch, state_shardings.tables, state_shardings.host_signals)
    given += () if teacher is None else (jax.tree.map(lambda leaf: leaf.sharding, teacher.placed_shapes()),)
    if common:
        model = first_pass_model(model)
        teacher = None if teacher is None else first_pass_model(teacher)
    update = make_update(model, config, length, plan, teacher)

    def common_step(state, halted, batch, tables, host_signals, taught=None):
        new_state, metrics = update(state, batch, tables, host_signals, taught)
        halted = halted | (metrics["most_passes"] > 1)
        chosen = jax.tree.map(functools.partial(jnp.where, halted), state, new_state)
        return chosen, {**metrics, "halted": halted}

    state, replicated = state_shardings.state, state_shardings.replicated
    given = (state, replicated, *given) if common else (state, *given)
    step = common_step if common else update
    return jax.jit(step, donate_argnums=0, in_shardings=given, out_shardings=(state, replicated))


def make_update(
    model: LanguageModel, config: TrainConfig, length: int, plan: Shapes | None = None,
    teacher: LanguageModel | None = None,
) -> Callable:  # fmt: skip
    """Return train_step(state, batch, tables, host_signals[, taught]) -> (state, metrics), one optimizer step.

    A pure function of global arrays, to be jitted; `taught`: a teacher's parameters. Metrics: loss, aux_loss, z_loss,
    grad_norm, learning_rate float []; square_norms float [leaves], squared norm of each gradient leaf in the order of
    `flatten(params)`; loads int32 [L, sources, E], as in `StepStats`; gate_entropy float [L]; dropped, passes int32
    [L]; most_passes int32 [], of all layers, a teacher's among them; stop int32 [], 1 if any host asked to stop; under
    the router `base` also completed int32 [L], tokens that it placed after its auction.

    `host_signals` is int32 [devices], 1 where a host asks to stop. With a plan it is int32 [devices, 3]: stop, number
    of the newest shape ready, hash of the plan; metrics then also have `ready`, the least of all, `plan_hash_least`
    and `plan_hash_most`. With a teacher metrics have `kl` float [], nats per target token: KL(teacher || student),
    which is no part of `loss`; the teacher's parameters are not donated.
    """
    optimizer, schedule = build_optimizer(config), build_learning_rate(config)
    gradients = make_gradients(model, config, length, plan, teacher)
    moments = jax.tree.map(lambda spec: NamedSharding(model.roles.mesh, spec), model.trained(model.layout().state))

    def train_step(state, batch, tables, host_signals, taught=None):
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state["step"])
        grads, stats = gradients(state["params"], batch, tables, key, taught)
        grads = lax.with_sharding_constraint(grads, moments)

        # The state after the optimizer, the routers and the moving average.
        params, trained = state["params"], model.trained(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], trained)
        new_params = joined(params, optax.apply_updates(trained, updates))
        if not model.lora.rank:  # else routers stand still too
            new_params = with_router_state(model.segments, params, new_params, jnp.sum(stats.loads, axis=0))
        new_state = {"step": state["step"] + 1, "params": new_params, "opt_state": opt_state}
        if config.ema_decay:
            ema = optax.incremental_update(new_params, state["ema"], 1 - config.ema_decay)
            new_state["ema"] = with_router_state(model.segments, new_params, ema, None)

        # What the microbatches' statistics [Nm, ...] and the gradients say of the step.
        square_norms = jnp.stack([jnp.sum(jnp.square(g)).astype(jnp.float32) for g in jax.tree.leaves(grads)])
        metrics = {
            "loss": jnp.sum(stats.cross_entropy),
            "aux_loss": jnp.mean(stats.aux_loss),
            "z_loss": jnp.mean(stats.z_loss),
            "grad_norm": jnp.sqrt(jnp.sum(square_norms)),
            "learning_rate": schedule(state["step"]),
            "square_norms": square_norms,
            "loads": jnp.sum(stats.loads, axis=0),
            "gate_entropy": jnp.mean(stats.gate_entropy, axis=0),
            "dropped": jnp.sum(stats.dropped, axis=0),
            "passes": jnp.max(stats.passes, axis=0),
        }
        metrics["most_passes"] = jnp.max(metrics["passes"])
        if teacher is not None:
            metrics["most_passes"] = jnp.maximum(metrics["most_passes"], jnp.max(stats.teacher_passes))
            metrics["kl"] = jnp.sum(stats.kl)
        if stats.completed is not None:
            metrics["completed"] = jnp.sum(stats.completed, axis=0)

        # What the hosts told each other.
        metrics["stop"] = jnp.max(host_signals if plan is None else host_signals[:, 0])
        if plan is not None:
            metrics["ready"] = jnp.min(host_signals[:, 1])
            metrics["plan_hash_least"] = jnp.min(host_signals[:, 2])
            metrics["plan_hash_most"] = jnp.max(host_signals[:, 2])

        if config.max_skipped_steps > 0:
            return _or_left_out(state, new_state, metrics, schedule)
        return new_state, metrics

    return train_step


# A step that is not finite in any microbatch leaves the state as it was but for `step`: the batch is left out, and
# neither moments nor schedule move. The choice is made on the device, so it does not involve the host and has no limit:
# the host counts. (`optax.apply_if_finite` looks at the gradients only, and at its limit lets them through.)
def _or_left_out(state, new_state, metrics, schedule) -> tuple[dict, dict]:
    """Return what a step leaves and its metrics, by its state before and after the update."""
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    before = {name: state[name] for name in new_state if name != "step"}
    after = {name: new_state[name] for name in before}
    new_state = new_state | jax.tree.map(functools.partial(jnp.where, finite), after, before)
    # the updates that the optimizer has seen: the step that its learning rate is taken at
    is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
    nodes = jax.tree.leaves(state["opt_state"], is_leaf=is_schedule)
    updates_seen = next(node.count for node in nodes if is_schedule(node))
    return new_state, metrics | {"skipped": ~finite, "learning_rate": schedule(updates_seen)}
