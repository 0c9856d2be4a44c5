"""Settings of a run, timed on the machine at hand: each in turn with the fastest so far, from one trained state.

Inputs: a run's config and devices. Outputs: the fastest setting, and its seconds a step over plain's. A setting is
{binding 'Name.field': value}, {} the run as it is; all compute the same training step, which first losses confirm.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import jax

from moe_jax.analysis.timed import interleaved_seconds
from moe_jax.config.run_config import RunConfig, with_bindings
from moe_jax.errors import UserError
from moe_jax.models.config import segments_of, with_experts
from moe_jax.moe.routers import build_router
from moe_jax.training.stepper import Stepper, build_stepper

Setting = dict[str, object]
CANDIDATES = {
    "MoEConfig.grouped_matmul": ("auto", "fused", "ragged"),
    "MoEConfig.schedule": ("deepspeed", "s1", "s2", "deduplicated", "dp", "pairwise", "ring"),
    "MoEConfig.bucket_slack": (1.25, 1.5, 2.0, 3.0),
    "ModelConfig.remat": ("none", "dots", "block"),
    "ModelConfig.stack": ("scan", "unrolled"),
    "train.optimistic": (False, True),
    "train.guide_scheduler": (False, True),
}
# a planner plans once, from loads of a run without it
UNPLANNED = {"PlannerConfig.name": "none", "MoEConfig.schedule": "deepspeed"}
UNPLANNED |= {"ModelConfig.prefetch": "none", "ModelConfig.refetch_replicas": False}
# steps before any is timed, since early routing is more skewed than later; rounds in turn; seconds of steps in a row
WARM_UP, ROUNDS, SECONDS = 20, 9, 0.3
MARGIN = 0.01  # of the seconds, that a setting must save, and be faster in all rounds but one at most
# by which share first losses may differ: sums are taken in another order, below float32 of other roundings
LOSS_BOUND = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 4e-3}


def text_of(setting: Setting) -> str:
    """Return a setting in words; 'plain' is the run as it is."""
    return ", ".join(f"{name} = {value!r}" for name, value in sorted(setting.items())) or "plain"


def find_candidates(config: RunConfig) -> list[Setting]:
    """Return settings of one binding each that leave what a run computes as it is; devices may refuse some."""
    layers = [segment.moe for segment in with_experts(segments_of(config.model, config.moe))]
    alone = all(moe.dropless and build_router(moe).by_token for moe in layers)  # no token competes with others
    parts = {"ModelConfig.overlap": ("none", "halves"), "train.grad_accum_steps": (1, 2, 4, 8)} if alone else {}
    return [{name: value} for name, of_name in (CANDIDATES | parts).items() for value in of_name]


class Bench:
    """Devices with one trained state, which programs hand on: each takes its steps from where the last one ended."""

    def __init__(self, config: RunConfig, devices):
        self.config, self.devices, self.steps = config, devices, 1  # steps in a row
        self.steppers: dict[str, Stepper] = {}
        self.newest: Stepper | None = None  # which has the state
        self.records: list[dict] = []  # of the first warm-up: planners plan from its loads, all have its first loss

    def search(self, candidates: Sequence[Setting], budget: float, say: Callable[[str], None]) -> tuple[Setting, float]:
        """Return the fastest setting, and its seconds a step over plain's from a race of the two.

        Args:
          candidates: each is timed beside the fastest so far, on top of which it comes.
          budget: seconds, after which no further one is begun.
          say: hears a row of each: seconds a step, their ratio to plain's, and the setting, or why it does not run.
        """
        until, best, over_plain, tried = time.monotonic() + budget, {}, 1.0, [self.config]
        say(f"seconds a step  to plain  setting\n{self.race({}, {})[0]:14.4g}  {1:8.3f}  plain")
        for candidate in candidates:
            if time.monotonic() > until:
                say("the budget ends here; a larger --budget_seconds goes further")
                break
            setting = best | candidate
            try:
                if (config := with_bindings(self.config, setting)) in tried:
                    continue
                tried.append(config)
                seconds, ratio, is_gain = self.race(best, setting)
            except Exception as error:  # of the config, a compiler or a device: the next one may run
                say(f"{'-':>14}  {'-':>8}  {text_of(setting)}: {type(error).__name__}: {error}".splitlines()[0])
                continue
            say(f"{seconds:14.4g}  {over_plain * ratio:8.3f}  {text_of(setting)}")
            if is_gain:
                best, over_plain = setting, over_plain * ratio
        self.steppers.pop("plain", None)  # it starts anew, which makes a state where the last candidate failed
        _, ratio, is_gain = self.race({}, best) if best else (0.0, 1.0, False)
        return (best, ratio) if is_gain else ({}, 1.0)

    def race(self, first: Setting, last: Setting) -> tuple[float, float, bool]:
        """Time two settings in turn; return the last one's seconds a step, their ratio to the first's, and if it gains.

        Raises:
          UserError: a setting has another first loss. And whatever building, compiling or running one raises.
        """
        named = {text_of(first): first, text_of(last): last}
        self.steppers = {text: self.steppers.get(text) or self._start(setting) for text, setting in named.items()}
        turns = {text: functools.partial(self._run, stepper) for text, stepper in self.steppers.items()}
        taken = interleaved_seconds(turns, ROUNDS)
        before, after = (taken[text_of(one)] for one in (first, last))
        ratio = statistics.median(after) / statistics.median(before)
        faster = sum(own < other for own, other in zip(after, before, strict=True))
        return statistics.median(after) / self.steps, ratio, ratio < 1 - MARGIN and faster >= ROUNDS - 1

    def _start(self, setting: Setting) -> Stepper:
        """Return the run of a setting after its first steps, with the state."""
        config = with_bindings(self.config, setting)
        if config.planner.name != "none" and not self.records:
            self._start(setting | UNPLANNED)
        if self.newest is not None:
            self.newest.state = None  # one is alive at a time
        self.newest = stepper = build_stepper(config, self.devices, past=[own["loads"] for own in self.records[-5:]])
        if stepper.engine is not None:
            stepper.engine.frozen = True
        stepper.programs.complete.result()  # else it compiles beside the steps that are timed
        began, records = time.monotonic(), stepper.run(WARM_UP)
        self.steps = math.ceil(SECONDS * WARM_UP / (time.monotonic() - began))
        self.records = self.records or records
        loss, wanted = (float(of[0]["loss"]) for of in (records, self.records))
        if not abs(loss - wanted) <= (bound := LOSS_BOUND[config.model.dtype] * abs(wanted)):
            raise UserError(f"the first loss is {loss:.8g}, not {wanted:.8g} +- {bound:.1g}")
        return stepper

    def _run(self, stepper: Stepper) -> None:
        """Take steps from the state on, wherever it is."""
        if (other := self.newest) is not stepper:
            state = other.state if other.engine is None else other.engine.move_homes(other.state)
            stepper.state = jax.device_put(state, stepper.session.state_shardings.state)
            stepper.step, other.state, self.newest = other.step, None, stepper
        stepper.run(self.steps)
