"""From gin files and bindings to one checked `RunConfig`. This is the only file that imports gin.

gin's own parser reads every file, included ones too, before gin itself gets a line: gin runs an `import` while it
parses, and lets a scope, a mistyped macro and a value of the wrong type pass.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tokenize
import types
import typing
from collections.abc import Sequence
from pathlib import Path

from moe_jax.config.run_config import BOUND, REMOVED, RENAMED, RunConfig, bindable, config_text, with_bindings
from moe_jax.errors import UserError
from moe_jax.registry import load_plugins
from moe_jax.shipped import ROOT, shipped

BINDINGS, OVERRIDES = FLAGS = "--gin_bindings", "--override"
OF_RUNS = ("config.gin", "operative_config.gin")  # names of files that a run writes, or wrote
WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text in quotes"}  # else None


class Reference(str):
    """A value `%macro`, `@name` or `@name()`; its repr is how gin writes it, inside tuples and lists too."""

    __repr__ = str.__str__


# what gin's parser calls for them
_DELEGATE = types.SimpleNamespace(
    configurable_reference=lambda name, evaluate: Reference(f"@{name}{'()' if evaluate else ''}"),
    macro=lambda name: Reference(f"%{name}"),
)


@dataclasses.dataclass(frozen=True)
class Binding:
    """One `target = value`."""

    target: str  # 'Name.field', or the name of a macro
    value: object  # as gin reads it, with `Reference` inside
    place: str  # 'file:line' or the flag
    is_default: bool = False  # a run wrote it down without having been given it


def parse_run_config(
    gin_files: Sequence[str] = (),
    gin_bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> tuple[RunConfig, str]:
    """Read gin files, then bindings, then overrides; later ones win.

    Args:
      gin_files: names of files; relative ones are looked for here, in `search_paths`, then in `ROOT`.
      gin_bindings: lines `Name.field = value`.
      search_paths: folders, for `gin_files` and for `include` lines.
      overrides: further bindings, which errors call by their own flag.

    Returns:
      the config, and `config_text` of it with what was bound marked.

    Raises:
      UserError: whatever is wrong, in one line.
    """
    load_plugins()
    folders = ["", *search_paths, *([str(ROOT)] if shipped("configs").is_dir() else [])]
    read = [binding for name in gin_files for binding in _read_file(name, "--gin_file", folders, ())]
    in_files = {binding.target for binding in read}
    read += _read_text("\n".join(gin_bindings), BINDINGS, folders, ())
    read += _read_text("\n".join(overrides), OVERRIDES, folders, ())
    bindings = {binding.target: binding for binding in read if "." in binding.target}
    macros = {binding.target: binding for binding in read if "." not in binding.target}
    # A macro that stands on the command line alone is a mistyped macro, or a binding without its class.
    texts = [repr(binding.value) for binding in (*bindings.values(), *macros.values())]
    used = set(re.findall(r"%([\w./]+)", " ".join(texts)))  # `Reference` writes itself; a text like it counts too
    for name, macro in macros.items():
        if name not in used and name not in in_files:
            near = _near(name, used | {target for target in in_files if "." not in target})
            near += [f"{other}.{name}" for other, fields in bindable().items() if name in fields]
            hint = _did_you_mean(near, "macros of the files", sorted(in_files & set(macros)))
            raise UserError(
                f"{macro.place} sets the macro {name!r}, which no gin file defines and nothing uses; {hint}"
            )
    types, values = bindable(), {}
    for target, binding in bindings.items():
        name, field = target.split(".")
        values[target] = fitted(target, types[name][field], _resolved(binding, macros), binding.place)
    run = with_bindings(RunConfig(), values)
    bound = {target for target, binding in bindings.items() if not binding.is_default}
    return run, config_text(run, bound)


# Reading.


def _read_file(name: str, place: str, folders: list[str], open_files: tuple[str, ...]) -> list[Binding]:
    """Return the bindings of one file; `place` is where it was asked for, `open_files` those that include it."""
    paths = [os.path.join(folder, os.path.expanduser(name)) for folder in folders]
    path = next((path for path in paths if os.path.isfile(path) or os.path.isdir(path)), None)
    if path is None:
        folders = [os.path.dirname(path) or "." for path in paths]
        files = [file for folder in folders if os.path.isdir(folder) for file in os.listdir(folder)]
        near = [os.path.join(os.path.dirname(name), file) for file in _near(Path(name).name, files)]
        hint = f"did you mean {near[0]!r}?" if near else "or add --gin_search_paths"
        raise UserError(f"gin file {name!r} does not exist ({place}); check the name, {hint}")
    if os.path.isdir(path):
        raise UserError(f"gin file {name!r} is a folder ({place}); name a file in it")
    if os.path.realpath(path) in open_files:
        raise UserError(f"gin file {name!r} includes itself ({place}); take one of the include lines out")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"gin file {name!r} cannot be read: {why} ({place}); name another file") from error
    return _read_text(text, name, folders, (*open_files, os.path.realpath(path)))


def _read_text(text: str, source: str, folders: list[str], open_files: tuple[str, ...]) -> list[Binding]:
    """Return the bindings in a text, and in what it includes; `source` is the file's name or the flag."""
    import gin.config_parser

    lines = text.splitlines() or [""]
    try:
        if "\0" in text:  # Python's tokenizer, which gin uses, raises errors of its own on it
            raise SyntaxError("it holds a NUL character", ("", text[: text.index("\0")].count("\n") + 1, 0, ""))
        statements = list(gin.config_parser.ConfigParser(text, _DELEGATE))
    except (SyntaxError, tokenize.TokenError, StopIteration, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, tokenize.TokenError):
            why, number = error.args[0], error.args[1][0]
        else:
            why, number = getattr(error, "msg", None) or str(error) or "it ends too early", getattr(error, "lineno", 1)
        if "Failed to parse token" in why:
            why = f"{why.split()[-1]} is no value"
        number = min(max(number or 1, 1), len(lines))
        place = source if source in FLAGS else f"{source}:{number}"
        is_not = "is not a line 'Name.field = value'"
        if len(open_files) > 1:  # a config of somebody else may include a private file: its text is not shown
            raise UserError(f"{place}, which {open_files[-2]} includes, {is_not}; take the include line out") from None
        raise UserError(
            f"{place}: {lines[number - 1].strip()!r} {is_not} ({' '.join(why.split()).rstrip('.')}); text stands in "
            "quotes, a macro after %"
        ) from error
    found, known = [], bindable()
    defaults = RunConfig().by_name() if Path(source).name in OF_RUNS else {}  # what a run writes down, it marks if set
    for statement in statements:
        place = source if source in FLAGS else f"{source}:{statement.location.line_num}"
        match type(statement).__name__:
            case "IncludeStatement":
                found += _read_file(statement.filename, place, folders, open_files)
            case "ImportStatement":
                raise UserError(
                    f"{place}: {statement.format()!r} would run the code of a module, and no binding of a run needs "
                    "one; take the line out"
                )
            case "BindingStatement":
                name, field = statement.selector, statement.arg_name
                target = f"{name}.{field}" if field else name
                if statement.scope:
                    shown = "..." if len(open_files) > 1 else repr(statement.value)
                    raise UserError(
                        f"'{statement.scope}/{target}' has a scope ({statement.scope!r}), and no part of a run enters "
                        f"a scope; write {target} = {shown} ({place})"
                    )
                if target in RENAMED:
                    if not defaults:
                        raise UserError(f"{target} ({place}) is {RENAMED[target]} now")
                    if statement.value is None:
                        continue  # left to the default, which is a value now
                    target = RENAMED[target]
                    name, field = target.split(".")
                if target in REMOVED:
                    default, instead = REMOVED[target]
                    if repr(statement.value) == default:
                        continue
                    raise UserError(f"{target} ({place}) is no binding any more; {instead}")
                if field and name not in known:
                    near = _near(name.split(".")[-1], (*known, "TrainConfig"))
                    near = [f"{'train' if found == 'TrainConfig' else found}.{field}" for found in near]
                    hint = _did_you_mean(near, "options of a plugin need its --plugin; known names", known)
                    raise UserError(f"unknown name {name!r} in {target} ({place}); {hint}")
                if field and field not in known[name]:
                    near = [f"{other}.{field}" for other, fields in known.items() if field in fields]
                    near = near or [f"{name}.{found}" for found in _near(field, known[name])]
                    hint = _did_you_mean(near, "its fields are", sorted(known[name]))
                    raise UserError(f"{name} has no field {field!r} ({place}); {hint}")
                is_default = bool(field and defaults) and statement.value == getattr(defaults[name], field)
                is_default = is_default and not lines[statement.location.line_num - 1].endswith(BOUND)
                found.append(Binding(target, statement.value, place, is_default))
    return found


def _resolved(binding: Binding, macros: dict[str, Binding], inside: tuple[str, ...] = ()):
    """Return the value of a binding with its macros replaced, those of `inside` being replaced already."""
    value = binding.value
    if isinstance(value, (tuple, list)):
        return tuple(_resolved(dataclasses.replace(binding, value=entry), macros, inside) for entry in value)
    if not (isinstance(value, Reference) and value.startswith("%")):
        return value
    if value[1:] not in macros:
        near = [f"%{near}" for near in _near(value[1:], macros)]
        hint = _did_you_mean(near, "define it by a line", [f"{value[1:]} = ..."])
        raise UserError(f"{binding.target} ({binding.place}) uses the macro {value}, which is not defined; {hint}")
    if value in inside:
        chain = " -> ".join((*inside, value))
        raise UserError(f"{binding.target}: the macros {chain} lead back to themselves; give one of them a value")
    return _resolved(dataclasses.replace(binding, value=macros[value[1:]].value), macros, (*inside, value))


def fitted(target: str, annotation, value, place: str):
    """Return a value as a field annotated `annotation` holds it: a list for a tuple and an int for a float will do.

    Raises:
      UserError: the value does not fit; it names the binding, the value and what is expected.
    """
    fits, result = _fit(annotation, value)
    if fits:
        return result
    kinds = {bool: "a truth value", str: "text", float: "a number", tuple: "a tuple", dict: "a dict"}
    beyond = "beyond 64 bits" if type(value) is int and abs(value) >= 2**63 else ""
    kind = kinds.get(type(value), beyond)
    raise UserError(f"{target} ({value!r}{kind and f', {kind}'}) must be {_in_words(annotation)} ({place})")


def _fit(annotation, value) -> tuple[bool, object]:
    """Return (whether the value fits, the value in the annotated type)."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return next((found for found in (_fit(own, value) for own in arguments) if found[0]), (False, None))
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False, None
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(value)
        found = [_fit(own, entry) for own, entry in zip(arguments, value, strict=False)]
        return len(arguments) == len(value) and all(fits for fits, _ in found), tuple(entry for _, entry in found)
    if annotation is float and type(value) in (int, float):
        return abs(value) < 1e308, float(value) if abs(value) < 1e308 else None
    return type(value) is annotation and (annotation is not int or abs(value) < 2**63), value


def _in_words(annotation) -> str:
    """Return what a field of this type takes."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_in_words, arguments))
    if origin is tuple:
        size = "a tuple" if arguments[-1] is Ellipsis else f"a tuple of {len(arguments)} entries"
        return f"{size}, each {_in_words(arguments[0])}"
    return WORDS.get(annotation, "None")


def _near(word: str, candidates) -> list[str]:
    """Return the candidate that looks most like `word`, whatever its case, as a list of at most one."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    return [by_lower[near] for near in difflib.get_close_matches(word.lower(), by_lower, n=1)]


def _did_you_mean(near: list[str], otherwise: str, known) -> str:
    return f"did you mean {' or '.join(near)}?" if near else f"{otherwise}: {', '.join(known) or 'none'}"
