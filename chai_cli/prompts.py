"""Prompt files: `.txt`, `.jsonl`, `.csv` or standard input, into requests."""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from chai_cli.errors import ChaiError

SLUG_LENGTH = 60
SLUG_BYTES = 150


@dataclass(frozen=True)
class Settings:
    """What a prompt may override. `None` leaves the choice to the model.

    Sizes are in pixels, `fps` in frames a second; `num_frames` counts pixel frames.
    """

    negative_prompt: str = ""
    seed: int = 0
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    aesthetic_score: float | None = None


@dataclass(frozen=True)
class Request:
    """One prompt to render. `index` is its place among the prompts of the file, `line` its line, both from 1."""

    index: int
    line: int
    prompt: str
    settings: Settings
    id: str | None = None

    @property
    def name(self) -> str:
        """The stem of its files: stable under re-runs, unique in the file, safe on every file system."""
        return f"{self.index:04d}-{slug(self.id or self.prompt)}"

    def wanted(self) -> dict[str, Any]:
        """All that decides how the video looks, apart from the model and the method."""
        return {"prompt": self.prompt, **asdict(self.settings)}


@dataclass(frozen=True)
class BadLine:
    """A line of the prompt file that is not a prompt, and why. It keeps its index, so that the others keep their names."""

    index: int
    line: int
    text: str
    why: str


OVERRIDES: dict[str, Callable[[Any], Any]] = {
    "negative_prompt": str,
    "seed": int,
    "height": int,
    "width": int,
    "num_frames": int,
    "fps": int,
    "num_inference_steps": int,
    "guidance_scale": float,
    "aesthetic_score": float,
}
LIMITS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    "height": (16, 16384),
    "width": (16, 16384),
    "num_frames": (1, 100_000),
    "fps": (1, 240),
    "num_inference_steps": (1, 1000),
    "guidance_scale": (0, 100),
    "aesthetic_score": (0, 10),
}
FIELDS = ("prompt", "id", *OVERRIDES)
assert set(OVERRIDES) == {field.name for field in fields(Settings)}


def slug(text: str) -> str:
    """Letters, digits and dashes of a text, lower case, at most 60 characters; `prompt` if nothing is left."""
    plain = unicodedata.normalize("NFKC", text).lower()
    words = re.findall(r"[^\W_]+", plain)
    joined = ""
    for word in words:
        longer = f"{joined}-{word}" if joined else word
        if len(longer) > SLUG_LENGTH:
            break
        joined = longer
    joined = joined or (words[0][:SLUG_LENGTH] if words else "")
    while len(joined.encode("utf-8", "ignore")) > SLUG_BYTES:
        joined = joined[:-1]
    return joined or "prompt"


def check(name: str, value: Any) -> Any:
    """An override as its type, within its limits.

    Raises:
        ValueError: with a sentence for the user.
    """
    kind = OVERRIDES[name]
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, not {value!r}")
        return value
    number = to_number(kind, value)
    if number is None:
        raise ValueError(f"{name} must be {'a whole number' if kind is int else 'a number'}, not {value!r}")
    low, high = LIMITS[name]
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low} and {high}, not {value!r}")
    return number


def to_number(kind: Callable[[Any], Any], value: Any) -> Any:
    """A JSON number or the text of one as `kind`, or None: no booleans, no infinities, no halves for whole numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if kind is int and not isinstance(value, float):
        try:
            return int(value)
        except ValueError:
            pass
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        return None
    return kind(number)


def overridden(row: dict[str, Any], settings: Settings) -> Settings:
    """Settings with a row's own values on top; empty cells count as absent."""
    given = {name: check(name, row[name]) for name in OVERRIDES if row.get(name) not in (None, "")}
    return replace(settings, **given)


def read_text(source: str) -> tuple[str, str]:
    """The text of a prompt file and its kind (`.txt`, `.jsonl`, `.csv`); `-` is standard input, of the kind it looks like."""
    if source == "-":
        raw, kind = sys.stdin.buffer.read(), ""
    else:
        path = Path(source)
        kind = path.suffix.lower()
        if kind == ".json":
            raise ChaiError(f"{source}: JSON goes one object a line, in a file named .jsonl")
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise ChaiError(
                f"there is no prompt file {source}; give a .txt, .jsonl or .csv file, or - for standard input"
            ) from None
        except IsADirectoryError:
            raise ChaiError(f"{source} is a folder; give a .txt, .jsonl or .csv file of prompts") from None
        except OSError as error:
            raise ChaiError(f"cannot read {source}: {error.strerror or error}") from None
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = raw.decode("utf-16", "replace")
    else:
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise ChaiError(f"{source} is not UTF-8 text (line {line}); save it as UTF-8 and try again") from None
    if not kind:
        kind = ".jsonl" if text.lstrip().startswith("{") else ".txt"
    return text, kind


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines, whatever ends them (\\n, \\r\\n or \\r)."""
    yield from enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1)


def rows_of(text: str, kind: str) -> Iterator[tuple[int, str, dict[str, Any] | str]]:
    """Line number, source text, and either the row or what is wrong with it."""
    if kind == ".jsonl":
        for number, line in lines_of(text):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, line, f"not JSON ({error})"
                continue
            if isinstance(row, str):
                row = {"prompt": row}
            yield number, line, row if isinstance(row, dict) else "a line must be a JSON object with a prompt"
    elif kind == ".csv":
        csv.field_size_limit(2**31 - 1)
        reader = csv.DictReader(io.StringIO(text.replace("\0", "\ufffd"), newline=""), restkey="…")
        try:
            header = [name.strip() for name in reader.fieldnames or []]
            if header and "prompt" not in header:
                raise ChaiError(f"the csv file has no column named prompt; its columns are {', '.join(header)}")
            strange = [name for name in header if name and name not in FIELDS]
            if strange:
                raise ChaiError(
                    f"the csv file has a column {strange[0]!r} that chai does not know; it knows {', '.join(FIELDS)}"
                )
            reader.fieldnames = header
            for row in reader:
                if any(row.values()):
                    extra = "…" in row
                    yield reader.line_num, str(row.get("prompt")), "more cells than columns" if extra else row
        except csv.Error as error:
            yield reader.line_num, "", f"not csv ({error})"
    else:
        for number, line in lines_of(text):
            if line.strip() and not line.lstrip().startswith("#"):
                yield number, line, {"prompt": line}


def read_prompts(source: str, settings: Settings) -> tuple[list[Request], list[BadLine]]:
    """Read a prompt file.

    Args:
        source: A path, or `-` for standard input.
        settings: What holds for prompts that say nothing else.

    Returns:
        The requests, and the lines that are none.

    Raises:
        ChaiError: the file as a whole cannot be read.
    """
    text, kind = read_text(source)
    requests: list[Request] = []
    bad: list[BadLine] = []
    for index, (line, source_text, row) in enumerate(rows_of(text, kind), 1):
        if isinstance(row, str):
            bad.append(BadLine(index, line, source_text[:200], row))
            continue
        try:
            requests.append(to_request(index, line, row, settings))
        except ValueError as error:
            bad.append(BadLine(index, line, source_text[:200], str(error)))
    return requests, bad


def to_request(index: int, line: int, row: dict[str, Any], settings: Settings) -> Request:
    prompt, unknown = row.get("prompt"), [str(name) for name in row if name not in FIELDS]
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"prompt must be text, not {prompt!r}")
    if not prompt or not prompt.strip():
        raise ValueError("no prompt in this line" + (f", but an unknown field {unknown[0]!r}" if unknown else ""))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known fields are {', '.join(FIELDS)}")
    name = row.get("id")
    clean = prompt.strip().encode("utf-8", "replace").decode("utf-8")
    return Request(index, line, clean, overridden(row, settings), None if name in (None, "") else str(name))
