"""Text in, windows of tokens out. Imports NumPy and absl, never jax; `tokenizers` is imported when it is used."""
