"""Conversations as token ids, by the tokenizer's own chat template, with a mark on every token that is an answer's.

Inputs: records with `messages`, and perhaps `tools`. Outputs: marked ids, int32 [tokens]. Nothing is added to what the
template writes. jinja2 (extra [tokenizers]) is imported when a template is read. `scripts/show_chats.py` shows the
marks.
"""

# A template is somebody else's program, so it runs in jinja2's sandbox, with the names that transformers gives it.

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.data.tokenizer import HuggingFaceTokenizer, Tokenizer, check_inside, read_json
from moe_jax.errors import UserError

# Above the id of a token of conversations stand two bits, so that whatever holds, hashes and cuts ids holds the marks.
ANSWER = 1 << 30  # the loss counts where this token is the target
FIRST = 1 << 29  # of its conversation
ID_BITS = FIRST - 1

# role -> those that it may follow; '' is the beginning
_FOLLOWS = {
    "system": ("",),
    "developer": ("",),
    "user": ("", "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # `<name>_token` is a name in templates
_DATE = datetime.datetime(2024, 7, 26)  # "today" in templates: the tokens of a text depend on no clock
_PROBE = "\u2603"  # an answer that stands nowhere else
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # no characters by Unicode's own word; around what `{% generation %}` encloses
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def check_roles(messages: Any, where: str) -> list[dict]:
    """Return a conversation's messages without null keys, as transformers does; a UserError names what is wrong."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{where}: `messages` must be a list of objects with 'role' and 'content'; correct it")
    before = ""
    for number, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in _FOLLOWS:
            raise UserError(f"{where}: message {number} has the role {role!r}, not one of {', '.join(_FOLLOWS)}")
        if before not in _FOLLOWS[role]:
            after = f"follows {before!r}" if before else "comes first"
            raise UserError(f"{where}: roles are out of order: message {number} ({role!r}) {after}; correct the order")
        before = role
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


Chat = tuple[str, list[tuple[int, int]]]  # a conversation's text, and where each answer begins and ends in it


class ChatTemplate:
    """Write conversations as the template next to a tokenizer says.

    The template is chat_template.jinja, else `chat_template` of tokenizer_config.json. Answers are what its
    `{% generation %}` blocks enclose. Where it has none, an answer begins where the template would let the model begin,
    and ends where the conversation up to it ends, or else with the first special token after it; white space behind
    what ends a turn, a special token or not, belongs to no answer.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Read the template; a UserError where there is none, or where it is none."""
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                "a chat needs the template of a tokenizer, and bytes have none; name a tokenizer.json with "
                "chat_template.jinja next to it in DataConfig.tokenizer"
            )
        self._tokenizer, folder = tokenizer, tokenizer.file.parent
        self._names, given = special_names(folder), read_json(folder, "tokenizer_config.json").get("chat_template")
        file = check_inside(folder, "chat_template.jinja")
        try:
            if file.exists():
                given = file.read_text(encoding="utf-8")
            elif isinstance(given, list):  # of several, by name
                given = {entry["name"]: entry["template"] for entry in given}
            templates = given if isinstance(given, dict) else {"default": given}
            if not isinstance(templates.get("default"), str):
                raise ValueError("there is none")
            self._templates = {name: _compile(text) for name, text in templates.items()}
        except UserError:
            raise
        except Exception as error:  # of jinja2, of the file, of its keys
            raise UserError(
                f"{folder}: no chat template can be read ({_line(error)}); put a chat_template.jinja there"
            ) from error
        self._has_blocks = {name: bool(_GENERATION.search(text)) for name, text in templates.items()}
        # what is written behind an answer, without white space; nothing where blocks tell, or no answer is shown
        turn, parts = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}], []
        with contextlib.suppress(UserError):
            parts = self.write(turn, None, "").split(_PROBE)
        mark = parts[-1].strip() if len(parts) > 1 and not self._has_blocks["default"] else ""
        more = (mark,) if mark and not mark.endswith(tokenizer.special) else ()
        self._ends = tokenizer.special + more
        written = json.dumps([templates, self._names, *more], sort_keys=True)
        # identifies the mapping of conversations to marked ids, as a tokenizer's name does that of texts
        self.name = f"{tokenizer.name} chat {hashlib.blake2b(written.encode(), digest_size=16).hexdigest()}"

    def write(self, messages: list[dict], tools: list | None, where: str, *, prompt: bool = False) -> str:
        """Return a conversation as text, `_OPEN` and `_CLOSE` around blocks that generate.

        Args:
          prompt: add what lets the model answer.

        Raises:
          UserError: the template fails, or refuses the conversation.
        """
        template = self._templates[self._which(tools)]
        try:
            given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            text = template.render(**self._names, **given)
            text.encode()
            return text
        except Exception as error:  # whatever the template's own code meets
            raise UserError(
                f"{where}: the chat template fails ({_line(error)}); correct it, or the messages"
            ) from error

    def read(self, record: dict, where: str) -> Chat:
        """Return a conversation as the template writes it, with where each answer begins and ends, ascending.

        Raises:
          UserError: as `write`; no answer, roles out of order, or a template that does not show where an answer begins.
        """
        messages, tools = check_roles(record.get("messages"), where), record.get("tools") or None
        if isinstance(tools, str):  # as many data sets keep them
            try:
                tools = json.loads(tools) or None
            except ValueError as error:
                raise UserError(f"{where}: tools are no JSON ({error}); correct them") from error
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise UserError(
                f"{where}: no message of the role 'assistant', so nothing to learn; remove the conversation"
            )
        text = self.write(messages, tools, where)
        if self._has_blocks[self._which(tools)]:
            parts = re.split(f"([{_OPEN}{_CLOSE}])", text)
            if parts[1::2] != [_OPEN, _CLOSE] * (len(parts) // 4):
                raise UserError(f"{where}: holds U+FDD0 or U+FDD1, which are no characters; remove them")
            ends = np.cumsum([len(part) for part in parts[::2]]).tolist()
            text, turns = "".join(parts[::2]), list(zip(ends[:-1:2], ends[1::2], strict=True))
        else:
            turns = [self._turn(messages, number, tools, text, where) for number in answers]
        if all(start == end for start, end in turns):
            raise UserError(f"{where}: the chat template writes nothing for the assistant to say; correct either")
        return text, turns

    def _which(self, tools: list | None) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"

    def _turn(self, messages: list[dict], number: int, tools, text: str, where: str) -> tuple[int, int]:
        """Return where a message of the assistant begins and ends in the text of all messages."""
        before = self.write(messages[:number], tools, where, prompt=True)
        until = self.write(messages[: number + 1], tools, where)
        if text.startswith(before) and text.startswith(until) and len(until) >= len(before):
            trimmed = until[len(before) :].rstrip()
            return len(before), len(before) + len(trimmed) if trimmed.endswith(self._ends) else len(until)
        # some templates write an answer otherwise once others follow
        ends = [at + len(mark) for mark in self._ends if (at := text.find(mark, len(before))) >= 0]
        if not text.startswith(before) or not ends:
            raise UserError(
                f"{where}: the chat template writes message {number} otherwise when others follow, so where the answer "
                "begins is unknown; put {% generation %} and {% endgeneration %} around answers in the template"
            )
        return len(before), min(ends)

    def encode_batch(self, chats: Sequence[Chat]) -> list[np.ndarray]:
        """Return the marked ids of each conversation; a token that touches an answer is the answer's."""
        marked_chats = []
        encoded = self._tokenizer.encode_with_places([text for text, _ in chats])
        for (ids, places), (_, answers) in zip(encoded, chats, strict=True):
            marked = ids.copy()
            for start, end in answers:
                marked[(places[:, 1] > start) & (places[:, 0] < end)] |= ANSWER
            marked[:1] = (marked[:1] & ~ANSWER) | FIRST  # nothing comes before the first, so it is no target
            marked_chats.append(marked)
        return marked_chats

    def prompt(self, messages: list[dict]) -> list[int]:
        """Return the ids of a conversation that waits for an answer."""
        text = re.sub(
            f"[{_OPEN}{_CLOSE}]", "", self.write(check_roles(messages, "the chat"), None, "the chat", prompt=True)
        )
        return self._tokenizer.encode_batch([text])[0].tolist()

    def end_ids(self) -> tuple[int, ...]:
        """Return the id that ends a turn of the assistant: the first special or only one behind an answer, or ()."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text, ((start, _), *_) = self.read({"messages": chat}, "the end of a turn")
        ids = self._tokenizer.encode_batch([text[text.find("b", start) + 1 :].strip()])[0].tolist()
        return tuple(i for i in ids if i in self._tokenizer.special_ids or len(ids) == 1)[:1]


def special_names(folder: Path) -> dict[str, str]:
    """Return the special tokens by which a tokenizer's folder calls its ends and others: {'bos_token': '<s>', ...}."""
    settings = {**read_json(folder, "special_tokens_map.json"), **read_json(folder, "tokenizer_config.json")}
    given = {f"{name}_token": settings.get(f"{name}_token") for name in _SPECIAL}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}


def special_ids(tokenizer: Tokenizer | None, below: int) -> dict[str, int | list[int] | None]:
    """Return a tokenizer's bos_token_id, eos_token_id and pad_token_id, as in config.json; None of what it lacks."""
    ends = [] if tokenizer is None else [end for end in tokenizer.end_ids if end < below]
    named = {"bos_token": None, "eos_token": ends if len(ends) > 1 else next(iter(ends), None), "pad_token": None}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        ids = {text: i for text, i in zip(tokenizer.special, tokenizer.special_ids, strict=True) if i < below}
        names = special_names(tokenizer.file.parent)
        named |= {name: ids.get(names.get(name)) for name in ("bos_token", "pad_token")}
    return {f"{name}_id": value for name, value in named.items()}


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _compile(text: str):
    """Return a template in the sandbox, with the filters and functions that templates of chats expect."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UserError(
            "a chat template needs the package 'jinja2', which is not installed; pip install jinja2"
        ) from error

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`: what the model is to write."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        def _enclose(self, caller) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def refuse(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, **how):
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = _DATE.strftime
    return sandbox.from_string(text)
