"""A loaded model: prompts in, continuations out, and replicas of hot experts.

The host only counts and hands out tokens; a token's id goes into the next call without leaving the devices, and is read
while that call runs. Replicas are planned from observed loads and stay: parameters do not change here, so a replica is
one more row of its device's bank, all slots are home slots to a program, and nothing is fetched. A bank's row of slot g
in layer l is l G + g.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.cluster import Cluster
from moe_jax.data import Tokenizer
from moe_jax.errors import UserError
from moe_jax.inference.few_tokens import quantize_bank, quantized_specs
from moe_jax.inference.programs import (
    LEAST_LENGTH,
    Chosen,
    Knobs,
    Parameters,
    Sampling,
    bucket,
    by_sequence,
    make_decode,
    make_prefill,
    make_score,
    prompt_keys,
)
from moe_jax.models import LanguageModel
from moe_jax.models.segments import Segment
from moe_jax.moe.tables import Tables
from moe_jax.parallel.global_arrays import to_devices
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape, build_shape, fill_tables


def read_prompt_ids(path: str | os.PathLike[str]) -> list[list[int]]:
    """Return the id lists of a JSON file.

    Raises:
      UserError: it cannot be read, or is not a list of lists of whole numbers.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--prompt_ids={path} cannot be read ({error}); give a JSON file such as [[5, 17], [8]]"
        ) from error
    whole = isinstance(found, list) and all(isinstance(row, list) for row in found)
    if not whole or not all(type(value) is int for row in found for value in row):
        raise UserError(f"--prompt_ids={path} must be a JSON list of lists of whole numbers, such as [[5, 17], [8]]")
    return found


def to_ids(prompts: Sequence, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return each prompt's ids; texts get the tokenizer's special tokens.

    Raises:
      UserError: a text without a tokenizer.
    """
    found = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            found.append([int(value) for value in prompt])
            continue
        if tokenizer is None:
            raise UserError(
                "a prompt is text, and this run has no tokenizer (DataConfig.tokenizer, or tokenizer.json in its "
                "folder); give token ids with --prompt_ids"
            )
        found.append(tokenizer.encode_prompt(prompt).tolist())
    return found


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, vocabulary: int, longest: int | None) -> None:
    """Refuse what the model cannot continue.

    Args:
      vocabulary: ids below it exist; longest: positions of the model, None where they have no end.

    Raises:
      UserError: no prompt, an empty one, an id outside the vocabulary, a prompt longer than the model, or no new token.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens ({max_new_tokens}) must be at least 1")
    if not prompts:
        raise UserError("there is no prompt; give one with --prompt or --prompt_ids")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index} is empty; give it at least one token")
        wrong = next((value for value in prompt if not 0 <= value < vocabulary), None)
        if wrong is not None:
            raise UserError(f"prompt {index} holds the id {wrong}; this model has 0 to {vocabulary - 1}")
        if longest is not None and len(prompt) > longest:
            raise UserError(
                f"prompt {index} has {len(prompt)} tokens, and the model has ModelConfig.max_length ({longest}) "
                f"positions; give it at most {longest}"
            )


PLANNERS = ("balanced", "eplb")  # those that need no prices, only loads and a number of slots


@dataclasses.dataclass(frozen=True)
class Residence:
    """Where the experts of one segment are.

    Attributes:
      placement: homes and replicas; shape: what programs are built for; tables: that say so, NumPy arrays.
      slot_expert: int32 [D, L, G], the expert in each slot, -1 for none.
    """

    placement: Placement
    shape: PlanShape
    tables: Tables
    slot_expert: np.ndarray


def reside(placement: Placement) -> Residence:
    """Return how a placement is kept for good."""
    shape = build_shape(placement)
    filled = fill_tables(shape, placement)
    devices, layers, slots = filled.slot_expert.shape
    rows = np.arange(layers * slots, dtype=np.int32).reshape(1, layers, slots)
    tables = Tables(filled.dest_slot, filled.dest_num, filled.dest_den, np.broadcast_to(rows, (devices, layers, slots)))
    shape = dataclasses.replace(shape, home_slots=slots, bank_rows=layers * slots, ahead=None)
    return Residence(placement, shape, tables, filled.slot_expert)


def even_placement(model: LanguageModel, segment: Segment) -> Placement:
    """Return a segment's homes without replicas."""
    roles = model.roles_of(segment)
    devices, near = roles.size(roles.expert), roles.members_per_node
    return Placement.even(segment.config.moe_layers, segment.moe.num_experts, devices, near)


def plan_replicas(
    model: LanguageModel, experts: Sequence[np.ndarray], planner: str, replica_slots: int
) -> dict[str, Placement]:
    """Return {segment: placement} for the loads that were seen.

    Args:
      experts: int32 [tokens, L, K] of each prompt, as `Generated.experts`; sources count as alike.
      planner: one of `PLANNERS`; replica_slots: replicas that a device may hold in each layer.

    Raises:
      UserError: another planner, or a negative number of slots.
    """
    if planner not in PLANNERS:
        raise UserError(f"planner ({planner!r}) must be one of {', '.join(PLANNERS)}, which plan by loads alone")
    if replica_slots < 0:
        raise UserError(f"replica_slots ({replica_slots}) must be at least 0")
    found, taken = {}, np.concatenate(list(experts))
    for segment in model.expert_segments:
        start = even_placement(model, segment)
        layers = range(segment.first_layer, segment.first_layer + start.layers)
        counts = [np.bincount(taken[:, at][taken[:, at] >= 0], minlength=start.experts) for at in layers]
        loads = np.repeat(np.asarray(counts, np.float64)[:, None], start.devices, axis=1) / start.devices
        cost = Cost(
            cluster=Cluster(),
            model_dim=segment.config.model_dim,
            hidden_dim=segment.config.hidden_dim,
            replica_slots=replica_slots,
        )
        found[segment.name] = build_planner(PlannerConfig(name=planner)).propose(loads, start, cost)
    return found


def move_bank(bank: dict, old: np.ndarray, new: np.ndarray) -> dict:
    """Return a segment's bank in the order of other slots; the arrays given are deleted one by one.

    Args:
      bank: {name: [D Rb, ...]}; old, new: `Residence.slot_expert` before and after.
    """
    source = _source_rows(old, new)

    def one(leaf):
        moved = jax.jit(lambda leaf: jnp.take(leaf, source, axis=0), out_shardings=leaf.sharding)(leaf)
        jax.block_until_ready(moved)
        leaf.delete()  # not two banks at once
        return moved

    return {name: one(leaf) for name, leaf in bank.items()}


def _source_rows(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return int32 [D Rb], for each row of the new bank the old bank's row of its expert; any where there is none."""
    devices, layers, slots = old.shape
    row_of = np.zeros((layers, max(int(old.max()), int(new.max())) + 1), np.int32)
    device, layer, slot = np.nonzero(old >= 0)
    row_of[layer, old[device, layer, slot]] = (device * layers + layer) * slots + slot
    layer = np.broadcast_to(np.arange(layers)[None, :, None], new.shape)
    return row_of[layer, np.maximum(new, 0)].reshape(-1)


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
      quantize: 'int8' keeps the experts so and deletes those given; 'none' keeps these.
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
        return {**tree, "bank": {name: function(bank, name) for name, bank in tree["bank"].items()}}

    def _placed_tables(self):
        found = {}
        for segment in self.model.expert_segments:
            axes = self.model.roles_of(segment).expert
            found[segment.name] = to_devices(self._residence[segment.name].tables, self.model.roles.sharding(axes))
        return found

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
        # how many tokens may follow each: the last one needs no position of its own
        limit = owner.longest
        self.left = [max_new if limit is None else min(max_new, limit - len(prompt) + 1) for prompt in prompts]
        most = max(len(prompt) + left for prompt, left in zip(prompts, self.left, strict=True))
        self.length, self.held = self._fit(longest), max(self._fit(longest), self._fit(most - 1))

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
        taken: list[list[np.ndarray]] = [[] for _ in self.prompts]  # of each prompt [tokens, L, K]
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
            if want_experts:
                found = self._experts(chosen, 1 if step else self.length)
                for row, tokens in enumerate(taken):
                    tokens.append(found[row][found[row, :, 0, 0] >= 0])  # padding has no expert
            ended = (
                len(new) >= most or bool(new) and new[-1] in self.end_ids
                for new, most in zip(said, self.left, strict=True)
            )  # fmt: skip
            if following is None or (ids < 0).all() or all(ended):
                break
            chosen = following
        return said, [np.concatenate(tokens) for tokens in taken] if want_experts else None, np.asarray(seconds)

    def _experts(self, chosen: Chosen, length: int) -> np.ndarray:
        """Return the experts of the tokens that went into one program call, [B, Sq, L, K], -1 for none."""
        model = self.owner.model
        most = max(segment.moe.top_k for segment in model.expert_segments)
        layers = []
        for segment in model.expert_segments:
            own = by_sequence(np.asarray(chosen.choices[segment.name]), self.parts, self.rows, length)
            layers.append(np.pad(own, ((0, 0), (0, 0), (0, 0), (0, most - own.shape[-1])), constant_values=-1))
        return np.concatenate(layers).transpose(1, 2, 0, 3)
