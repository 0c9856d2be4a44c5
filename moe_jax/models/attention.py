"""Self-attention of one device's heads, and which implementation computes it.

`xla` writes the scores [b, H, Sq, Sq] to memory; `cudnn` does not (flash attention), but of packed documents it reads
their mask as a bias [b, 1, Sq, Sq], and writes that one's gradient, which nobody reads. 'auto' is resolved once, when a
step is built: to `cudnn` on a GPU where cuDNN takes the dtype, the head size and the GPU's generation, else to `xla`.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.models.config import ModelConfig
from moe_jax.models.residuals import residuals_of
from moe_jax.parallel.varying import match_varying

_LOG = logging.getLogger(__name__)
LARGEST_HEAD = 128  # of cuDNN on every generation; Hopper has 256, which JAX refuses where no such GPU is at hand
CAPABILITY = (8, 0)  # Ampere: the first with flash attention in cuDNN


def attend(q, k, v, causal: bool, implementation: str, documents=None):
    """Return softmax(q k^T / sqrt(Dh)) v.

    In float64 and float16 `xla` is written out here: JAX's function leaves the one, and asks in the other for a matmul
    that CPUs do not have.

    Args:
      q: [b, Sq, H, Dh]; k, v: [b, Sq, Hkv, Dh]; query head i reads k and v of head i // (H / Hkv).
      documents: int32 [b, Sq], as in `Batch`: a token attends to its own document alone; None lets it attend to all.
    """
    if implementation == "auto":
        raise ValueError("attention 'auto' must be resolved by resolve_attention before the step is built")
    if implementation == "cudnn":
        return _attend_cudnn(causal, q, k, v, documents)
    mask = None if documents is None else same_document(documents)
    if q.dtype not in (jnp.float64, jnp.float16):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation=implementation)
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])  # by key head
    scores = _scores(*match_varying(grouped, k)) * q.shape[-1] ** -0.5
    if causal:
        index = jnp.arange(q.shape[1])
        earlier = (index[:, None] >= index[None])[None, None]
        mask = earlier if mask is None else mask & earlier
    if mask is not None:
        scores = jnp.where(mask[:, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bngqk,bknd->bqngd", weights, v).reshape(q.shape)


# In the backward the cotangent is rounded to 16 bits again, as every operand of a matmul; else that would be one of
# float32.
@jax.custom_vjp
def _scores(q, k):
    """Return q k^T [b, Hkv, H / Hkv, Sq, Sq] in at least float32; q: [b, Sq, Hkv, H / Hkv, Dh], k: [b, Sq, Hkv, Dh]."""
    return jnp.einsum("bqngd,bknd->bngqk", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))


def _scores_bwd(saved, d):
    q, k = saved
    d = d.astype(q.dtype)
    return jnp.einsum("bngqk,bknd->bqngd", d, k), jnp.einsum("bngqk,bqngd->bknd", d, q)


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_bwd)


def _cudnn(causal: bool, bias):
    return functools.partial(jax.nn.dot_product_attention, bias=bias, is_causal=causal, implementation="cudnn")


# JAX's own backward saves an absent bias as an array of no elements. After a scan it becomes an input that the
# backward's loop carries and never reads, and the compiler of jax 0.11.2 crashes while it removes that (Shardy's
# ManualComputationUnusedInputsPattern, a segmentation fault) as soon as there are several devices. `Residuals` save no
# empty array. The bias of documents is made again in the backward, not saved for it.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_cudnn(causal: bool, q, k, v, documents):
    """Call cuDNN as JAX does; documents: int32 [b, Sq], or None."""
    return _cudnn(causal, _bias_of(documents, q.dtype))(q, k, v)


def _bias_of(documents, dtype):
    """Return what cuDNN adds to scores [b, H, Sq, Sq]: [b, 1, Sq, Sq], 0 within a document, else far below any score.

    Not the dtype's least number: cuDNN errs where it subtracts two of those, so JAX takes these too.
    """
    if documents is None:
        return None
    below = jnp.asarray(-(2.0**15) if dtype == jnp.float16 else -(2.0**41), dtype)
    return jnp.where(same_document(documents), jnp.zeros((), dtype), below)


def _forward_cudnn(causal: bool, q, k, v, documents):
    bias = _bias_of(documents, q.dtype)
    out, pull_back = jax.vjp(_cudnn(causal, bias), q, k, v)
    return out, (residuals_of(pull_back, bias), documents)


def _backward_cudnn(causal: bool, saved, dout):
    del causal
    residuals, documents = saved
    return *residuals.restore(_bias_of(documents, dout.dtype))(dout), None


_attend_cudnn.defvjp(_forward_cudnn, _backward_cudnn)


def resolve_attention(config: ModelConfig, device=None) -> ModelConfig:
    """Return the config with the attention that its step computes: 'auto' becomes 'xla' or 'cudnn'.

    Args:
      device: one of the mesh's, real or described; None, that of an abstract mesh, counts as a CPU for 'auto' and does
        not rule out 'cudnn'.

    Raises:
      UserError: 'cudnn' where cuDNN cannot compute it, with the reason.
    """
    if config.attention == "xla":
        return config
    reason = missing_for_cudnn(config, device)
    if config.attention == "cudnn":
        if reason:
            raise UserError(
                f"ModelConfig.attention ('cudnn') cannot be used: {reason}; set ModelConfig.attention = 'auto', which "
                "takes 'xla' there"
            )
        return config
    if reason and device is not None and device.platform != "cpu":
        _say_fallback(reason)
    return dataclasses.replace(config, attention="xla" if reason or device is None else "cudnn")


def missing_for_cudnn(config: ModelConfig, device=None) -> str:
    """Return in words why cuDNN does not compute this model's attention on this device; '' where it does.

    Args:
      device: real or described; None leaves out what depends on it.
    """
    if device is not None:
        if device.platform not in ("gpu", "cuda"):
            return f"cuDNN runs on NVIDIA GPUs, and the devices are of platform {device.platform!r}"
        capability = str(getattr(device, "compute_capability", ""))
        parts = capability.split(".")
        if (tuple(map(int, parts)) if all(part.isdigit() for part in parts) else (0,)) < CAPABILITY:
            return (
                f"cuDNN's attention needs compute capability {'.'.join(map(str, CAPABILITY))}, and "
                f"{device.device_kind} has {capability or 'none'}"
            )
    if config.dtype not in ("bfloat16", "float16"):
        return f"cuDNN's attention takes 16-bit floats, and ModelConfig.dtype is {config.dtype!r}"
    if config.head_size > LARGEST_HEAD or config.head_size % 8:
        return f"cuDNN's attention takes heads of a multiple of 8 up to {LARGEST_HEAD}, and {config.head_size_in_words}"
    return ""


def check_document_mask(config: ModelConfig, length: int) -> None:
    """Raise a UserError where cuDNN cannot compute the gradient of packed documents in sequences of `length`.

    Args:
      config: resolved.
    """
    if config.document_mask and config.attention == "cudnn" and length % 2:
        raise UserError(
            f"DataConfig.sequence_length ({length}) must be even where ModelConfig.document_mask (True) and "
            "ModelConfig.attention ('cudnn') meet; raise it by 1, or set ModelConfig.attention = 'xla'"
        )


@functools.cache
def _say_fallback(reason: str) -> None:
    _LOG.warning("ModelConfig.attention 'auto' is 'xla' here, not 'cudnn': %s", reason)


# Documents packed into one sequence: `Batch.documents` is equal exactly for tokens of one document, whose tokens are
# neighbours. Only attention mixes tokens, so a document of a packed sequence gets the logits that it would have alone,
# as long as its tokens go to the same experts. They do in dropless layers; routers that look at a whole batch, and
# capacities, see all documents of it.
def same_document(documents):
    """Return bool [b, 1, Sq, Sq], True where query i and key j are of one document."""
    return documents[:, None, :, None] == documents[:, None, None, :]


def document_positions(documents):
    """Return int32 [b, Sq], the place of each token in its document, from 0 where it or the window begins."""
    index = jnp.broadcast_to(jnp.arange(documents.shape[1], dtype=jnp.int32), documents.shape)
    begins = jnp.concatenate([jnp.ones_like(documents[:, :1], bool), documents[:, 1:] != documents[:, :-1]], axis=1)
    return index - lax.cummax(jnp.where(begins, index, 0), axis=1)
