"""Defaults of options from outside the command line: environment variables, a project's `chai.toml`, the user's own file."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from chai_cli.errors import ChaiError

PROJECT = "chai.toml"
PREFIX = "CHAI_"
TOLD = "CHAI_RUN_"  # what a notify command is told
NEVER = {"help", "version", "install-completion", "show-completion"}
PATHS = {"out", "cache", "thumbnail", "compare"}  # what else may be a path is one where it is . or .. or begins so
OWN = {"notify"}  # runs a command: not from a file that may have come with somebody else's project
ONCE = {"overwrite", "yes", "repair", "budget"}  # removes things: for the command that it is given to, and no other


@dataclass(frozen=True)
class Setting:
    """An option that is not left at its default.

    Attributes:
        command: As typed, such as `cache warm`.
        option: Its longest name, without dashes in front.
        name: Of the parameter.
        source: The variable or the file that it is from.
    """

    command: str
    option: str
    name: str
    value: Any
    source: str


def project_file() -> Path | None:
    """The `chai.toml` of this folder, or of the nearest one above it that has one."""
    here = Path.cwd()
    return next((folder / PROJECT for folder in (here, *here.parents) if (folder / PROJECT).is_file()), None)


def user_file() -> Path:
    from platformdirs import user_config_path

    return user_config_path("chai") / "config.toml"


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, by its words."""
    if hasattr(group, "commands"):
        for name, command in group.commands.items():
            yield from commands(command, (*path, name))
    else:
        yield path, group


def options(command: Any) -> dict[str, Any]:
    """The options of a command by each of their long names; the first of them names it."""
    found: dict[str, Any] = {}
    for param in command.params:
        if param.param_type_name == "option":
            names = (name for name in (*param.opts, *param.secondary_opts) if name.startswith("--"))
            found |= {name[2:]: param for name in names if name[2:] not in NEVER}
    return found


def longest(param: Any) -> str:
    return next(name[2:] for name in param.opts if name.startswith("--"))


def collect(app: Any) -> list[Setting]:
    """All settings, each from the source that counts most: the environment, then the project's file, then the user's.

    Raises:
        ChaiError: a file cannot be read, or names what there is not, or a value that the option cannot have.
    """
    made: dict[tuple[str, str], Setting] = {}
    known = dict(commands(app))
    for file in (user_file(), project_file()):
        if file and file.is_file():
            for setting in from_file(file, known):
                made[setting.command, setting.name] = setting
    for path, command in known.items():
        for name, param in options(command).items():
            variable = PREFIX + name.upper().replace("-", "_")
            if os.environ.get(variable):
                if longest(param) in ONCE:
                    raise ChaiError(f"{variable} would be for every command; give --{longest(param)} to the one that is meant")
                told = placed(param, inverted(param, name, os.environ[variable]), None)
                value = checked(command, param, told, variable)
                made[" ".join(path), str(param.name)] = Setting(
                    " ".join(path), longest(param), str(param.name), value, variable
                )
    return list(made.values())


def unknown_variables(app: Any) -> list[str]:
    """What is wrong with variables that look like ours and are not."""
    known = {PREFIX + name.upper().replace("-", "_") for _, command in commands(app) for name in options(command)}
    odd = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known and not name.startswith(TOLD))
    near = {name: difflib.get_close_matches(name, known, 1) for name in odd}
    return [f"{name} is no option of chai" + (f"; did you mean {near[name][0]}?" if near[name] else "") for name in odd]


def from_file(file: Path, known: Mapping[tuple[str, ...], Any]) -> Iterator[Setting]:
    """Settings of one file: keys at its top are for every command that has such an option, tables for one command."""
    try:
        told = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ChaiError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ChaiError(f"{file} is no TOML: {error}") from None
    everywhere = {name for command in known.values() for name in options(command)}
    tables = {key: value for key, value in told.items() if isinstance(value, dict)}
    for key, value in told.items():
        if key in tables:
            continue
        if spelled(key) not in everywhere:
            raise ChaiError(f"{file}: {no_such(key, everywhere, 'no command has an option')}")
        if spelled(key) in ONCE:
            raise ChaiError(f"{file}: {key} would be for every command; put it under the one that is meant, such as [gen]")
        for path, command in known.items():
            if param := options(command).get(spelled(key)):
                yield setting(file, path, command, param, inverted(param, spelled(key), value))
    for key, table in tables.items():  # after those at the top: what comes later counts
        yield from of_table(file, (key,), table, known)


def of_table(
    file: Path, path: tuple[str, ...], table: Mapping[str, Any], known: Mapping[tuple[str, ...], Any]
) -> Iterator[Setting]:
    """Settings of a table for one command, or for all that begin with its words; those of inner tables come later and count."""
    within = {words: command for words, command in known.items() if words[: len(path)] == path}
    if not within:
        raise ChaiError(f"{file}: {no_such('.'.join(path), {'.'.join(words) for words in known}, 'there is no command')}")
    has = {name for command in within.values() for name in options(command)}
    for key, value in table.items():
        if isinstance(value, dict):
            continue
        name = spelled(key)
        if name not in has:
            what = f"{' '.join(path)} has no option"
            raise ChaiError(f"{file}: {no_such(key, has, what)}")
        if len(within) > 1 and name in ONCE:
            raise ChaiError(f"{file}: {key} would be for every {' '.join(path)} command; put it under the one that is meant")
        for words, command in within.items():
            if param := options(command).get(name):
                yield setting(file, words, command, param, inverted(param, name, value))
    for key, value in table.items():
        if isinstance(value, dict):
            yield from of_table(file, (*path, key), value, known)


def setting(file: Path, path: tuple[str, ...], command: Any, param: Any, value: Any) -> Setting:
    if longest(param) in OWN and file.name == PROJECT:
        raise ChaiError(f"{file}: {longest(param)} runs a command and may not come from a project; put it into {user_file()}")
    value = placed(param, value, file.parent if file.name == PROJECT else None)
    made = checked(command, param, value, f"{file}: {longest(param)}")
    return Setting(" ".join(path), longest(param), str(param.name), made, str(file))


def placed(param: Any, value: Any, folder: Path | None) -> Any:
    """Paths of a project count from its folder, wherever below it the command runs; so does what begins with `./` or `../`.

    Args:
        folder: The project's; None for other sources, whose paths count from where the command runs.
    """
    if isinstance(value, list):
        return [placed(param, one, folder) for one in value]
    if not isinstance(value, str) or not value:
        return value
    is_path = longest(param) in PATHS or value.startswith(("~", "./", "../")) or value in (".", "..")
    if is_path and value.startswith("~"):
        return os.path.expanduser(value)
    return os.path.normpath(folder / value) if is_path and folder else value


def inverted(param: Any, name: str, value: Any) -> Any:
    """A value given to the `--no-…` name of a flag is turned round."""
    if f"--{name}" not in param.secondary_opts:
        return value
    return str(value).strip().lower() in ("0", "false", "no", "off", "n", "f")


def spelled(key: str) -> str:
    return key.replace("_", "-")


def no_such(key: str, known: set[str], what: str) -> str:
    near = difflib.get_close_matches(spelled(key), known, 1)
    return f"{what} {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def checked(command: Any, param: Any, value: Any, where: str) -> Any:
    """A value that the option can have, as the command line would take it.

    Raises:
        ChaiError: it cannot.
    """
    several = param.multiple or param.nargs != 1
    if several:
        listed = value if isinstance(value, list) else value.split() if where.startswith(PREFIX) else [value]
        given: Any = [str(one) for one in listed]
    elif isinstance(value, (list, dict)):
        raise ChaiError(f"{where} is one value, not {value!r}")
    else:
        given = str(value).lower() if isinstance(value, bool) else str(value)
    try:
        param.process_value(typer.Context(command), given)
    except typer.BadParameter as error:
        said = error.message.removeprefix("Value error, ").rstrip(".")
        raise ChaiError(f"{where} is {' '.join(given) if several else given!r}: {said}") from None
    return given


def default_map(settings: list[Setting]) -> dict[str, Any]:
    """As click takes it: by command, then by parameter."""
    made: dict[str, Any] = {}
    for one in settings:
        place = made
        for word in one.command.split():
            place = place.setdefault(word, {})
        place[one.name] = one.value
    return made
