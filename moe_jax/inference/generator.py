"""A loaded model: prompts in, continuations out.

Inputs: prompts as text or token ids. Outputs: `Generated`. The host only counts and hands out tokens; a token's id
goes into the next call without leaving the devices, and is read while that call runs.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from moe_jax.data import Tokenizer
from moe_jax.errors import UserError
from moe_jax.inference.int8 import quantize_bank, quantized_specs
from moe_jax.inference.programs import (
    LEAST_LENGTH,
    Chosen,
    Knobs,
    Parameters,
    bucket,
    by_sequence,
    make_decode,
    make_prefill,
    make_score,
)
from moe_jax.inference.prompts import check_prompts, to_ids
from moe_jax.inference.replicas import even_placement, move_bank, plan_replicas, reside
from moe_jax.inference.sampling import Sampling, prompt_keys
from moe_jax.mesh.global_arrays import to_devices
from moe_jax.models import LanguageModel
from moe_jax.models.segments import joined
from moe_jax.placement import Placement

QUANTIZE = ("none", "int8")
DECODE = ("gather", "exchange")
END_SLOTS = 8  # ids that end a text; more of them compile another program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What became of some prompts; lists have an entry for each, in their order.

    Attributes:
      prompt_ids: the ids that went in.
      token_ids: the new ones, an end of text included.
      text: the new ones as text, without the end; None without a tokenizer.
      stopped: why it ended: 'end' of text, 'max_new_tokens', or 'max_length' where the model has no more positions.
      experts: int32 [tokens, L, K], which experts each token took that went into the model (all but the last new one),
        best first; -1 where a layer takes fewer. None unless they were asked for.
      seconds: float [steps], when each round of new tokens was on the host, since the prompts went in.
    """

    prompt_ids: list[list[int]]
    token_ids: list[list[int]]
    text: list[str] | None
    stopped: list[str]
    experts: list[np.ndarray] | None
    seconds: np.ndarray

    def as_json(self) -> dict:
        """Return the record of `--out`."""
        return {name: getattr(self, name) for name in ("prompt_ids", "token_ids", "text", "stopped")}


class Generator:
    """A model with its parameters on the devices.

    Args:
      model: as `build_model` makes it; params: of its layout.
      tokenizer: between text and ids, None for ids alone.
      end_ids: that end a text.
      vocabulary: ids below it may be chosen; a model's own may be rounded up.
      quantize: 'int8' keeps the experts so (`int8.py`) and deletes those given; 'none' keeps these.
      decode: 'gather' brings few tokens to all devices that share the experts (`few_tokens.py`); 'exchange' sends each
        to its experts by the run's schedule and all-to-all, as prompts always are.

    Raises:
      UserError: another `quantize` or `decode`.
    """

    def __init__(
        self, model: LanguageModel, params: dict, *, tokenizer: Tokenizer | None = None, end_ids: Sequence[int] = (),
        vocabulary: int | None = None, quantize: str = "none", decode: str = "gather",
    ):  # fmt: skip
        for name, value, known in (("quantize", quantize, QUANTIZE), ("decode", decode, DECODE)):
            if value not in known:
                raise UserError(f"{name} ({value!r}) must be one of {', '.join(known)}")
        self.model, self.params, self.tokenizer = model, params, tokenizer
        self.end_ids, self.vocabulary = tuple(end_ids), vocabulary or model.vocab_size
        self._residence = {segment.name: reside(even_placement(model, segment)) for segment in model.expert_segments}
        specs = model.layout().params
        if quantize == "int8":
            self.params = self._of_banks(params, lambda bank, _: quantize_bank(bank))
            specs = self._of_banks(specs, lambda bank, _: quantized_specs(bank))
        shapes = {name: residence.shape for name, residence in self._residence.items()}
        self._parameters = Parameters(specs, shapes, quantize, decode)
        self.tables = self._placed_tables()
        self._programs: dict[tuple, Callable] = {}

    def replicate(
        self, experts: Sequence[np.ndarray], planner: str = "balanced", replica_slots: int = 1
    ) -> dict[str, Placement]:
        """Let devices hold replicas of the experts that were taken most, and return {segment: placement}.

        Text stays the same; devices share its work more evenly. The parameters given before are moved.

        Args:
          experts: of `Generated`, from which loads are counted; planner, replica_slots: as in `plan_replicas`.
        """
        placements = plan_replicas(self.model, experts, planner, replica_slots)
        before, after = self._residence, {name: reside(placement) for name, placement in placements.items()}

        def moved(bank, name):
            return move_bank(bank, before[name].slot_expert, after[name].slot_expert)

        self.params = self._of_banks(self.params, moved)
        shapes = {name: residence.shape for name, residence in after.items()}
        self._residence, self._programs = after, {}
        self._parameters = dataclasses.replace(self._parameters, shapes=shapes)
        self.tables = self._placed_tables()
        return placements

    def _of_banks(self, tree: dict, function: Callable) -> dict:
        """Return parameters, or something of their structure, with function(bank, segment's name) for each bank."""
        segments = self.model.expert_segments
        banks = {own.name: function(self.model.own_part(tree["bank"], own), own.name) for own in segments}
        return {**tree, "bank": joined(banks)}

    def _placed_tables(self):
        found = {}
        for segment in self.model.expert_segments:
            axes = self.model.roles_of(segment).expert
            found[segment.name] = to_devices(self._residence[segment.name].tables, self.model.roles.sharding(axes))
        return joined(found)

    @property
    def longest(self) -> int | None:
        """Positions of the model, None where they have no end."""
        config = self.model.config
        return config.max_length if config.positions == "learned" else None

    def generate(
        self, prompts: str | Sequence, max_new_tokens: int, sampling: Sampling | None = None, *,
        ignore_eos: bool = False, experts: bool = False, on_token: Callable[[int, int], None] | None = None,
    ) -> Generated:  # fmt: skip
        """Continue prompts.

        Args:
          prompts: a text, or a list of texts or of id lists, of any lengths.
          max_new_tokens: new tokens for each prompt at most.
          sampling: how tokens are chosen; None draws by the model's own probabilities.
          ignore_eos: go on past the end of a text.
          experts: report the experts of every token.
          on_token: called with (prompt's index, id) as tokens come.

        Raises:
          UserError: prompts that the model cannot continue.
        """
        ids = to_ids([prompts] if isinstance(prompts, str) else prompts, self.tokenizer)
        check_prompts(ids, max_new_tokens, self.vocabulary, self.longest)
        request = _Request(self, ids, max_new_tokens, sampling or Sampling(), () if ignore_eos else self.end_ids)
        said, choices, seconds = request.run(on_token, experts)
        ends = set(request.end_ids)
        return Generated(
            prompt_ids=ids,
            token_ids=said,
            text=None if self.tokenizer is None else [self.text_of(new, ends) for new in said],
            stopped=[request.reason(index, new) for index, new in enumerate(said)],
            experts=choices,
            seconds=seconds,
        )

    def experts(self, prompts: str | Sequence) -> list[np.ndarray]:
        """Return the experts that each token of each prompt takes, int32 [tokens, L, K] for each prompt."""
        return self.generate(prompts, 1, Sampling(temperature=0), experts=True).experts or []

    def loss(self, sequences: Sequence[Sequence[int]]) -> float:
        """Return the mean loss, in nats, of every token of some id lists but the first of each, given those before it.

        Raises:
          UserError: lists of one token, or ids and lengths that the model cannot read.
        """
        check_prompts([list(ids)[:-1] for ids in sequences], 1, self.vocabulary, self.longest)
        check_prompts([list(ids)[1:] for ids in sequences], 1, self.vocabulary, None)
        roles = self.model.roles
        parts = roles.size(roles.dense)
        rows, length = bucket(-(-len(sequences) // parts)), max(map(len, sequences)) - 1
        inputs, targets = (np.zeros((parts * rows, length), np.int32) for _ in range(2))
        lengths = np.zeros(parts * rows, np.int32)
        for row, ids in enumerate(sequences):
            lengths[row] = len(ids) - 1
            inputs[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
        key = ("score", rows, length)
        if key not in self._programs:
            self._programs[key] = make_score(self.model, self._parameters, rows, length)
        arrays = to_devices((inputs, targets, lengths), roles.sharding(roles.dense))
        return float(self._programs[key](self.params, self.tables, *arrays)) / int(lengths.sum())

    def text_of(self, ids: Sequence[int], ends=()) -> str:
        """Return the text of ids, without an end of text at their end."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; read token_ids")
        ids = list(ids)
        return self.tokenizer.decode(np.asarray(ids[:-1] if ids and ids[-1] in ends else ids, np.int32))

    def program(self, kind: str, *sizes) -> Callable:
        """Return a compiled-on-first-call program: 'prefill' (rows, length, held, compiled), 'decode' (rows, compiled).

        One program serves all requests whose rounded sizes are equal.
        """
        key = (kind, *sizes)
        if key not in self._programs:
            make = {"prefill": make_prefill, "decode": make_decode}[kind]
            self._programs[key] = make(self.model, self._parameters, self.vocabulary, *sizes)
        return self._programs[key]


class _Request:
    """One batch of prompts on its way through the programs."""

    def __init__(self, owner: Generator, prompts: list[list[int]], max_new: int, sampling: Sampling, end_ids):
        self.owner, self.prompts, self.sampling, self.end_ids = owner, prompts, sampling, tuple(end_ids)
        roles = owner.model.roles
        self.parts = roles.size(roles.dense)
        self.rows = bucket(-(-len(prompts) // self.parts))
        longest = max(map(len, prompts))
        self.left = [self._most(prompt, max_new) for prompt in prompts]
        most = max(len(prompt) + left for prompt, left in zip(prompts, self.left, strict=True))
        self.length, self.held = self._fit(longest), max(self._fit(longest), self._fit(most - 1))

    def _most(self, prompt: list[int], max_new: int) -> int:
        """Return how many tokens may follow: the last one needs no position of its own."""
        limit = self.owner.longest
        return max_new if limit is None else min(max_new, limit - len(prompt) + 1)

    def _fit(self, tokens: int) -> int:
        limit = self.owner.longest
        size = bucket(tokens, LEAST_LENGTH)
        return size if limit is None else max(min(size, limit), tokens)

    def reason(self, index: int, new: list[int]) -> str:
        """Return why a continuation ended."""
        if new and new[-1] in self.end_ids:
            return "end"
        limit = self.owner.longest
        full = limit is not None and len(self.prompts[index]) + len(new) > limit
        return "max_length" if full else "max_new_tokens"

    def inputs(self):
        """Return (prompts [B, Sq], lengths, left, keys, Knobs) on the devices; rows that fill the batch are empty."""
        total, roles = self.parts * self.rows, self.owner.model.roles
        tokens = np.zeros((total, self.length), np.int32)
        lengths, left, keys = np.zeros(total, np.int32), np.zeros(total, np.int32), np.zeros((total, 3), np.uint32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row], left[row] = len(prompt), self.left[row]
        keys[: len(self.prompts)] = prompt_keys(self.prompts, self.sampling.seed)
        by_row = roles.sharding(roles.dense)
        ends = np.full(bucket(len(self.end_ids), END_SLOTS), -1, np.int32)
        ends[: len(self.end_ids)] = self.end_ids
        knobs = Knobs(np.float32(self.sampling.temperature), np.float32(self.sampling.top_p), ends)
        return *to_devices((tokens, lengths, left, keys), by_row), to_devices(knobs, roles.sharding())

    def run(self, on_token, want_experts: bool):
        """Return (new ids of each prompt, experts of each or None, seconds [steps])."""
        owner, compiled = self.owner, self.sampling.compiled
        prefill = owner.program("prefill", self.rows, self.length, self.held, compiled)
        decode = owner.program("decode", self.rows, compiled)
        *arrays, knobs = self.inputs()
        started, seconds = time.perf_counter(), []
        said: list[list[int]] = [[] for _ in self.prompts]
        taken = _Experts(self, want_experts)
        state, chosen = prefill(owner.params, owner.tables, *arrays, knobs)
        for step in range(max(self.left)):
            following = None
            if step + 1 < max(self.left):
                state, following = decode(owner.params, owner.tables, state, knobs)
            ids = np.asarray(chosen.ids)[: len(self.prompts)]
            seconds.append(time.perf_counter() - started)
            for row in np.flatnonzero(ids >= 0):
                said[row].append(int(ids[row]))
                if on_token is not None:
                    on_token(int(row), int(ids[row]))
            taken.add(chosen)
            if following is None or (ids < 0).all() or all(map(self._ended, range(len(said)), said)):
                break
            chosen = following
        return said, taken.of_prompts(), np.asarray(seconds)

    def _ended(self, index: int, new: list[int]) -> bool:
        return len(new) >= self.left[index] or bool(new) and new[-1] in self.end_ids


class _Experts:
    """The experts of every token, gathered call by call."""

    def __init__(self, request: _Request, wanted: bool):
        self.request, self.wanted = request, wanted
        self.tokens: list[list[np.ndarray]] = [[] for _ in request.prompts]  # of each prompt [tokens, L, K]
        self.calls = 0

    def add(self, chosen: Chosen) -> None:
        """Take up what one program call found."""
        if not self.wanted:
            return
        request, model = self.request, self.request.owner.model
        length = 1 if self.calls else request.length
        self.calls += 1
        most = max(segment.moe.top_k for segment in model.expert_segments)
        layers = []
        for segment in model.expert_segments:
            own = by_sequence(np.asarray(chosen.choices[segment.name]), request.parts, request.rows, length)
            layers.append(np.pad(own, ((0, 0), (0, 0), (0, 0), (0, most - own.shape[-1])), constant_values=-1))
        found = np.concatenate(layers).transpose(1, 2, 0, 3)  # [B, Sq, L, K]
        for row, tokens in enumerate(self.tokens):
            real = found[row, :, 0, 0] >= 0
            tokens.append(found[row][real])

    def of_prompts(self) -> list[np.ndarray] | None:
        return [np.concatenate(tokens) for tokens in self.tokens] if self.wanted else None
