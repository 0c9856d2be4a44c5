"""What a model is: its sizes and choices, and its segments. Host side; no arrays.

Segments are runs of equal units, each with experts, placement and expert-parallel degree of its own. What stands once
for each is a dictionary {name: part}: units of all; bank, tables, homes, plans of those with experts.
Source: DeepSpeed-MoE (Rajbhandari et al. 2022), section 4.2, "flexible multi-expert and multi-data parallelism".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from moe_jax.errors import UserError
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.routers import check_read
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.block_schedule import SCHEDULES, Prefetch

MODEL_FIELDS = ("layers", "moe_every", "hidden_dim", "dense_hidden_dim")
MOE_FIELDS = ("num_experts", "top_k", "router")
FIELDS = (*MODEL_FIELDS, *MOE_FIELDS)
LATENT_FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")
WORDS = ("router",)  # whose values are names, not numbers


CHOICES = {
    "kind": ("gpt", "bert"),
    "activation": ("gelu", "swiglu"),
    "positions": ("learned", "rotary"),
    "norm": ("layer", "rms"),
    "qk_norm": ("none", "head", "width"),
    "attention": ("auto", "blocks", "cudnn"),
    "dtype": ("float32", "bfloat16", "float64"),
    "remat": ("none", "block", "block_but_attention", "dots"),
    "prefetch": SCHEDULES,
    "overlap": ("none", "halves"),
    "stack": ("scan", "unrolled"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm Transformer with MoE feed-forward layers.

    Attributes:
      kind: 'gpt' (causal, next token) or 'bert' (bidirectional, masked tokens).
      layers: Transformer blocks.
      moe_every: 1, every block is MoE; 2, every second one is; 0, none is, for a segment between others.
      segments: where layers differ, one text for each run of equal units, first layers first, such as ('layers=20
        moe_every=2 num_experts=32', 'layers=4 moe_every=2 num_experts=64'). A text may say layers, moe_every,
        hidden_dim, dense_hidden_dim, num_experts, top_k and router; what it does not say is as bound here and in
        MoEConfig. () is one segment. See `Segment`.
      first_dense: the same in short, this many dense blocks before all others.
      model_dim: M; heads: H, attention heads.
      kv_heads: heads of keys and values, each of which heads / kv_heads query heads share (grouped-query attention,
        Ainslie et al. 2023); None is as many as heads.
      head_dim: Dh, dim of a head; None is model_dim / heads.
      kv_lora_rank: numbers of the latent of each token from which multi-head latent attention (`transformer.py`)
        makes keys and values of all heads; None is attention without. head_dim then counts the features of a query and
        key, rotated ones included.
      q_lora_rank: likewise of queries; None makes them from the token itself. The next two are of latent attention too.
      qk_rope_head_dim: features of head_dim, its last, that are rotated; of a key they are alike for all heads.
      v_head_dim: features of a value; None is those of head_dim that are not rotated.
      qk_norm: RMSNorm of queries and keys, before positions: 'none', 'head' (each head by itself, as Qwen3) or 'width'
        (all heads together, as OLMoE).
      attention_bias: whether queries, keys, values and attention's output have biases; ffn_bias: whether the matrices
        of dense FFNs have. Experts have none.
      norm: 'layer' (mean and variance, scale and bias) or 'rms' (root of the mean square, scale alone: Zhang and
        Sennrich 2019), in at least float32; norm_epsilon: what is added to the variance or mean square.
      hidden_dim: F, hidden dim of an expert.
      dense_hidden_dim: hidden dim of the dense blocks' FFN (moe_every = 2); 0 means 4 M.
      vocab_size: 0 takes the tokenizer's, rounded up to a multiple of 128.
      max_length: number of positions, where they are learned.
      activation: of experts and FFN, 'gelu' (two matrices) or 'swiglu' (three).
      positions: 'learned' or 'rotary'.
      rotary_base: the slowest pair of features turns by about 1 / rotary_base a position; rotary_factor: positions are
        divided by it, to reach farther than the text of the training (linear scaling: Chen et al. 2023).
      rotary_yarn: of latent attention, five numbers by which YaRN reaches farther than rotary_factor alone would: the
        length of text of the training, how often pairs turn in it that keep their speed, at least, and those that are
        slowed down by rotary_factor, at most, and weights of what enlarges rotated features, and divides that and
        enlarges the scores (`mscale`, `mscale_all_dim`); () is linear scaling.
      tied_head: whether the token table serves as the output head, or the head [V, M] is a parameter of its own.
      attention: 'blocks', which keeps no scores, or 'cudnn'; 'auto' is 'cudnn' on the GPUs that have it for this dtype
        and head size, else 'blocks' (`models/attention.py`).
      dtype: compute dtype, 'float32', 'bfloat16' or 'float64'; parameters are float32 (float64 where this is float64).
      remat: what the backward recomputes per block: 'none', 'dots' (all but matmul results), 'block' (everything) or
        'block_but_attention' (all but what cuDNN's attention made of queries, keys and values). With a `prefetch` or
        `overlap` it is applied to each stage: 'block' saves the inputs of attention and of the MoE layer.
      prefetch: when replicas travel: 'none' (before attention, in the compiler's order), or a block-wise schedule,
        'hecate' or 'pro_prophet', with a backward of its own.
      overlap: 'halves' cuts each device's sequences into two halves, of which one computes while the other's tokens
        travel; tokens of a half are gated together. 'none' leaves them in one piece.
      sequence_parallel: keep norms and residuals split over the tokens within an MP group (MeshConfig.model), with an
        all-gather before and a reduce-scatter after the matmuls of attention and dense FFN, instead of an all-reduce.
      refetch_replicas: with a prefetch, drop replicas after the forward, fetch them again in the backward (Hecate-RM).
      stack: 'scan' (one program for all layers) or 'unrolled' (all layers written out). Without remat a scan keeps of
        each layer, with a `prefetch` or `overlap` of each stage, what `models/residuals.py` says; layers that are
        written out keep all that is read.
      loss_chunk: tokens whose logits are alive at once in the cross-entropy, per device.
      document_mask: tokens of a packed sequence attend only to tokens of their own document, learned positions count
        from each document's first token (rotary ones, which are relative, go on), and a document's first token is no
        target. Documents end with the tokenizer's end id. Off, attention crosses from one document into the next.
    """

    kind: str = "gpt"
    layers: int = 4
    moe_every: int = 1
    segments: tuple[str, ...] = ()
    first_dense: int = 0
    model_dim: int = 128
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    qk_norm: str = "none"
    attention_bias: bool = True
    ffn_bias: bool = True
    norm: str = "layer"
    norm_epsilon: float = 1e-5
    hidden_dim: int = 256
    dense_hidden_dim: int = 0
    vocab_size: int = 0
    max_length: int = 1024
    activation: str = "gelu"
    positions: str = "learned"
    rotary_base: float = 10000.0
    rotary_factor: float = 1.0
    rotary_yarn: tuple[float, ...] = ()
    tied_head: bool = True
    attention: str = "auto"
    dtype: str = "float32"
    remat: str = "none"
    prefetch: str = "none"
    overlap: str = "none"
    sequence_parallel: bool = False
    refetch_replicas: bool = False
    stack: str = "scan"
    loss_chunk: int = 1024
    document_mask: bool = False

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"ModelConfig.{name} ({getattr(self, name)!r}) must be one of {', '.join(choices)}")
        for name in ("layers", "model_dim", "heads", "hidden_dim", "max_length", "loss_chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"ModelConfig.{name} ({getattr(self, name)}) must be at least 1")
        if self.moe_every not in (0, 1, 2):
            raise UserError(
                f"ModelConfig.moe_every ({self.moe_every}) must be 1 (every block) or 2 (every second block), or 0 in "
                "a segment without experts"
            )
        for index, run in enumerate(self.runs):
            every = run.get("moe_every", self.moe_every)
            if every and run["layers"] % every:
                where = "ModelConfig.layers" if len(self.runs) == 1 else f"the layers of segment {index}"
                raise UserError(
                    f"{where} ({run['layers']}) must be divisible by ModelConfig.moe_every ({every}); add a layer, or "
                    "set moe_every = 1"
                )
        for name in ("kv_heads", "head_dim", *LATENT_FIELDS):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"ModelConfig.{name} ({value}) must be at least 1, or None")
        if self.head_dim is None and self.model_dim % self.heads:
            raise UserError(
                f"ModelConfig.model_dim ({self.model_dim}) must be divisible by ModelConfig.heads ({self.heads})"
            )
        if self.heads % self.key_value_heads:
            raise UserError(
                f"ModelConfig.heads ({self.heads}) must be divisible by ModelConfig.kv_heads ({self.kv_heads})"
            )
        self._check_latent()
        if self.positions == "rotary" and self.head_size % 2 and not self.kv_lora_rank:
            raise UserError(
                f"rotary positions need an even head size, and ModelConfig.head_dim, or model_dim / heads, is "
                f"{self.head_size}"
            )
        for name in ("norm_epsilon", "rotary_base", "rotary_factor"):
            if not getattr(self, name) > 0:
                raise UserError(f"ModelConfig.{name} ({getattr(self, name)}) must be positive")
        if self.refetch_replicas and self.prefetch == "none":
            raise UserError(
                "ModelConfig.refetch_replicas (True) needs ModelConfig.prefetch = 'hecate' or 'pro_prophet', "
                "not 'none': only those schedules say when replicas come again"
            )

    def _check_latent(self) -> None:
        """Raise a UserError for fields of latent attention that do not fit together, or are set without it."""
        rotated, yarn = self.qk_rope_head_dim, self.rotary_yarn
        if self.kv_lora_rank is None:
            for name in (*LATENT_FIELDS, "rotary_yarn"):
                if getattr(self, name):
                    raise UserError(
                        f"ModelConfig.{name} ({getattr(self, name)}) is of latent attention; set "
                        "ModelConfig.kv_lora_rank, or leave it out"
                    )
            return
        for name, wanted in (("positions", "rotary"), ("qk_norm", "none"), ("key_value_heads", self.heads)):
            if getattr(self, name) != wanted:
                field = "kv_heads" if name == "key_value_heads" else name
                raise UserError(
                    f"ModelConfig.{field} ({getattr(self, name)!r}) must be {wanted!r} with ModelConfig.kv_lora_rank "
                    f"({self.kv_lora_rank}): latent attention has nothing else"
                )
        if rotated is None or rotated % 2 or rotated >= self.head_size:
            raise UserError(
                f"ModelConfig.qk_rope_head_dim ({rotated}) must be even and below ModelConfig.head_dim, or model_dim / "
                f"heads ({self.head_size}), which counts it too"
            )
        if yarn and (len(yarn) != 5 or min(yarn) < 0 or not yarn[0] > 0 or not yarn[1] >= yarn[2] > 0):
            raise UserError(
                f"ModelConfig.rotary_yarn {yarn} must be (length, fast, slow, mscale, mscale_all_dim), such as (4096, "
                "32, 1, 1.0, 1.0), with fast at least slow, or () for none"
            )

    @property
    def runs(self) -> tuple[dict[str, Any], ...]:
        """The runs of equal units, first layers first: the fields in which each differs, 'layers' always among them.

        Raises:
          UserError: texts that cannot be read, runs that do not add up to the layers, or two ways to say it at once.
        """
        if not self.segments:
            if not 0 <= self.first_dense < self.layers:
                raise UserError(
                    f"ModelConfig.first_dense ({self.first_dense}) must be at least 0 and below ModelConfig.layers "
                    f"({self.layers}); some layers must have experts"
                )
            dense = ({"layers": self.first_dense, "moe_every": 0},) if self.first_dense else ()
            return (*dense, {"layers": self.layers - self.first_dense})
        if self.first_dense:
            raise UserError(
                f"ModelConfig.segments {self.segments} says all that first_dense ({self.first_dense}) could say; leave "
                "out the one or the other"
            )
        runs = []
        for index, text in enumerate(self.segments):  # such as 'layers=4 moe_every=2 num_experts=16'
            place, run = f"ModelConfig.segments[{index}] ({text!r})", {}
            for word in text.split():
                name, _, value = word.partition("=")
                readable = bool(value) if name in WORDS else value.isascii() and value.isdecimal()
                if name not in FIELDS or not readable:
                    known = ", ".join(f"{field}=NAME" if field in WORDS else f"{field}=N" for field in FIELDS)
                    raise UserError(
                        f"{place}: {word!r} is none of {known}; write such as 'layers=4 moe_every=2 num_experts=16'"
                    )
                if name in run:
                    raise UserError(f"{place} says {name} twice; leave one of them out")
                run[name] = value if name in WORDS else int(value)
            if run.get("layers", 0) < 1:
                raise UserError(f"{place} must say how many layers it has, at least 1, such as 'layers=4'")
            runs.append(run)
        total = sum(run["layers"] for run in runs)
        if total != self.layers:
            added = " + ".join(str(run["layers"]) for run in runs)
            raise UserError(
                f"ModelConfig.segments have {added} = {total} layers, but ModelConfig.layers is {self.layers}; make "
                f"them equal, for instance by ModelConfig.layers = {total}"
            )
        return tuple(runs)

    @property
    def moe_layers(self) -> int:
        """L, the number of MoE layers, of all segments together."""
        every = [(run["layers"], run.get("moe_every", self.moe_every)) for run in self.runs]
        return sum(layers // moe_every for layers, moe_every in every if moe_every)

    @property
    def units(self) -> int:
        """U, the turns of the loop over layers, where there is one segment."""
        return self.layers // max(self.moe_every, 1)

    @property
    def is_block_wise(self) -> bool:
        """Whether layers run in the order of `block_wise`."""
        return self.prefetch != "none" or self.overlap == "halves"

    @property
    def block_wise(self) -> Prefetch:
        """What runs next to what, as `planning/block_schedule.py` takes it."""
        again, halves = self.refetch_replicas, self.overlap == "halves"
        return Prefetch(schedule=self.prefetch, refetch_replicas=again, halves=halves)

    @property
    def recomputes(self) -> bool:
        """Whether the backward computes a layer, with its exchanges, again."""
        return self.remat in ("block", "block_but_attention")

    @property
    def replica_layers(self) -> int:
        """Layers whose replicas are in memory at a time."""
        if self.is_block_wise:
            return self.block_wise.build(self.moe_layers).layers_alive()
        return 1 if self.recomputes else self.moe_layers

    @property
    def head_size(self) -> int:
        """Dh."""
        return self.model_dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """Features of a head's value."""
        if self.kv_lora_rank is None:
            return self.head_size
        return self.v_head_dim or self.head_size - (self.qk_rope_head_dim or 0)

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def qkv_matrices(self) -> dict[str, tuple[int, ...]]:
        """What makes queries, keys and values: {'qkv': (3, H)}, or where heads differ {'q': (H,), 'kv': (2, Hkv)}."""
        if self.key_value_heads == self.heads:
            return {"qkv": (3, self.heads)}
        return {"q": (self.heads,), "kv": (2, self.key_value_heads)}

    @property
    def ffn_dim(self) -> int:
        """Hidden dim of the dense FFN in the blocks without experts."""
        return self.dense_hidden_dim or 4 * self.model_dim

    @property
    def param_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (`models/lora.py`), which a run trains instead of the model that --init_from gives it.

    Attributes:
      rank: of every adapter; 0 trains the whole model.
      alpha: what adapters add is multiplied by alpha / rank.
      targets: what is adapted: 'attention' (latent attention too), 'experts', 'shared_experts' or 'feed_forward' with
        all its matrices, or one such as 'attention/q' or 'experts/w_out'.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attention", "experts")

    def __post_init__(self):
        if self.rank < 0:
            raise UserError(f"LoraConfig.rank ({self.rank}) must be at least 1, or 0 for no adapters")
        if not self.alpha > 0:
            raise UserError(f"LoraConfig.alpha ({self.alpha}) must be positive")
        if self.rank and not self.targets:
            raise UserError("LoraConfig.targets is () and LoraConfig.rank is not 0; name what is adapted")


# A segment reads like a model of its own between the embedding and the head: its `config` and `moe` are those of a
# model whose layers are all alike. On a mesh its roles are those of a mesh on which the innermost min(E, D) devices of
# the expert axis are its expert-parallel group, and the others hold replicas, as `data` does. So an expert's tokens
# come from the whole batch, shared evenly among its replicas, and its gradient is summed over them.
@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of equal units.

    Attributes:
      name: 'segment_0', 'segment_1', ..., in the order of the layers.
      config: as of a model of these layers alone.
      moe: its experts, K and the rest of the layer; means nothing where `has_experts` is False.
      first_layer: MoE layers before this segment.
      depth: Transformer blocks of the whole model, by which initial values are scaled.
    """

    name: str
    config: ModelConfig
    moe: MoEConfig
    first_layer: int
    depth: int

    @property
    def has_experts(self) -> bool:
        return self.config.moe_every > 0

    @property
    def moe_layers(self) -> slice:
        """Which of all MoE layers are this segment's."""
        return slice(self.first_layer, self.first_layer + self.config.moe_layers)

    def roles(self, roles: Roles) -> Roles:
        """Return the roles of this segment on the model's mesh, or raise a UserError where that lacks its experts."""
        return roles.for_experts(self.moe.num_experts) if self.has_experts else roles


def segments_of(config: ModelConfig, moe: MoEConfig) -> tuple[Segment, ...]:
    """Return the segments of a model, first layers first.

    Raises:
      UserError: a segment whose sizes do not fit together, or a model without experts.
    """
    found: list[Segment] = []
    for index, run in enumerate(config.runs):
        own = {name: run[name] for name in MODEL_FIELDS if name in run}
        try:
            part = dataclasses.replace(config, segments=(), first_dense=0, **own)
            layer = dataclasses.replace(moe, **{name: run[name] for name in MOE_FIELDS if name in run})
        except UserError as error:
            words = " ".join(f"{name}={value}" for name, value in run.items())
            raise UserError(f"segment {index} of the model ({words}): {error}") from error
        first = sum(segment.config.moe_layers for segment in found)
        name = f"segment_{index}"
        found.append(Segment(name=name, config=part, moe=layer, first_layer=first, depth=config.layers))
    if not any(segment.has_experts for segment in found):
        raise UserError(
            f"ModelConfig.moe_every ({config.moe_every}) leaves no layer with experts; set it to 1 or 2, or let a "
            "segment of ModelConfig.segments say moe_every=1"
        )
    numbers = sorted({segment.moe.top_k for segment in with_experts(found)})
    if moe.record_choices and len(numbers) > 1:  # those of all layers are one array [L, N, K]
        raise UserError(
            f"MoEConfig.record_choices (True) needs one top_k for all layers, but the segments of the model have "
            f"{', '.join(map(str, numbers))}; set MoEConfig.record_choices = False, or top_k alike in all segments"
        )
    check_read(moe, {segment.moe.router for segment in with_experts(found)})
    return tuple(found)


def with_experts(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return the segments that have MoE layers."""
    return tuple(segment for segment in segments if segment.has_experts)


def expert_counts(config: ModelConfig, moe: MoEConfig) -> tuple[int, ...]:
    """Return E of each segment with experts, for the mesh that is to hold them."""
    return tuple(segment.moe.num_experts for segment in with_experts(segments_of(config, moe)))
