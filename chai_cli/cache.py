"""What every command knows of the cache without opening it: where it is, how sizes are written, what a row of its log says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from chai_cli.errors import ChaiError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(slots=True)  # not frozen: thousands are read at a time
class Event:
    """One row of the store's log.

    Attributes:
        time: Seconds since the epoch.
        kind: `hit` or `miss`.
        size: Height, width (pixels) and frames.
        donor, donor_prompt: Of a hit: the entry and its prompt.
        seconds: The whole render.
        saved: Seconds saved against the median dense render.
        calls, calls_saved: Transformer forwards.
    """

    time: float
    kind: str
    model: str
    size: tuple[int, int, int]
    prompt: str
    donor: str = ""
    donor_prompt: str = ""
    why: str = ""
    seconds: float = 0.0
    saved: float = 0.0
    steps: int = 0
    calls: int = 0
    calls_saved: int = 0

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Event:
        """A row as it was written, by this version or another: unknown keys are ignored, missing ones take their defaults."""
        given = {**NEEDED, **{name: row[name] for name in KNOWN & row.keys()}}
        given["size"] = tuple(given["size"])
        return cls(**given)


KNOWN = {field.name for field in fields(Event)}
NEEDED: dict[str, Any] = {"time": 0.0, "kind": "", "model": "", "size": (0, 0, 0), "prompt": ""}


FIRST_ESTIMATE = ("estimate0",)  # the latents of an entry that a hit of `correction` leaves behind: no full render


def default_cache() -> Path:
    """`CHAI_CACHE`, or a folder in the user's cache directory."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("CHAI_CACHE") or Path(user_cache_dir("chai")) / "latents").expanduser()


def folder(given: Path | None) -> Path:
    """The cache that a command line names, or the default one."""
    return given.expanduser() if given else default_cache()


def parse_bytes(text: str) -> int:
    """`1GB`, `500MiB`, `2e9` in bytes.

    Raises:
        ChaiError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise ChaiError(f"{text!r} is no size in bytes; write it as 500MB, 1.5GB or 2GiB")
    return size


def format_bytes(size: int) -> str:
    """Bytes as a person reads them, in decimal units."""
    amount, unit = float(size), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
