"""Text in, windows of tokens out. Imports NumPy and absl, never jax; `tokenizers` is imported when it is used."""

from moe_jax.data.cache import build_cache
from moe_jax.data.corpus import DataConfig, find_documents
from moe_jax.data.stream import TokenStream, held_out_batches, held_out_entropy, mask_tokens
from moe_jax.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer

__all__ = [
    "ByteTokenizer",
    "DataConfig",
    "TokenStream",
    "Tokenizer",
    "build_cache",
    "build_tokenizer",
    "find_documents",
    "held_out_batches",
    "held_out_entropy",
    "mask_tokens",
]
