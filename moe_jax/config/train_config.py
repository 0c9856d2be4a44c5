"""How a run trains: steps, batch, optimizer, what is written and how often. Host side; no arrays."""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError, check_bounds, check_choices
from moe_jax.parallel.sharding import check_zero_stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Knowledge distillation from a finished run; a mixture of students where the student is an MoE with fewer layers.

    A target token's loss is CE + alpha KL(teacher || student), temperature 1. Source: DeepSpeed-MoE (Rajbhandari et al.
    2022), on its mixture of students, where a teacher that stays for a part of the steps is called staged.

    Attributes:
      teacher: run folder of the teacher, with its config.gin and a finished checkpoint; '' learns from the text alone,
        and the other fields must then be left as they are.
      teacher_step: step of the teacher's checkpoint; None takes the newest.
      alpha: weight of the divergence.
      until: steps that learn from the teacher; later ones have the cross-entropy alone, in a program without the
        teacher, which leaves the devices' memory. None: all steps.
    """

    teacher: str = ""
    teacher_step: int | None = None
    alpha: float = 1.0
    until: int | None = None

    def __post_init__(self):
        check_bounds(self, {"teacher_step": 0, "alpha": 0, "until": 1})
        for field in () if self.teacher else dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                raise UserError(
                    f"DistillationConfig.{field.name} ({value!r}) is not read without DistillationConfig.teacher, the "
                    f"run folder to learn from; name one, or leave {field.name} at {field.default!r}"
                )

    def applies(self, step: int) -> bool:
        """Say whether step number `step` (from 0) learns from a teacher."""
        return bool(self.teacher) and (self.until is None or step < self.until)


CHOICES = {
    "optimizer": ("adamw", "muon"),
    "learning_rate_schedule": ("cosine", "constant", "linear", "wsd"),
    "first_moment_dtype": ("", "bfloat16"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run; bound by gin under the name `train`.

    Attributes:
      steps: optimizer steps of the whole run.
      seed: of initial values, data order, gate noise and masks.
      batch_size: global sequences per optimizer step.
      grad_accum_steps: microbatches that a step is split into; divides batch_size.
      optimizer: 'adamw', or 'muon' (hidden matrices; AdamW for the rest).
      learning_rate: peak, reached linearly after warmup_steps, from learning_rate / warmup_steps.
      learning_rate_schedule: how it falls from the peak: 'cosine', 'constant' (not at all), 'linear', or 'wsd'
        (warm-up, stable, decay).
      warmup_steps: steps until the peak.
      final_learning_rate: after the last step, as a share of the peak; 'constant' ignores it.
      decay_steps: steps at the end in which 'wsd' decays, in a line; 0 takes a tenth of `steps`.
      weight_decay: of every optimizer, multiplied by the learning rate; norms, biases, gates and mixes are not decayed.
      beta1, beta2, epsilon: of AdamW; muon's momentum is beta1.
      first_moment_dtype: of AdamW's first moment and of muon's momentum: 'bfloat16', or '' for the dtype of the
        parameters. Second moments keep that dtype always: with beta2 = 0.999 a step changes them by less than half
        a unit of bfloat16's last place, so that they would freeze.
      clip_norm: largest global gradient norm; 0 does not clip.
      ema_decay: share of the exponential moving average of the parameters that a step keeps, such as 0.999; the rest is
        the new parameters. It starts from parameters, not from zero, so it needs no bias correction. 0: no average.
      max_skipped_steps: steps of the whole run, not only in a row, that may be left out because their loss or gradient
        norm is not finite; one more ends the run. 0 allows none, and the step is compiled without that branch.
      zero_stage: ZeRO stage of the dense parameters: 0, 1 or 3.
      expert_zero_stage: ZeRO stage of the experts over MeshConfig.data: 2 scatters each layer's gradient, 3 gathers its
        parameters too. Under the `dp` schedule 0 to 3; under others 0 and 1 follow zero_stage.
      checkpoint_every: steps between checkpoints; 0 saves at the end only.
      keep_checkpoints: checkpoints kept; the last finished one is never deleted.
      evaluate_every: steps between evaluations on held-out text; 0 evaluates before and after only.
      evaluate_windows: held-out windows of an evaluation at most; 0 takes all.
      loads_every: steps between recorded expert loads, each with those of the step before, from which `replay` judges
        plans; a multiple where a run would record more than 128 MiB.
      log_every: steps between lines of progress where there is no terminal.
      guide_scheduler: on GPUs whose rates are known here, compile twice, the second time with modelled seconds of the
        first program's instructions for the compiler's scheduler (`training/compiling.py`).
      optimistic: run a program without later passes, which has no conditionals, and run a step again by the complete
        one where a bucket of its dropless layers overflowed (`training/stepper.py`); results are the same, and both
        programs are compiled. For GPUs, where each conditional waits for the host to read a flag. If the complete
        program cannot be compiled, the run goes on until a bucket overflows, then saves and stops.
      deterministic: on GPUs, compile every program of the model with kernels that give the same bits every time
        (`xla_gpu_deterministic_ops`), which is slower; docs/determinism.md says what holds where. CPUs always do.
      profile_steps: (first, last) steps whose trace is recorded, or None.
    """

    steps: int = 100
    seed: int = 0
    batch_size: int = 32
    grad_accum_steps: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 3e-3
    learning_rate_schedule: str = "cosine"
    warmup_steps: int = 20
    final_learning_rate: float = 0.1
    decay_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    first_moment_dtype: str = ""
    clip_norm: float = 1.0
    ema_decay: float = 0.0
    max_skipped_steps: int = 0
    zero_stage: int = 1
    expert_zero_stage: int = 1
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    evaluate_every: int = 0
    evaluate_windows: int = 256
    loads_every: int = 10
    log_every: int = 10
    guide_scheduler: bool = False
    optimistic: bool = False
    deterministic: bool = False
    profile_steps: tuple[int, int] | None = None

    def __post_init__(self):
        ones = "steps batch_size grad_accum_steps keep_checkpoints loads_every log_every".split()
        zeros = "warmup_steps decay_steps max_skipped_steps checkpoint_every evaluate_every evaluate_windows".split()
        least = dict.fromkeys(ones, 1) | dict.fromkeys((*zeros, "clip_norm", "ema_decay"), 0)
        check_bounds(self, least, {"learning_rate": 0}, name="train")
        check_choices(self, CHOICES, name="train")
        if self.batch_size % self.grad_accum_steps:
            raise UserError(
                f"train.batch_size ({self.batch_size}) must be divisible by train.grad_accum_steps "
                f"({self.grad_accum_steps}); set train.batch_size to a multiple of {self.grad_accum_steps}"
            )
        if abs(self.seed) >= 2**32:
            raise UserError(f"train.seed ({self.seed}) must be below {2**32} in size: 32 bits of it make the values")
        check_zero_stages(self.zero_stage, self.expert_zero_stage)
        if self.learning_rate_schedule == "wsd":
            warmup = min(self.warmup_steps, self.steps - 1)
            if warmup + self.decays_over > self.steps:
                raise UserError(
                    f"train.warmup_steps ({warmup}) and train.decay_steps ({self.decays_over}) must fit into "
                    f"train.steps ({self.steps}) under 'wsd'; lower one of the two"
                )
        elif self.decay_steps:
            raise UserError(
                f"train.decay_steps ({self.decay_steps}) needs train.learning_rate_schedule = 'wsd'; under "
                f"{self.learning_rate_schedule!r} leave it 0"
            )
        if self.ema_decay >= 1:
            raise UserError(f"train.ema_decay ({self.ema_decay}) must be below 1; 0 keeps no average")
        if self.profile_steps is not None and not 0 <= self.profile_steps[0] < self.profile_steps[1]:
            raise UserError(
                f"train.profile_steps {self.profile_steps} must be (first, last) with 0 <= first < last, or None"
            )

    @property
    def microbatch_size(self) -> int:
        """Global sequences of a microbatch."""
        return self.batch_size // self.grad_accum_steps

    @property
    def decays_over(self) -> int:
        """Steps at the end in which 'wsd' decays."""
        return self.decay_steps or max(1, self.steps // 10)
