"""Methods: what happens around each step of a render. One file and one entry here for each."""

from __future__ import annotations

import importlib
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from chai_cli.errors import ChaiError
from chai_cli.reuse.base import Reuse

DENSE = "dense"  # reuses nothing
SECOND = "chai"  # the only method that another can go before: it does not say where to start
# The class of a method's options, imported when it is asked for.
METHODS = {
    "chai": "chai_cli.reuse.cache_attention:CacheAttentionOptions",
    "nirvana": "chai_cli.reuse.trajectory:TrajectoryOptions",
    "correction": "chai_cli.reuse.correction:CorrectionOptions",
}


def names() -> list[str]:
    """All that a method may be called."""
    return [*METHODS, f"nirvana+{SECOND}", DENSE]


def reuse_of(spec: str, given: Mapping[str, Any] | None = None, called: Mapping[str, str] | None = None) -> Reuse | None:
    """A method with its options; None for `dense`.

    Args:
        spec: A name, `chai`, or with options behind a colon, `chai:match=sigma,steps=1/2/3`; `nirvana+chai` starts as the first
            says and attends as the second does. An option goes to those that have it.
        given: More options, by name; None stands for one that was not given.
        called: What the user calls some of these, where it is not `--` and their name.

    Raises:
        ChaiError: no such method or option, or a value that it cannot have.
    """
    named, _, told = spec.partition(":")
    parts = named.split("+")
    for name in parts:
        if name not in METHODS and named != DENSE:
            raise ChaiError(f"no method named {name!r}; there is {', '.join(names())}")
    written = [part.partition("=") for part in told.split(",") if part]
    options = {key.strip().replace("-", "_"): value.strip() for key, _, value in written}
    typed = set(options)
    options |= {key: value for key, value in (given or {}).items() if value is not None and key not in options}
    kinds = [] if named == DENSE else [options_class(name) for name in parts]
    taken = {field.name for kind in kinds for field in fields(kind)}
    for key in options:
        if key not in taken:
            has = f"; it has {', '.join(sorted(taken)).replace('_', '-')}" if taken else ""
            other = [name for name in METHODS if name not in parts and key in named_fields(options_class(name))]
            where = f"; --method {' or '.join(other)} has one" if other else ""
            flag = (called or {}).get(key, f"--{key.replace('_', '-')}")
            what = repr(key.replace("_", "-")) if key in typed else flag
            raise ChaiError(f"{named} has no option {what}{where}{has}")
    made = [kind(**{key: converted(kind, key, options[key]) for key in named_fields(kind) & options.keys()}) for kind in kinds]
    if len(made) > 1 and (len(made) > 2 or parts[0] == SECOND or parts[1] != SECOND):
        raise ChaiError(f"{named} is no method: two go together as one that says where to start and {SECOND}, nirvana+{SECOND}")
    if len(made) == 2:
        from chai_cli.reuse.joint import JointOptions

        return JointOptions(*made)
    return made[0] if made else None


def options_class(name: str) -> Any:
    module, kind = METHODS[name].split(":")
    return getattr(importlib.import_module(module), kind)


def named_fields(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def converted(kind: Any, key: str, value: Any) -> Any:
    """A value in words as the kind that the option has."""
    if not isinstance(value, str):
        return value
    hint = typing.get_type_hints(kind)[key]
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    try:
        if typing.get_origin(hint) is tuple:
            return tuple(sorted({int(part) for part in value.split("/")}))
        return hint(value)
    except ValueError:
        wanted = (
            "whole numbers such as 2/3/4" if typing.get_origin(hint) is tuple else {int: "a whole number"}.get(hint, "a number")
        )
        raise ChaiError(f"{key} must be {wanted}, not {value!r}") from None
