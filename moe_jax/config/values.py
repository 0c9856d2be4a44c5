"""Check that a value fits the annotation of the config field that it is bound to.

Inputs: a binding's name, the field's annotation and a value, as gin read it. Outputs: the value in the type of the
field (a list for a tuple and an int for a float are accepted), or a UserError that names the binding, the value, what
is expected and an example. gin itself binds anything to anything. Host side.
"""

from __future__ import annotations

import math
import types
import typing

from moe_jax.errors import UserError

MISFIT = object()
EXPECTED = {
    bool: ("True or False", "True"),
    int: ("a whole number", "8"),
    float: ("a finite number", "0.5"),
    str: ("text in quotes", "'text'"),
    type(None): ("None", "None"),
}


def fitted(binding: str, annotation, value, place: str):
    """Return `value` as a field annotated `annotation` holds it.

    Args:
      binding: 'Name.field', for the message.
      annotation: a type of `EXPECTED`, a union of them, or a tuple of them.
      value: as bound.
      place: where it is bound, for the message.

    Raises:
      UserError: if the value does not fit.
    """
    result = _fit(annotation, value)
    if result is not MISFIT:
        return result
    words, example = _describe(annotation)
    shown = f"{value!r}, {_kind(value)}" if _kind(value) else f"{value!r}"
    raise UserError(f"{binding} ({shown}) must be {words}, such as {binding} = {example} ({place})")


def _fit(annotation, value):
    """Return the value in the annotated type, or MISFIT."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        results = (_fit(argument, value) for argument in arguments)
        return next((result for result in results if result is not MISFIT), MISFIT)
    if origin is tuple:
        return _fit_tuple(arguments, value)
    if annotation is float:
        if type(value) not in (int, float):
            return MISFIT
        try:
            number = float(value)
        except OverflowError:
            return MISFIT
        return number if math.isfinite(number) else MISFIT
    if annotation not in EXPECTED:
        raise AssertionError(f"config fields are plain values; {annotation} has no check yet")
    return value if type(value) is annotation else MISFIT


def _fit_tuple(arguments, value):
    if not isinstance(value, (tuple, list)):
        return MISFIT
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(value) != len(arguments):
        return MISFIT
    fits = tuple(_fit(argument, entry) for argument, entry in zip(arguments, value, strict=True))
    return MISFIT if MISFIT in fits else fits


def _describe(annotation) -> tuple[str, str]:
    """Return the annotation in words, and an example."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [_describe(argument) for argument in arguments]
        return " or ".join(words for words, _ in parts), parts[0][1]
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            words, example = _describe(arguments[0])
            return f"a tuple, each entry {words}", f"({example},)"
        words, example = _describe(arguments[0])
        examples = [str(8 + i) if argument is int else example for i, argument in enumerate(arguments)]
        return f"a tuple of {len(arguments)} entries, each {words}", f"({', '.join(examples)})"
    return EXPECTED[annotation]


def _kind(value) -> str:
    """Return the word for a value's type, where the type is the mistake."""
    words = {bool: "a truth value", str: "text", float: "a number", tuple: "a tuple", list: "a list", dict: "a dict"}
    return words.get(type(value), "")
