"""Checkpoints of Hugging Face transformers into run folders, and back. See README.md."""

from moe_jax.huggingface.conversion import Upcycling, export_folder, import_folder

__all__ = ["Upcycling", "export_folder", "import_folder"]
