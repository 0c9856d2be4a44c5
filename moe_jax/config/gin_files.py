"""From gin files and bindings to one checked `RunConfig`. This is the only file that imports gin.

Inputs: names of gin files, binding strings, folders to search. Outputs: (RunConfig, its canonical text, gin's operative
text), or a UserError of one line. Files are read twice: first statement by statement with gin's own parser, so that
every mistake is named with its file and line, and what gin lets pass is caught (a mistyped macro, a scope that nothing
enters, a value of the wrong type, a file that includes itself, an `import`, which would run code); then gin gets the
same statements, flattened, for its operative config. gin is left as empty as a fresh process has it, so that a notebook
may parse again.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import os
import re
import tokenize
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_jax.config.run_config import BOUND, CONFIG_CLASSES, RunConfig, config_text
from moe_jax.config.values import fitted
from moe_jax.errors import UserError
from moe_jax.renames import BINDINGS as OLD_BINDINGS
from moe_jax.renames import REPLACED, binding_of_today, value_of_today

BINDINGS = "--gin_bindings"
MODULE = "moe_jax"


@dataclasses.dataclass(frozen=True)
class Macro:
    """A value `%name`; its repr is gin's way to write it, inside tuples and lists too."""

    name: str

    def __repr__(self):
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """A value `@name` or `@name()`, which no field of ours takes."""

    name: str
    evaluate: bool

    def __repr__(self):
        return f"@{self.name}{'()' if self.evaluate else ''}"


@dataclasses.dataclass(frozen=True)
class Statement:
    """One `key = value`.

    Attributes:
      scope: '' or what stands before the last slash.
      name: of a configurable, or of a macro where `field` is ''.
      field: of the configurable.
      value: as gin reads it, with `Macro` and `Reference` inside.
      place: 'file:line' or the flag.
      in_file: False for a statement from the command line.
      stored: a run wrote it, so its names and values may be those of an older version.
      marked: a run wrote it, and marked it as set by somebody; what it did not mark were defaults.
    """

    scope: str
    name: str
    field: str
    value: object
    place: str
    in_file: bool
    stored: bool = False
    marked: bool = False

    @property
    def key(self) -> str:
        return f"{self.scope}/{self.target}" if self.scope else self.target

    @property
    def target(self) -> str:
        return f"{self.name}.{self.field}" if self.field else self.name


def parse_run_config(
    gin_files: Sequence[str] = (), gin_bindings: Sequence[str] = (), search_paths: Sequence[str] = ()
) -> tuple[RunConfig, str, str]:
    """Read gin files, then bindings, which win.

    Args:
      gin_files: names of files; relative ones are looked for here, in `search_paths`, then beside the package.
      gin_bindings: lines `Name.field = value`.
      search_paths: folders, for `gin_files` and for `include` lines.

    Returns:
      the config, `config_text` of it with what was bound marked, and gin's operative config (what the program used,
      macros shown).

    Raises:
      UserError: whatever is wrong, in one line.
    """
    reader = _Reader(search_paths)
    for name in gin_files:
        reader.read_file(name, "--gin_file")
    reader.read_text("\n".join(gin_bindings), BINDINGS, in_file=False)
    macros = {s.name: s for s in reader.statements if not s.field}
    _check_names_are_of_today(reader.statements)
    for statement in reader.statements:
        _check_target(statement, macros)
    bindings = {s.target: s for s in reader.statements if s.field}
    _check_macros_are_used(reader.statements, macros)
    values: dict[str, dict] = {name: {} for name in CONFIG_CLASSES}
    for target, statement in list(bindings.items()):
        value = _resolve(statement.value, statement, macros, ())
        if (today := value_of_today(target, value)) != value:
            if statement.stored:
                value = today
                bindings[target] = dataclasses.replace(statement, value=today)
            elif target not in REPLACED:
                raise UserError(
                    f"{target}: {value!r} is called {today!r} now ({statement.place}); write {target} = {today!r}"
                )
        annotation = _annotations(statement.name)[statement.field]
        values[statement.name][statement.field] = fitted(statement.target, annotation, value, statement.place)
    run = RunConfig(**_build(values))
    used = {name for statement in bindings.values() for name in _macro_names(statement.value, macros)}
    lines = [f"{name} = {macros[name].value!r}" for name in sorted(used)]
    lines += [f"{MODULE}.{statement.target} = {statement.value!r}" for statement in bindings.values()]
    return run, config_text(run, _set_by_somebody(run, bindings)), _operative_text(lines)


def _set_by_somebody(run: RunConfig, bindings: dict[str, Statement]) -> set[str]:
    """Return the bindings that are not only there because a run writes down its defaults too."""
    now, defaults = run.by_name(), RunConfig().by_name()

    def is_set(s: Statement) -> bool:
        return not s.stored or s.marked or getattr(now[s.name], s.field) != getattr(defaults[s.name], s.field)

    return {target for target, statement in bindings.items() if is_set(statement)}


def _build(values: dict[str, dict]) -> dict:
    fields = [field.name for field in dataclasses.fields(RunConfig)]
    built = (cls(**values[name]) for name, cls in CONFIG_CLASSES.items())
    return dict(zip(fields, built, strict=True))


def _annotations(name: str) -> dict[str, object]:
    """Return field -> type of the config class that gin binds as `name`."""
    cls = CONFIG_CLASSES[name]
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


class _Delegate:
    """What gin's parser calls for `@name` and `%name`."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name):
        return Macro(macro_name)


class _Reader:
    """Collect the statements of files, of the files they include, and of the command line, in order."""

    def __init__(self, search_paths: Sequence[str]):
        root = Path(__file__).resolve().parents[2]
        beside = [str(root)] if (root / "configs").is_dir() else []
        self.folders = ["", *search_paths, *beside]
        self.statements: list[Statement] = []
        self.open_files: list[str] = []

    def read_file(self, name: str, place: str):
        """Read one file; `place` is where it was asked for."""
        path = self._find(name, place)
        real = os.path.realpath(path)
        if real in self.open_files:
            raise UserError(f"gin file {name!r} includes itself ({place}); take one of the include lines out")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UserError(f"gin file {name!r} cannot be read: {why} ({place}); name another file") from error
        self.open_files.append(real)
        self.read_text(text, name, in_file=True, stored=_is_of_a_run_folder(Path(path)))
        self.open_files.pop()

    def _find(self, name: str, place: str) -> str:
        folder, base = os.path.split(os.path.expanduser(name))
        near = None
        for root in self.folders:
            path = os.path.join(root, folder, base)
            if os.path.isfile(path):
                return path
            if os.path.isdir(path):
                raise UserError(f"gin file {name!r} is a folder ({place}); name a file in it")
            beside = os.path.join(root, folder) or "."
            near = near or (os.path.isdir(beside) and _closest(base, os.listdir(beside)))
        hint = f"did you mean {os.path.join(folder, near)!r}?" if near else "check the name, or add --gin_search_paths"
        raise UserError(f"gin file {name!r} does not exist ({place}); {hint}")

    def read_text(self, text: str, source: str, *, in_file: bool, stored: bool = False):
        """Read statements; `source` is the file's name or the flag, `stored` says that a run wrote them."""
        lines = text.splitlines()
        for kind, line, statement in _parse(text, source):
            place = f"{source}:{line}" if in_file else source
            if kind == "IncludeStatement":
                self.read_file(statement.filename, place)
            elif kind == "ImportStatement":
                raise UserError(
                    f"{place}: {statement.format()!r} would run the code of a module, and no binding of a run needs "
                    "one; take the line out"
                )
            elif kind == "BindingStatement":
                # a macro has no dot: gin reads it as a selector without an argument
                scope, name, field, value, _ = statement
                if stored and field:
                    name, field = binding_of_today(f"{name}.{field}").split(".")
                marked = stored and lines[line - 1].endswith(BOUND)
                self.statements.append(Statement(scope, name, field, value, place, in_file, stored, marked))


def _is_of_a_run_folder(path: Path) -> bool:
    """Say whether a run wrote the file: that is read whatever version wrote it; a user's own has today's names."""
    return path.name in ("config.gin", "operative_config.gin") and (path.parent / "environment.json").exists()


def _closest(word: str, candidates) -> str | None:
    """Return the candidate that looks most like `word`, whatever its case, or None."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def _parse(text: str, source: str) -> Iterator[tuple[str, int, typing.Any]]:
    """Yield (kind, line number, statement) as gin's parser sees them."""
    gin = _import_gin()
    lines = text.splitlines()

    def failed(what: str, line: int | None):
        number = min(max(line or 1, 1), max(len(lines), 1))
        shown = lines[number - 1].strip() if lines else ""
        place = f"{source}:{number}" if source != BINDINGS else source
        why = " ".join(what.split()).rstrip(".")
        return UserError(
            f"{place}: {shown!r} is not a line 'Name.field = value' ({why}); text stands in quotes, a macro after %"
        )

    if "\0" in text:  # Python's own tokenizer raises on it
        raise failed("it holds a NUL character", text[: text.index("\0")].count("\n") + 1)
    try:
        parser = gin.config_parser.ConfigParser(io.StringIO(text), _Delegate())
        while (statement := parser.parse_statement()) is not None:
            yield type(statement).__name__, statement.location.line_num, statement
    except SyntaxError as error:
        token = re.search(r"Failed to parse token (.+)", str(error.msg))
        what = f"{token.group(1)} is no value" if token else str(error.msg)
        raise failed(what, error.lineno) from error
    except tokenize.TokenError as error:
        raise failed(error.args[0], error.args[1][0]) from error
    except (StopIteration, ValueError, TypeError, RecursionError) as error:
        raise failed(str(error) or "it ends too early", None) from error


def _check_names_are_of_today(statements: list[Statement]):
    """Refuse old names, all of them in one line."""
    today = {}
    for statement in statements:
        if (target := binding_of_today(statement.target)) != statement.target:
            write = f"{target} = {value_of_today(target, statement.value)!r}"
            today[f"{statement.target} is called {target} now ({statement.place})"] = write
    if today:
        raise UserError(f"{', '.join(today)}; write {', '.join(today.values())}")


def _check_target(statement: Statement, macros: dict[str, Statement]):
    """Refuse a scope, an unknown configurable and an unknown field."""
    if statement.scope:
        raise UserError(
            f"{statement.key!r} has a scope ({statement.scope!r}), and no part of a run enters a scope; write "
            f"{statement.target} = {statement.value!r} ({statement.place})"
        )
    if not statement.field:
        return
    name, field = statement.name, statement.field
    if name not in CONFIG_CLASSES:
        aliases = {alias: known for known, cls in CONFIG_CLASSES.items() for alias in (known, cls.__name__)}
        near = _closest(name.split(".")[-1], aliases)
        known = f"known names: {', '.join(CONFIG_CLASSES)}"
        hint = f"did you mean {binding_of_today(f'{aliases[near]}.{field}')}?" if near else known
        raise UserError(f"unknown name {name!r} in {statement.target} ({statement.place}); {hint}")
    fields = _annotations(name)
    if field in fields:
        return
    raise UserError(f"{name} has no field {field!r} ({statement.place}); {_field_hint(name, field)}")


def _field_hint(name: str, field: str) -> str:
    """Return what the user may have meant by `name.field`."""
    fields = _annotations(name)
    elsewhere = [f"{other}.{field}" for other in CONFIG_CLASSES if field in _annotations(other)]
    elsewhere += _today_of_field(field)
    near = _closest(field, fields)
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    if near:
        return f"did you mean {name}.{near}?"
    return f"its fields are {', '.join(sorted(fields))}"


def _today_of_field(field: str) -> list[str]:
    """Return today's bindings of those whose field an older version called `field`."""
    return [today for old, today in OLD_BINDINGS.items() if old.partition(".")[2] == field]


def _check_macros_are_used(statements: list[Statement], macros: dict[str, Statement]):
    """Refuse a macro that stands on the command line alone: it is a mistyped macro or a binding without its class."""
    used = {name for statement in statements for name in _macro_names(statement.value)}
    in_files = {statement.name for statement in statements if not statement.field and statement.in_file}
    for statement in macros.values():
        if statement.name in used | in_files:
            continue
        near = [name for name in (_closest(statement.name, used | in_files),) if name]
        near += [f"{name}.{statement.name}" for name in CONFIG_CLASSES if statement.name in _annotations(name)]
        near += _today_of_field(statement.name)
        known = ", ".join(sorted(in_files)) or "none"
        hint = f"did you mean {' or '.join(near)}?" if near else f"macros of the files: {known}"
        raise UserError(
            f"{statement.place} sets the macro {statement.name!r}, which no gin file defines and nothing uses; {hint}"
        )


def _macro_names(value, macros: dict[str, Statement] | None = None) -> Iterator[str]:
    """Yield the macros in a value; with `macros`, which have no cycle, those that they lead to as well."""
    if isinstance(value, Macro):
        yield value.name
        if macros:
            yield from _macro_names(macros[value.name].value, macros)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _macro_names(entry, macros)


def _resolve(value, statement: Statement, macros: dict[str, Statement], open_macros: tuple[str, ...]):
    """Return a value with its macros replaced."""
    if isinstance(value, (tuple, list)):
        return type(value)(_resolve(entry, statement, macros, open_macros) for entry in value)
    if not isinstance(value, Macro):
        return value
    if value.name not in macros:
        near = _closest(value.name, macros)
        hint = f"did you mean %{near}?" if near else f"define it by a line {value.name} = ..."
        where = f"{statement.target} ({statement.place})"
        raise UserError(f"{where} uses the macro %{value.name}, which is not defined; {hint}")
    if value.name in open_macros:
        chain = " -> ".join(f"%{name}" for name in (*open_macros, value.name))
        raise UserError(f"{statement.target}: the macros {chain} lead back to themselves; give one of them a value")
    return _resolve(macros[value.name].value, statement, macros, (*open_macros, value.name))


def _import_gin():
    try:
        import gin
        import gin.config
        import gin.config_parser
    except ModuleNotFoundError as error:
        raise UserError(
            "reading a gin config needs the package gin-config, which is not installed; run pip install gin-config"
        ) from error
    return gin


def _operative_text(lines: list[str]) -> str:
    """Return gin's operative config of a run with these statements, and leave gin empty."""
    gin = _import_gin()
    gin.clear_config()
    try:
        with gin.config.interactive_mode():  # a reloaded module may register again
            for name, cls in CONFIG_CLASSES.items():
                gin.external_configurable(cls, name=name, module=MODULE)
        gin.parse_config_files_and_bindings([], lines, finalize_config=True, skip_unknown=False)
        for name in CONFIG_CLASSES:
            gin.get_configurable(f"{MODULE}.{name}")()
        return gin.operative_config_str()
    finally:
        gin.clear_config()
