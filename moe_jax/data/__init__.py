"""Text in, windows of tokens out. Imports NumPy and absl, never jax; `tokenizers` is imported when it is used."""

from moe_jax.data.cache import CacheMeta, TokenCache, TokenSpan, build_cache
from moe_jax.data.config import DataConfig
from moe_jax.data.corpus import Source, find_documents, iterate_texts
from moe_jax.data.stream import (
    HeldOutBatch,
    TokenStream,
    held_out_batches,
    held_out_entropy,
    mask_tokens,
    prefetch,
    unigram_entropy,
)
from moe_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, build_tokenizer

__all__ = [
    "ByteTokenizer",
    "CacheMeta",
    "DataConfig",
    "HeldOutBatch",
    "HuggingFaceTokenizer",
    "Source",
    "TokenCache",
    "TokenSpan",
    "TokenStream",
    "Tokenizer",
    "build_cache",
    "build_tokenizer",
    "find_documents",
    "held_out_batches",
    "held_out_entropy",
    "iterate_texts",
    "mask_tokens",
    "prefetch",
    "unigram_entropy",
]
