"""A run folder as a loaded model: prompts in, continuations out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from moe_jax.config.run_config import RunConfig
from moe_jax.data.tokenizer import END_FILES, Tokenizer, find_tokenizer, read_end_ids
from moe_jax.errors import UserError
from moe_jax.inference.programs import LEAST_LENGTH, Sampling, State, bucket, make_step, prompt_keys
from moe_jax.kernels.float8 import COMPUTE
from moe_jax.models import LanguageModel, ModelConfig
from moe_jax.models.attention import resolve_attention
from moe_jax.models.config import expert_counts
from moe_jax.models.lora import adapters_of, base_of, joined, merged_model
from moe_jax.models.transformer import matrix_dims
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import build_mesh, replace_leaf, to_devices
from moe_jax.registry import ROUTERS
from moe_jax.storage.checkpoint import Checkpointer, HostData, run_config
from moe_jax.storage.run_folder import RunFolder
from moe_jax.training.feed import padded_vocabulary
from moe_jax.training.frozen_models import restore_params


def inference_configs(model: ModelConfig, moe: MoEConfig) -> tuple[ModelConfig, MoEConfig]:
    """Return both as a generating program takes them: nothing saved for a backward, no noise, no capacity.

    Raises:
      UserError: a model that does not predict the next token, or a router that chooses for a whole batch at once.
    """
    if model.kind != "gpt":
        raise UserError(
            f"ModelConfig.kind ({model.kind!r}) cannot generate: it sees what follows a token; give a run with "
            "ModelConfig.kind = 'gpt'"
        )
    names = dict.fromkeys([moe.router, *(str(run.get("router", moe.router)) for run in model.runs)])
    for name in names:
        if not ROUTERS[name].by_token:
            raise UserError(
                f"MoEConfig.router ({name!r}) lets a token's experts depend on the other tokens of its batch, so text "
                f"would depend on what is generated next to it; bind MoEConfig.router = 'topk', by which each "
                "token chooses for itself"
            )
    # A capacity bounds what an expert takes of the tokens gated together, so a prompt's text would depend on what is
    # generated next to it, on its batch's padding, and on whether a token is read with its prompt or by itself.
    # float8 is how a run trains faster, and is not how single tokens are decoded.
    changes = {"capacity_factor": None, "gate_noise": 0.0, "balance_over": "batch"}
    moe = dataclasses.replace(moe, dispatch_dtype=COMPUTE, **changes)
    changes = {"remat": "none", "prefetch": "none", "refetch_replicas": False, "sequence_parallel": False}
    return dataclasses.replace(model, **changes), moe


def load(
    workdir: str | os.PathLike[str],
    *,
    step: int | None = None,
    averaged: bool = False,
    bindings: Sequence[str] = (),
    devices: Sequence | None = None,
) -> Generator:
    """Return a finished or running run's model, ready to generate.

    Args:
      workdir: the run folder; step: of a checkpoint, None is the newest.
      averaged: take the moving average of the parameters.
      bindings: lines 'Name.field = value' that win over the run's config, such as MoEConfig.schedule, or the sizes in
        MeshConfig, which must make the number of devices.
      devices: to run on; None takes all.

    Raises:
      UserError: no such run or checkpoint, a model that cannot generate, or a mesh that does not fit it.
    """
    config, folder = run_config(workdir, bindings), RunFolder(workdir, create=False)
    with contextlib.closing(Checkpointer(folder.checkpoints)) as checkpoints:
        step = checkpoints.choose(step)
        converted = config.model.vocab_size > 0 and (folder.path / END_FILES[-1]).exists()
        # A conversion of a checkpoint without a tokenizer leaves 'byte', whose ids the model's are not.
        is_known = config.data.tokenizer != "byte" or not converted
        name = HostData.from_json(checkpoints.read_host(step)).tokenizer
        tokenizer = find_tokenizer(config.data, folder.path, name) if is_known else None
        model = build_model(config, jax.devices() if devices is None else list(devices), tokenizer)
        adapted, sharding = dataclasses.replace(model, lora=config.lora), model.roles.sharding
        stored, homes = adapted.placed_shapes(), model.even_homes
        params = restore_params(checkpoints, step, adapted, stored, homes, "ema" if averaged else "params")
    if config.lora.rank:
        merge = jax.jit(lambda base, lora: merged_model(joined(base, adapted.scaled(lora))), donate_argnums=0)
        shardings = jax.tree.map(lambda spec: sharding(*spec), model.layout().params)
        params = jax.device_put(merge(base_of(params), adapters_of(params)), shardings)
    dtype = model.config.dtype

    def cast(path, leaf):
        # Experts and matrices of blocks are kept as every step would cast them. Norms, gates, biases and embeddings
        # stay as trained, but for an untied output head: they are read in their own dtype.
        *within, name = (entry.key for entry in path)  # of {'dense', 'bank'}
        is_matrix = within[0] == "bank" or "gate" not in within and (name == "head" or matrix_dims(name) is not None)
        if leaf.dtype == dtype or not is_matrix:
            return leaf
        return replace_leaf(lambda leaf: leaf.astype(dtype), leaf, leaf.sharding)

    return Generator(
        model,
        jax.tree.map_with_path(cast, params),
        tokenizer=tokenizer,
        # of generation_config.json, else of config.json, else the tokenizer's
        end_ids=read_end_ids(folder.path) or (() if tokenizer is None else tokenizer.end_ids),
        vocabulary=model.vocab_size if tokenizer is None else min(tokenizer.vocab_size, model.vocab_size),
    )


def build_model(config: RunConfig, devices: Sequence, tokenizer: Tokenizer | None) -> LanguageModel:
    """Return the model of a run on a mesh of `devices`, as it generates; nothing is allocated."""
    model, moe = inference_configs(config.model, config.moe)
    roles = build_mesh(config.mesh, devices, expert_counts(model, moe))
    if tokenizer is None and not model.vocab_size:
        raise UserError(
            f"DataConfig.tokenizer ({config.data.tokenizer!r}) is not there, and only it says how many ids the "
            f"vocabulary has; put it back, or bind ModelConfig.vocab_size"
        )
    return LanguageModel(
        config=resolve_attention(model, roles.mesh.devices.flat[0]),
        moe=moe,
        vocab_size=model.vocab_size or padded_vocabulary(tokenizer, model),
        roles=roles,
        zero_stage=0,
        expert_zero_stage=0,
    )


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, vocabulary: int, longest: int | None) -> None:
    """Raise a UserError for what a model with ids below `vocabulary` and `longest` positions cannot continue."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What became of some prompts; lists have an entry for each, in their order.

    Attributes:
      prompt_ids: the ids that went in; token_ids: the new ones, an end of text included.
      text: the new ones as text that goes on behind the prompt's, without the end; None without a tokenizer.
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


class Generator:
    """A model with its parameters on the devices.

    Args:
      model: as `build_model` makes it; params: of its layout; tokenizer: None for ids alone; end_ids: that end a text.
      vocabulary: ids below it may be chosen; a model's own may be rounded up.
    """

    def __init__(
        self,
        model: LanguageModel,
        params: dict,
        *,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (),
        vocabulary: int | None = None,
    ):
        self.model, self.params, self.tokenizer = model, params, tokenizer
        self.end_ids, self.vocabulary = tuple(end_ids), vocabulary or model.vocab_size
        # positions of the model, None where they have no end
        self.longest = model.config.max_length if model.config.positions == "learned" else None
        # one program serves all requests that round to its sizes
        self.program = functools.cache(functools.partial(make_step, model, self.vocabulary))
        # experts stay at their even homes: parameters do not change here
        shardings = {s.name: model.roles.sharding(s.roles(model.roles).expert) for s in model.expert_segments}
        self.tables = {name: to_devices(tables, shardings[name]) for name, tables in model.even_tables().items()}

    def generate(
        self, prompts: str | Sequence, max_new_tokens: int, sampling: Sampling | None = None, *,
        ignore_eos: bool = False, experts: bool = False, on_token: Callable[[int, list, list], None] | None = None,
    ) -> Generated:  # fmt: skip
        """Continue prompts.

        Args:
          prompts: a text, or a list of texts or of id lists, of any lengths; max_new_tokens: for each at most.
          sampling: how tokens are chosen; None draws by the model's own probabilities.
          ignore_eos: go on past the end of a text; experts: report the experts of every token.
          on_token: called with (prompt's index, its ids, the new ids so far) as tokens come.

        Raises:
          UserError: prompts that the model cannot continue.
        """
        ids = []
        for prompt in [prompts] if isinstance(prompts, str) else prompts:
            if isinstance(prompt, str) and self.tokenizer is None:
                raise UserError(
                    "a prompt is text, and this run has no tokenizer (DataConfig.tokenizer, or tokenizer.json in its "
                    "folder); give token ids with --prompt_ids"
                )
            ids.append(list(map(int, self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt)))
        limit, ends = self.longest, () if ignore_eos else self.end_ids
        check_prompts(ids, max_new_tokens, self.vocabulary, limit)
        # how many tokens may follow each: the last one needs no position of its own
        left = [max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt) + 1) for prompt in ids]
        said, taken, seconds = self._run(ids, left, sampling or Sampling(), ends, on_token, experts)
        stopped = []
        for prompt, new in zip(ids, said, strict=True):
            full = limit is not None and len(prompt) + len(new) > limit
            stopped.append("end" if new and new[-1] in ends else "max_length" if full else "max_new_tokens")
        return Generated(
            prompt_ids=ids,
            token_ids=said,
            text=None if self.tokenizer is None else [self.text_of(*row, ends) for row in zip(said, ids, strict=True)],
            stopped=stopped,
            experts=taken,
            seconds=seconds,
        )

    def _run(self, prompts: list[list[int]], left: list[int], sampling: Sampling, ends: tuple, on_token, experts: bool):
        """Return (new ids of each prompt, at most `left`, experts of each or None, seconds [steps])."""
        roles = self.model.roles
        rows, length = bucket(-(-len(prompts) // roles.size(roles.dense))), self._rounded(max(map(len, prompts)))
        most = max(len(prompt) + more - 1 for prompt, more in zip(prompts, left, strict=True))
        prefill = self.program(rows, length, max(length, self._rounded(most)), sampling.compiled)
        decode = self.program(rows, 1, 0, sampling.compiled)
        settings = to_devices((np.float32(sampling.temperature), np.float32(sampling.top_p)), roles.sharding())
        model, by_row = (self.params, self.tables), roles.sharding(roles.dense)

        said: list[list[int]] = [[] for _ in prompts]
        taken: list[list[np.ndarray]] = [[] for _ in prompts]  # of each prompt [tokens, L, K]
        state = to_devices(self._first_state(prompts, sampling.seed, rows, length), by_row)
        goes_on = np.arange(state.ids.shape[0]) < len(prompts)  # rows that fill the batch do not
        live = to_devices(goes_on, by_row)
        # An id goes into the next call without leaving the devices, and is read while that call runs: so what is chosen
        # once more for a sequence that has ended is left out.
        started, seconds = time.perf_counter(), []
        state, chosen = prefill(*model, state, live, *settings)
        for step in range(max(left)):
            if step + 1 < max(left):
                state, following = decode(*model, state, live, *settings)
            new_ids, before, goes_on = np.asarray(chosen[0]), goes_on, goes_on.copy()
            seconds.append(time.perf_counter() - started)
            choices = self._choices(chosen[2], rows, 1 if step else length) if experts else None
            for row in np.flatnonzero(before):
                said[row].append(int(new_ids[row]))
                goes_on[row] = len(said[row]) < left[row] and said[row][-1] not in ends
                if experts:
                    taken[row].append(choices[row][choices[row, :, 0, 0] >= 0])  # padding has no expert
                if on_token is not None:
                    on_token(int(row), prompts[row], said[row])
            if not goes_on.any():
                break
            if (goes_on != before).any():
                live = to_devices(goes_on, by_row)
            chosen = following
        return said, [np.concatenate(tokens) for tokens in taken] if experts else None, np.asarray(seconds)

    def _rounded(self, tokens: int) -> int:
        """Return a length that programs are compiled for, at least `tokens`."""
        size = bucket(tokens, LEAST_LENGTH)
        return size if self.longest is None else max(min(size, self.longest), tokens)

    def _first_state(self, prompts: Sequence[Sequence[int]], seed: int, rows: int, length: int) -> State:
        """Return the NumPy state before the first new token; rows that fill the batch are zeros."""
        total = rows * self.model.roles.size(self.model.roles.dense)
        ids, last = np.zeros((total, length), np.int32), np.zeros(total, np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            last[row] = len(prompt) - 1
        keys = np.zeros((total, 3), np.uint32)
        keys[: len(prompts)] = prompt_keys(prompts, seed)
        return State(None, ids, last, keys)

    def _choices(self, choices: dict, rows: int, length: int) -> np.ndarray:
        """Return int32 [B, Sq, L, K], -1 for padding, from the choices of a step on `rows` sequences a device."""
        layers, parts = [], self.model.roles.size(self.model.roles.dense)
        widest = max(segment.moe.top_k for segment in self.model.expert_segments)
        for segment in self.model.expert_segments:
            ids = np.asarray(choices[segment.name])  # [L, B', K]
            depth, _, top_k = ids.shape
            ids = ids.reshape(depth, parts, -1, top_k)[:, :, : rows * length].reshape(depth, -1, length, top_k)
            layers.append(np.pad(ids, [(0, 0)] * 3 + [(0, widest - top_k)], constant_values=-1))
        return np.concatenate(layers).transpose(1, 2, 0, 3)

    def text_of(self, ids: Sequence[int], prompt: Sequence[int], ends=()) -> str:
        """Return the text of ids behind a prompt's, which keeps their first space, without an end at their end."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; read token_ids")
        ids = list(ids)[: -1 if ids and ids[-1] in ends else None]
        alone, before, whole = (self.tokenizer.decode(np.asarray(i, np.int32)) for i in (ids, prompt, [*prompt, *ids]))
        before = before.rstrip("\ufffd")  # bytes of a character that is not whole yet
        return whole.removeprefix(before) if whole.startswith(before) else alone
