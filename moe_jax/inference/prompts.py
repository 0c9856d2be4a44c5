"""Prompts as token ids, checked before anything compiles. Host side; no arrays on a device.

Inputs: texts or lists of ids. Outputs: lists of ids, each one that the model can read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from moe_jax.data import Tokenizer
from moe_jax.errors import UserError


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
