"""Report rows: appended to `report.jsonl` as they happen, and the table at the end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One prompt's outcome.

    Attributes:
        status: `done`, `skipped` (already there), or `failed`.
        why: The reason of a failure, of a miss, or of the choice of a donor.
        bytes: Size of the file: one that was cut off since is rendered again.
        reuse: `hit` or `miss`; `none` for methods that reuse nothing.
        donor, donor_prompt: The cache entry that was reused, and its prompt.
        similarity: Cosine of the whole prompts.
        shared: Entities of the prompt with those of the donor that they were found to be, and the similarity of each.
        calls_saved, seconds_saved: Of a hit, against dense renders of the same size.
        not_stored: Why a dense render was not kept as a donor.
        seconds: By part: text, retrieval, denoise, decode, write, total.
        tokens_cut: Tokens at the end of the prompt that the model has no room for.
        request: What was asked, model and method included: a later run compares it.
    """

    id: str
    index: int
    prompt: str
    status: str
    file: str = ""
    bytes: int = 0
    why: str = ""
    reuse: str = "none"
    donor: str = ""
    donor_prompt: str = ""
    similarity: float = 0.0
    shared: list[dict[str, Any]] = field(default_factory=list)
    calls_saved: int = 0
    seconds_saved: float = 0.0
    not_stored: str = ""
    seed: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    steps: int = 0
    model_calls: int = 0
    method: str = ""
    model: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_mib: float = 0.0
    tokens_cut: int = 0
    unknown_words: list[str] = field(default_factory=list)
    request: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def json(self) -> str:
        return json.dumps(asdict(self))


class Report:
    """`report.jsonl` of one output folder. A line torn by a kill is dropped before the next is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = {row["file"]: row for row in read_rows(path) if row.get("status") == "done"}

    def finished(self, file: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """The row of an earlier run that rendered exactly this request into this file, if the file is still as long."""
        row, path = self.last.get(file), self.path.parent / file
        same = row and alike(row.get("request"), request) and path.is_file() and path.stat().st_size == row.get("bytes")
        return row if same else None

    def append(self, row: Row) -> None:
        with self.path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write(row.json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if row.status == "done":
            self.last[row.file] = asdict(row)


def alike(one: Any, other: dict[str, Any]) -> bool:
    """Whether two requests ask for the same video: where the weights are known it does not matter what the model is called."""
    if not isinstance(one, dict):
        return False
    if other.get("weights"):
        one = {**one, "model": other.get("model")}
    return bool(one == other)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a report; a missing file has none."""
    rows = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("file"), str):
            rows.append(row)
    return rows


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def clip_text(text: str, length: int = 48) -> str:
    plain = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * length]).split())
    return plain if len(plain) <= length and len(text) <= 4 * length else plain[: length - 1] + "…"


def table(rows: Iterable[Row], shown: int = 40) -> Table:
    """A rich table of the run: what was rendered or failed (the last `shown` of them), and totals."""
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    told = [row for row in rows if row.status != "skipped"]
    made = Table(title=None, show_lines=False, expand=False)
    made.add_column("#", justify="right")
    made.add_column("prompt", overflow="ellipsis", no_wrap=True, max_width=44)
    parts = {"retrieval": "retrieve", "denoise": "denoise", "decode": "decode", "total": "total s"}
    if not any(row.seconds.get("retrieval") for row in told):
        del parts["retrieval"]
    for heading in ("size", "steps", "calls", *parts.values(), "saved s"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("outcome", overflow="fold")
    for row in told[-shown:]:
        size = f"{row.width}x{row.height}x{row.num_frames}" if row.width else ""
        times = [f"{row.seconds[key]:.2f}" if key in row.seconds else "" for key in parts]
        saved = f"{row.seconds_saved:.2f}" if row.reuse == "hit" else ""
        cells = [str(row.index), clip_text(row.prompt), size, str(row.steps or ""), str(row.model_calls or "")]
        cells += [*times, saved, outcome(row)]
        made.add_row(*(Text(cell) for cell in cells))
    if len(told) > shown:
        made.caption = f"the last {shown} of {len(told)} rows; all are in report.jsonl"
    return made


def outcome(row: Row) -> str:
    """What became of a prompt: a hit with its donor and what they share, a miss, or why it failed."""
    if row.status != "done":
        return f"{row.status}: {clip_text(row.why, 120)}"
    if row.reuse == "hit" and not row.donor:
        return f"hit: {row.why}"
    if row.reuse == "hit":
        pairs = [
            f"{pair['entity']} {pair['similarity']:.2f}"
            if pair["entity"] == pair["donor_entity"]
            else f"{pair['entity']} ~ {pair['donor_entity']} {pair['similarity']:.2f}"
            for pair in row.shared
        ]
        return f"hit: {clip_text(row.donor_prompt, 60)} ({', '.join(pairs) or f'prompt {row.similarity:.2f}'})"
    if row.reuse == "miss":
        stored = f"; not stored: {clip_text(row.not_stored, 120)}" if row.not_stored else ""
        return f"miss: {clip_text(row.why, 80)}{stored}"
    return row.status if not row.why else f"{row.status}: {clip_text(row.why, 80)}"


def gains(rows: Iterable[Row]) -> str:
    """One line about what reuse bought, against the median miss of the same size; empty where nothing was looked up.

    The overall figure compares the time of all renders with what they would have taken densely.
    """
    looked = [row for row in rows if row.status == "done" and row.reuse in ("hit", "miss")]
    hits = [row for row in looked if row.reuse == "hit"]
    if not looked:
        return ""
    line = f"{len(hits)} of {len(looked)} hits"
    if hits:
        took = sum(row.seconds["total"] for row in hits)
        dense = took + sum(row.seconds_saved for row in hits)
        rest = sum(row.seconds["total"] for row in looked if row.reuse == "miss")
        line += f", {dense / took:.1f}x on hits, {(dense + rest) / (took + rest):.1f}x overall"
        line += f", {sum(row.calls_saved for row in hits)} model calls and {dense - took:.1f} s saved"
    unstored = [row for row in looked if row.not_stored]
    if unstored:
        line += f"; {len(unstored)} not stored: {unstored[-1].not_stored}"
    return line


def summary(rows: Iterable[Row], wall: float) -> str:
    """One line of totals and percentiles."""
    import statistics

    rows = list(rows)
    done = [row.seconds["total"] for row in rows if row.status == "done"]
    counts = {status: sum(row.status == status for row in rows) for status in ("done", "skipped", "failed")}
    parts = [f"{counts['done']} rendered"]
    parts += [f"{counts[status]} {status}" for status in ("skipped", "failed") if counts[status]]
    parts.append(f"{wall:.1f} s in all")
    if done:
        parts.append(f"per video median {statistics.median(done):.2f} s, p90 {percentile(done, 0.9):.2f} s")
        parts.append(f"peak memory {max(row.peak_memory_mib for row in rows):.0f} MiB")
    return ", ".join(parts)
