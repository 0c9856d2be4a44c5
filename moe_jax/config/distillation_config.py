"""What a student learns from beside the text: which run is its teacher, its weight, and until when. Host side."""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError


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
        if self.teacher_step is not None and self.teacher_step < 0:
            raise UserError(f"DistillationConfig.teacher_step ({self.teacher_step}) must not be negative")
        if self.alpha < 0:
            raise UserError(
                f"DistillationConfig.alpha ({self.alpha}) must not be negative; 0 only measures the divergence"
            )
        if self.until is not None and self.until < 1:
            raise UserError(
                f"DistillationConfig.until ({self.until}) must be at least 1, or None for all steps; for a run without "
                "a teacher leave it out, and set DistillationConfig.teacher = ''"
            )
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
