"""A schedule whose rows travel to their experts in float8: `MoEConfig.dispatch_dtype = 'float8_e4m3'`.

Inputs and outputs as of the schedule inside, any `StagedSchedule`; its `send` moves bytes (`kernels/float8_blocks.py`)
instead of rows, half as many as bfloat16 has. Rows are quantised before the exchange and brought back after it, once
each, whether or not they leave the device: results do not depend on the mesh.

The gradient is straight through: that of the exchange alone, in the compute dtype, as if nothing had been rounded. The
way back of computed rows and its gradient stay in the compute dtype too.

Source: DeepSeek-V3 Technical Report (2024), section 3.3.3: tokens are dispatched in float8 with scales of powers of
two, and combined in bfloat16. That report also sends the gradients that go to experts in float8; here they are not.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moe_jax.errors import UserError
from moe_jax.kernels.float8_blocks import bytes_to_rows, rows_to_bytes
from moe_jax.moe.schedules.contract import Chooser, StagedSchedule, schedule_record, schedules


def check_float8_dispatch(schedule: str) -> None:
    """Raise a UserError where a schedule does not send rows in one exchange."""
    record = schedule_record(schedule)
    if not (record.one_piece and record.moves_tokens):
        names = [name for name in schedules() if schedule_record(name).one_piece and schedule_record(name).moves_tokens]
        raise UserError(
            f"MoEConfig.dispatch_dtype ('float8_e4m3') cannot be used with MoEConfig.schedule = {schedule!r}, which "
            f"sends no rows in one exchange; choose one of {', '.join(names)}, or MoEConfig.dispatch_dtype = 'compute'"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Float8Chooser:
    """A choice of schedules, each of which sends float8."""

    inside: Chooser

    def for_rows(self, row_bytes: int, sent_bytes: int = 0) -> StagedSchedule:
        return Float8Dispatch(self.inside.for_rows(row_bytes, sent_bytes))


class Float8Dispatch(StagedSchedule):
    """The schedule inside, but for `send`."""

    def __init__(self, inside: StagedSchedule):
        self.inside, self.passes = inside, inside.passes

    def send(self, rows, metadata):
        """Exchange rows as bytes; their gradient is exchanged as it is."""
        inside, dim, dtype = self.inside, rows.shape[-1], rows.dtype

        @jax.custom_vjp
        def exchange(rows, metadata):
            with jax.named_scope("dispatch"):
                sent = rows_to_bytes(rows)
            received = inside.send(sent, metadata)
            with jax.named_scope("dispatch"):
                return bytes_to_rows(received, dim, dtype)

        def forward(rows, metadata):
            like = jnp.zeros_like(rows, shape=(rows.shape[0], 0))  # carries R, a dtype and no bytes
            return exchange(rows, metadata), (like, metadata)

        def backward(residuals, d):
            like, metadata = residuals
            zeros = jnp.zeros_like(like, shape=(like.shape[0], dim))
            (drows,) = jax.vjp(lambda rows: inside.send(rows, metadata), zeros)[1](d)
            return drows, None

        exchange.defvjp(forward, backward)
        return exchange(rows, metadata)

    def enter(self, x, token_ids):
        return self.inside.enter(x, token_ids)

    def route(self, tokens, choice, tables):
        return self.inside.route(tokens, choice, tables)

    def pack(self, routed, index):
        return self.inside.pack(routed, index)

    def arrive(self, received, metadata):
        return self.inside.arrive(received, metadata)

    def depart(self, done, metadata):
        return self.inside.depart(done, metadata)

    def send_back(self, rows, metadata):
        return self.inside.send_back(rows, metadata)

    def unpack(self, returned, metadata, routed):
        return self.inside.unpack(returned, metadata, routed)

    def leave(self, y):
        return self.inside.leave(y)
