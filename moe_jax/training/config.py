"""How a run trains: steps, batch, optimizer, what is written and how often. Host side; no arrays."""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run; bound by gin under the name `train`.

    Attributes:
      steps: optimizer steps of the whole run.
      seed: of initial values, data order, gate noise and masks.
      batch_size: global sequences per optimizer step.
      accumulate: microbatches that a step is split into; divides batch_size.
      learning_rate: peak, reached after warmup_steps by a straight line and left by a cosine.
      warmup_steps: steps of the rise.
      final_learning_rate: at the last step, as a share of the peak.
      weight_decay: of AdamW; norms, biases and gates are spared.
      beta1, beta2, epsilon: of AdamW.
      clip_norm: largest global gradient norm; 0 does not clip.
      zero_stage: ZeRO stage of the dense parameters: 0, 1 or 3.
      expert_zero_stage: ZeRO stage of the experts under the `dp` schedule: 0, 1, 2 or 3.
      checkpoint_every: steps between checkpoints; 0 saves at the end only.
      keep_checkpoints: checkpoints kept; the last finished one is never deleted.
      evaluate_every: steps between evaluations on held-out text; 0 evaluates before and after only.
      evaluate_windows: held-out windows of an evaluation at most; 0 takes all.
      loads_every: steps between recorded expert loads.
      log_every: steps between lines of progress where there is no terminal.
      guide_scheduler: on GPUs, compile twice, the second time with modelled seconds of the first program's instructions
        for the compiler's scheduler (`training/guided.py`). Left out where it cannot be done, which is said once.
      profile_steps: (first, last) steps whose trace is recorded, or None.
    """

    steps: int = 100
    seed: int = 0
    batch_size: int = 32
    accumulate: int = 1
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    final_learning_rate: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    zero_stage: int = 1
    expert_zero_stage: int = 1
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    evaluate_every: int = 0
    evaluate_windows: int = 256
    loads_every: int = 10
    log_every: int = 10
    guide_scheduler: bool = True
    profile_steps: tuple[int, int] | None = None

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulate", "keep_checkpoints", "loads_every", "log_every"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} ({getattr(self, name)}) must be at least 1")
        for name in ("warmup_steps", "checkpoint_every", "evaluate_every", "evaluate_windows"):
            if getattr(self, name) < 0:
                raise UserError(f"train.{name} ({getattr(self, name)}) must not be negative")
        if self.batch_size % self.accumulate:
            raise UserError(
                f"train.batch_size ({self.batch_size}) must be divisible by train.accumulate ({self.accumulate}); "
                f"set train.batch_size to a multiple of {self.accumulate}"
            )
        if self.zero_stage not in (0, 1, 3):
            raise UserError(f"train.zero_stage ({self.zero_stage}) must be 0, 1 or 3")
        if self.expert_zero_stage not in (0, 1, 2, 3):
            raise UserError(f"train.expert_zero_stage ({self.expert_zero_stage}) must be 0, 1, 2 or 3")
        if self.learning_rate <= 0:
            raise UserError(f"train.learning_rate ({self.learning_rate}) must be positive")
        if self.clip_norm < 0:
            raise UserError(f"train.clip_norm ({self.clip_norm}) must be positive, or 0 not to clip")
        if self.profile_steps is not None and not 0 <= self.profile_steps[0] < self.profile_steps[1]:
            raise UserError(
                f"train.profile_steps {self.profile_steps} must be (first, last) with 0 <= first < last, or None"
            )
