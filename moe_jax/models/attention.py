"""Self-attention of one device's heads, and which implementation computes it.

`blocks` keeps none of the scores [b, H, Sq, Sq]; `cudnn` does not write them (flash attention), but of packed documents
it reads their mask as a bias [b, 1, Sq, Sq], and writes that one's gradient, which nobody reads. 'auto' is resolved
once, when a step is built: to `cudnn` on a GPU where cuDNN takes the dtype, the head size and the GPU's generation,
else to `blocks`.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moe_jax.errors import UserError
from moe_jax.models.config import ModelConfig
from moe_jax.models.residuals import residuals_of
from moe_jax.parallel.varying import match_varying

_LOG = logging.getLogger(__name__)
LARGEST_HEAD = 128  # of cuDNN on every generation; Hopper has 256, which JAX refuses where no such GPU is at hand
CAPABILITY = (8, 0)  # Ampere: the first with flash attention in cuDNN


def attend(q, k, v, causal: bool, implementation: str, documents=None, factor: float = 1.0):
    """Return softmax(factor q k^T / sqrt(Dh)) v.

    Args:
      q: [b, Sq, H, Dh]; k, v: [b, Sq, Hkv, Dh]; query head i reads k and v of head i // (H / Hkv).
      documents: int32 [b, Sq], as in `Batch`: a token attends to its own document alone; None lets it attend to all.
    """
    if implementation == "auto":
        raise ValueError("attention 'auto' must be resolved by resolve_attention before the step is built")
    if implementation == "cudnn":
        return _attend_cudnn(causal, q, k, v, documents)
    return _attend_blocks(causal, factor * q.shape[-1] ** -0.5, *match_varying(q, k, v, documents))


def attend_cached(
    queries: tuple, new: tuple, divisor: float, values: int, cached: tuple, positions, in_place: bool = False
):  # fmt: skip
    """Return softmax(scores / divisor) times `cached[values]` over the tokens before `positions` and the new one.

    Scores are the sum of each query's products with the array of the cache in its place. What is new stands in for the
    rows of its position, which the cache does not hold yet.

    Args:
      queries: [b, 1, H, D] each, D that of its array.
      new: [b, 1, n, D] each, of the new token; n divides H.
      cached: [b, n, T, D] each.
      positions: int32 [b], where the new token stands, below T.
      in_place: multiply the cache where it lies, without a matmul, which copies it first.
    """
    rows, _, heads, _ = queries[0].shape
    shared = new[0].shape[2]  # consecutive H / n queries share a head of the cache
    dtype, acc_dtype = queries[0].dtype, jnp.promote_types(queries[0].dtype, jnp.float32)
    place = jnp.arange(cached[0].shape[2], dtype=jnp.int32)[None] - positions[:, None]
    is_new = (place == 0)[:, None, :, None]
    held = [jnp.where(is_new, jnp.swapaxes(one, 1, 2), old) for one, old in zip(new, cached, strict=True)]

    def products(query, keys):  # [b, n, H / n, T]
        grouped = query[:, 0].reshape(rows, shared, heads // shared, -1)
        if in_place:
            return jnp.sum(grouped[:, :, :, None].astype(acc_dtype) * keys[:, :, None].astype(acc_dtype), axis=-1)
        return jnp.einsum("bhgd,bhtd->bhgt", grouped, keys, preferred_element_type=acc_dtype)

    scores = functools.reduce(jnp.add, map(products, queries, held))
    scores = jnp.where((place <= 0)[:, None, None], scores / divisor, jnp.finfo(acc_dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
    if in_place:
        mixed = jnp.sum(weights[..., None].astype(acc_dtype) * held[values][:, :, None].astype(acc_dtype), axis=-2)
    else:
        mixed = jnp.einsum("bhgt,bhtd->bhgd", weights, held[values], preferred_element_type=acc_dtype)
    return mixed.astype(dtype).reshape(rows, 1, heads, -1)


# YaRN (Peng et al. 2023, section 3.2): pairs that turn more than `fast` times in a text of the original length keep
# their frequency, those that turn less than `slow` times are slowed down by the factor, and between them a share is.
def rotate(x, positions, base: float = 10000.0, factor: float = 1.0, yarn: tuple[float, ...] = ()):
    """Rotate pairs of features (i, i + Dh / 2) by position / factor * base^(-2 i / Dh). Source: RoFormer.

    Args:
      x: [b, Sq, H, Dh]; positions: int32 [Sq] or [b, Sq].
      yarn: as `ModelConfig.rotary_yarn`: slow pairs alone are slowed down by the factor, and results are scaled.
    """
    half = x.shape[-1] // 2
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequency = base ** (-jnp.arange(half, dtype=acc_dtype) / half)
    if yarn:
        original_length, *turns = yarn[:3]
        first, last = (half * math.log(original_length / (n * 2 * math.pi)) / math.log(base) for n in turns)
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
        slowed = jnp.clip((jnp.arange(half) - first) / (last - first or 0.001), 0, 1).astype(acc_dtype)
        frequency = frequency * (1 - slowed + slowed / factor)
    elif factor != 1:
        frequency = frequency / factor
    positions = positions.reshape(-1, x.shape[1])
    angle = positions.astype(acc_dtype)[:, :, None, None] * frequency[None, None, None]  # [1 or b, Sq, 1, half]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if yarn and yarn[3] != yarn[4]:
        scale = yarn_magnitude(factor, yarn[3]) / yarn_magnitude(factor, yarn[4])
        cos, sin = scale * cos, scale * sin
    first, second = x[..., :half].astype(acc_dtype), x[..., half:].astype(acc_dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return by how much YaRN enlarges queries and keys, each, for texts that are `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


# Scores of a block of queries and the keys that these may read, which a CPU's cache holds; of causal attention of many
# blocks that is half of all. The backward makes them again from their row's logarithm of the sum: its matmul costs less
# than writing and reading them. What multiplies is rounded to the dtype of q, what is summed is in at least float32.
# Source: Dao et al., "FlashAttention" (2022), algorithms 1 and 4, with all keys of a row in one piece.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_blocks(causal: bool, scale: float, q, k, v, documents):
    return _forward_blocks(causal, scale, q, k, v, documents)[0]


MOST_BLOCKS, LEAST_QUERIES = 8, 64


def _blocks(causal: bool, length: int):
    """Yield the (queries, keys) of each block, slices."""
    size = max(LEAST_QUERIES, -(-length // MOST_BLOCKS))
    for first in range(0, length, size):
        stop = min(first + size, length)
        yield slice(first, stop), slice(stop if causal else length)


def _by_head(array, heads: int):
    """Return [b, Sq, H, ...] as [b, n, H / n, Sq, ...] for n heads of keys."""
    split = array.reshape(*array.shape[:2], heads, -1, *array.shape[3:])
    return jnp.moveaxis(split, 1, 3)


def _by_token(blocks):
    """Return blocks of queries, each [b, n, H / n, c, Dh], as [b, Sq, H, Dh]."""
    whole = jnp.moveaxis(jnp.concatenate(blocks, axis=3), 3, 1)
    return whole.reshape(*whole.shape[:2], -1, whole.shape[-1])


def _products(spec: str, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _scores(causal: bool, scale: float, q, k, documents, queries: slice, keys: slice):
    """Return the scores [b, n, H / n, c, c'] of a block, far below any other where a query does not read a key."""
    scores = _products("bngqd,bnkd->bngqk", q[:, :, :, queries], k[:, :, keys]) * scale
    least = jnp.finfo(scores.dtype).min
    if causal:
        earlier = jnp.arange(queries.start, queries.stop)[:, None] >= jnp.arange(keys.stop)[None]
        scores = jnp.where(earlier[None, None, None], scores, least)
    if documents is not None:
        same = documents[:, queries, None] == documents[:, None, keys]
        scores = jnp.where(same[:, None, None], scores, least)
    return scores


def _forward_blocks(causal: bool, scale: float, q, k, v, documents):
    """Return (mixed values, (inputs, mixed values, log of the sums of exp(scores) [b, n, H / n, Sq, 1]))."""
    (by_head, keys_of, values_of), mixed, log_sums = _operands(q, k, v), [], []
    for queries, keys in _blocks(causal, q.shape[1]):
        scores = _scores(causal, scale, by_head, keys_of, documents, queries, keys)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        raised = jnp.exp(scores - largest)
        total = jnp.sum(raised, axis=-1, keepdims=True)
        mixed.append(_products("bngqk,bnkd->bngqd", raised.astype(v.dtype), values_of[:, :, keys]) / total)
        log_sums.append(largest + jnp.log(total))
    out, log_sums = _by_token(mixed).astype(v.dtype), jnp.concatenate(log_sums, axis=3)
    out, log_sums = checkpoint_name(out, "heads"), checkpoint_name(log_sums, "heads")
    return out, (q, k, v, documents, out, log_sums)


def _operands(q, k, v):
    """Return q [b, n, H / n, Sq, Dh], k and v [b, n, Sq, Dh]."""
    return _by_head(q, k.shape[2]), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


def _backward_blocks(causal: bool, scale: float, saved, dout):
    q, k, v, documents, out, log_sums = saved
    (by_head, keys_of, values_of), heads = _operands(q, k, v), k.shape[2]
    d, wide = _by_head(dout, heads), log_sums.dtype
    shares = _by_head(jnp.sum(dout.astype(wide) * out.astype(wide), axis=-1, keepdims=True), heads)
    dq, (dk, dv) = [], match_varying(*(jnp.zeros(array.shape, wide) for array in (keys_of, values_of)), q)[:2]
    for queries, keys in _blocks(causal, q.shape[1]):
        weights = jnp.exp(
            _scores(causal, scale, by_head, keys_of, documents, queries, keys) - log_sums[:, :, :, queries]
        )
        dweights = _products("bngqd,bnkd->bngqk", d[:, :, :, queries], values_of[:, :, keys])
        dscores = weights * (dweights - shares[:, :, :, queries]) * scale
        weights, dscores = weights.astype(q.dtype), dscores.astype(q.dtype)
        dq.append(_products("bngqk,bnkd->bngqd", dscores, keys_of[:, :, keys]))
        dk = dk.at[:, :, keys].add(_products("bngqk,bngqd->bnkd", dscores, by_head[:, :, :, queries]))
        dv = dv.at[:, :, keys].add(_products("bngqk,bngqd->bnkd", weights, d[:, :, :, queries]))
    dk, dv = (jnp.swapaxes(array, 1, 2).astype(q.dtype) for array in (dk, dv))
    return _by_token(dq).astype(q.dtype), dk, dv, None


_attend_blocks.defvjp(_forward_blocks, _backward_blocks)


def _cudnn(causal: bool, bias):
    return functools.partial(jax.nn.dot_product_attention, bias=bias, is_causal=causal, implementation="cudnn")


# JAX's own backward saves an absent bias as an array of no elements. After a scan it becomes an input that the
# backward's loop carries and never reads, and the compiler of jax 0.11.2 crashes while it removes that (Shardy's
# ManualComputationUnusedInputsPattern, a segmentation fault) as soon as there are several devices. `residuals_of` saves
# no empty array. The bias of documents is made again in the backward, not saved for it.
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
    below = jnp.asarray(-(2.0**41), dtype)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return jnp.where(same, jnp.zeros((), dtype), below)


def _forward_cudnn(causal: bool, q, k, v, documents):
    bias = _bias_of(documents, q.dtype)
    out, pull_back = jax.vjp(_cudnn(causal, bias), q, k, v)
    return out, (residuals_of(pull_back, bias), documents)


def _backward_cudnn(causal: bool, saved, dout):
    del causal
    residuals, documents = saved
    return *residuals(_bias_of(documents, dout.dtype))(dout), None


_attend_cudnn.defvjp(_forward_cudnn, _backward_cudnn)


def resolve_attention(config: ModelConfig, device=None) -> ModelConfig:
    """Return the config with the attention that its step computes: 'auto' becomes 'blocks' or 'cudnn'.

    Args:
      device: one of the mesh's, real or described; None, that of an abstract mesh, counts as a CPU for 'auto' and does
        not rule out 'cudnn'.

    Raises:
      UserError: 'cudnn' where cuDNN cannot compute it, with the reason.
    """
    if config.attention == "blocks":
        return config
    reason = missing_for_cudnn(config, device)
    if config.attention == "cudnn":
        if reason:
            raise UserError(
                f"ModelConfig.attention ('cudnn') cannot be used: {reason}; set ModelConfig.attention = 'auto', which "
                "takes another there"
            )
        return config
    on_cpu = device is None or device.platform == "cpu"
    if reason and not on_cpu:
        _say_fallback(reason)
    return dataclasses.replace(config, attention="blocks" if on_cpu or reason else "cudnn")


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
    if config.dtype != "bfloat16":
        return f"cuDNN's attention takes 16-bit floats, and ModelConfig.dtype is {config.dtype!r}"
    if config.kv_lora_rank:
        return "cuDNN's attention is called for values as wide as keys, and those of latent attention are not"
    if config.head_size > LARGEST_HEAD or config.head_size % 8:
        return f"cuDNN's attention takes heads of a multiple of 8 up to {LARGEST_HEAD}, not {config.head_size}"
    return ""


def check_document_mask(config: ModelConfig, length: int) -> None:
    """Raise a UserError where cuDNN cannot compute the gradient of packed documents in sequences of `length`.

    Args:
      config: resolved.
    """
    if config.document_mask and config.attention == "cudnn" and length % 2:
        raise UserError(
            f"DataConfig.sequence_length ({length}) must be even where ModelConfig.document_mask (True) and "
            "ModelConfig.attention ('cudnn') meet; raise it by 1, or set ModelConfig.attention = 'blocks'"
        )


@functools.cache
def _say_fallback(reason: str) -> None:
    _LOG.warning("ModelConfig.attention 'auto' is 'blocks' here, not 'cudnn': %s", reason)


# Documents packed into one sequence: `Batch.documents` is equal exactly for tokens of one document, whose tokens are
# neighbours. Only attention mixes tokens, so a document of a packed sequence gets the logits that it would have alone,
# as long as its tokens go to the same experts. They do in dropless layers; routers that look at a whole batch, and
# capacities, see all documents of it.
def document_positions(documents):
    """Return int32 [b, Sq], the place of each token in its document, from 0 where it or the window begins."""
    index = jnp.broadcast_to(jnp.arange(documents.shape[1], dtype=jnp.int32), documents.shape)
    begins = jnp.concatenate([jnp.ones_like(documents[:, :1], bool), documents[:, 1:] != documents[:, :-1]], axis=1)
    return index - lax.cummax(jnp.where(begins, index, 0), axis=1)
