"""Language models whose feed-forward layers are mixtures of experts. See README.md."""

from moe_jax.models.config import ModelConfig
from moe_jax.models.language_model import Batch, LanguageModel, Layout, StepStats
from moe_jax.models.loss import make_loss

__all__ = ["Batch", "LanguageModel", "Layout", "ModelConfig", "StepStats", "make_loss"]
