"""The layer stack in the order of a block-wise schedule: an interpreter of `moe_jax.overlap` that builds the step.

Inputs: a `BlockSchedule`, the stages of a layer, and how parameters move. Outputs: a function of the whole stack with a
backward of its own (`custom_vjp`), so that the program holds the schedule's windows in the schedule's order in both
directions: `prefetch_windows.py` has what both share, `prefetch_forward.py` and `prefetch_backward.py` what they do.

Where a schedule has two halves, x comes as two, and all of a layer's stages run once for each.
Source: design after Hecate, section 3.2, and Pro-Prophet, section V-B.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.models.prefetch_backward import Backward
from moe_jax.models.prefetch_forward import Forward
from moe_jax.models.prefetch_windows import Constants, StackSettings
from moe_jax.routers import join_statistics


@dataclasses.dataclass(frozen=True)
class Prefetcher(StackSettings):
    """The function of a whole stack, built as its `StackSettings` say."""

    def __call__(self, x, params, grad_sink, constants: Constants):
        """Run the stack.

        Args:
          x: a tuple of [b, Sq, M] or [t / N_MP, M], of all sequences or of either half.
          params: (mix, gate), leaves [L, ...].
          grad_sink: {name: [L, Hs, ...]}, whose cotangent is the gradient of home experts.
          constants: see `Constants`.

        Returns:
          (x as it came, GateStats [L, ...], passes int32 [L], the most of both halves).
        """
        if self.scan and self.schedule.halves:  # one sum over devices after the loop, not one in each of its turns
            params = cast_varying(params, varying_axes(constants.token_ids))
        x, stats, passes = self._stack()(x, params, grad_sink, constants)
        if not self.schedule.halves:
            return x, stats[0], passes[0]
        return x, join_statistics(*stats), jnp.maximum(*passes)

    def _stack(self):
        """Return stack(halves of x, params, grad_sink, constants) -> (halves of x, of GateStats, of passes)."""

        @jax.custom_vjp
        def stack(x, params, grad_sink, constants):
            return Forward(self, params, grad_sink, constants, save_residuals=False).run(x)[0]

        def forward(x, params, grad_sink, constants):
            out, saved = Forward(self, params, grad_sink, constants, save_residuals=True).run(x)
            types = {name: leaf[:0] for name, leaf in grad_sink.items()}  # dtype and axes, no bytes
            return out, (params, types, constants, saved)

        def backward(residuals, cotangents):
            params, types, constants, saved = residuals
            dx, dparams, d_grad_sink = Backward(self, params, types, constants).run(cotangents, saved)
            return dx, dparams, d_grad_sink, None

        stack.defvjp(forward, backward)
        return stack
