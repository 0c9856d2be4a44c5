"""Checkpoints of Hugging Face transformers into run folders, and back. See README.md."""

from moe_jax.huggingface.conversion import export_folder, import_folder

__all__ = ["export_folder", "import_folder"]
