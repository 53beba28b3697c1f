"""The instrument: every row renders every request of a workload, in turns, in one process.

What a row has of a request is written down at once, so that a bench which is stopped goes on where it was. A miss is the dense render
of the request itself: it is made once, with the solver that the row asks for, and charged to every row that missed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from chai_cli.backbones.base import Backbone, Look, Text, resolve
from chai_cli.bench.fidelity import Critic, Seen
from chai_cli.bench.peers import MagRatios
from chai_cli.bench.rows import SCHEDULERS, Row
from chai_cli.bench.workload import Case, Workload
from chai_cli.denoise import Trajectory, denoise, timed
from chai_cli.donors import CacheOptions, Donors
from chai_cli.embed import Embedder
from chai_cli.errors import ChaiError, first_line
from chai_cli.render import peak_memory_mib
from chai_cli.retrieve import Meaning, understand
from chai_cli.reuse.dense import Dense
from chai_cli.video import enlargement, write_mp4

REFERENCE = "dense"  # the row that all others are held against: full steps, the request's own solver
UNLIMITED = 10**15


@dataclass(frozen=True)
class Measurement:
    """One row's render of one request.

    Attributes:
        case: Index of the request.
        donor: Index among the workload's donors, or of the earlier request -1 - index; None for a miss.
        similarity, coverage: What retrieval knew of a hit, see `retrieve.Candidate`.
        shared: Entities that request and donor share, with their cosine.
        seconds: By part: text, retrieval, denoise, decode, write, store. Text and writing do not depend on the row; they are
            measured once for a request.
        error: Why the row could not render it.
    """

    row: str
    case: int
    hit: bool = False
    why: str = ""
    donor: int | None = None
    similarity: float = 0.0
    coverage: float = 0.0
    shared: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    calls: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_mib: float = 0.0
    seen: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def read(self) -> Seen:
        return Seen(**self.seen)


@dataclass
class Reference:
    """A dense render with all that any row may want of it."""

    run: Trajectory
    seconds: dict[str, float]
    frames: np.ndarray


class Bench:
    """Measures rows on a workload and keeps what it has in a folder.

    Args:
        rows: The first must be the reference.
        caching: How caches of the rows are used; each has one of its own, in the folder.
        say: Told what goes on, a line at a time.
        videos: Keep an mp4 of each render.
    """

    def __init__(
        self,
        backbone: Backbone,
        critic: Critic,
        embedder: Embedder,
        workload: Workload,
        rows: list[Row],
        folder: Path,
        caching: CacheOptions,
        say: Callable[[str], None] = lambda text: None,
        videos: bool = False,
    ) -> None:
        assert rows[0].label == REFERENCE
        self.backbone = backbone
        self.critic = critic
        self.embedder = embedder
        self.workload = workload
        self.rows = rows
        self.folder = folder
        self.say = say
        self.videos = videos
        self.file = folder / "measurements.jsonl"
        self.done = read_measurements(self.file)
        self.caching = caching
        self.failed: dict[str, str] = {}
        self.caches: dict[str, Donors] = {}
        self.entry_bytes: dict[str, float] = {}
        self.ratios = MagRatios([case.prompt for case in workload.cases[:2]])

    def run(self, limit: int | None = None) -> list[Measurement]:
        """Measure what is missing of the first `limit` requests, and give all that is known of them.

        Raises:
            ChaiError: a row cannot be rendered with this model at all, or the folder cannot be written.
        """
        cases = self.workload.cases[:limit]
        open_ = [i for i in range(len(cases)) if any((row.label, i) not in self.done for row in self.rows)]
        try:
            self.open_caches()
            if open_:
                self.fill_caches()
                self.warm_up(cases[0])
            for count, index in enumerate(open_, 1):
                began = time.perf_counter()
                self.request(index, cases[index])
                self.say(f"request {index + 1}, {count}/{len(open_)}: {time.perf_counter() - began:.1f} s")
        finally:
            self.close_caches()
        wanted = {row.label for row in self.rows}
        return [m for (label, index), m in sorted(self.done.items(), key=order) if label in wanted and index < len(cases)]

    def open_caches(self) -> None:
        for row in self.rows:
            if row.reuse is None:
                continue
            row.reuse.check(self.backbone)
            options = replace(self.caching, path=self.folder / "caches" / safe(row.label), budget=UNLIMITED)
            donors = Donors(self.backbone.record, self.backbone, row.reuse, options, str(self.backbone.device), self.embedder)
            if donors.trouble:
                raise ChaiError(donors.trouble)
            self.caches[row.label] = donors
            self.forget_unfinished(row, donors)

    def close_caches(self) -> None:
        for label, donors in self.caches.items():
            sizes = [entry.bytes for entry in donors.store.entries()]
            self.entry_bytes[label] = sum(sizes) / len(sizes) if sizes else 0.0
            donors.close()
        self.caches.clear()

    def forget_unfinished(self, row: Row, donors: Donors) -> None:
        """Take out what a killed run kept of a request that it did not finish: the request must not find itself."""
        ours = {identity(case) for case in self.workload.donors}
        ours |= {identity(case) for i, case in enumerate(self.workload.cases) if (row.label, i) in self.done}
        strays = [entry.id for entry in donors.store.entries() if (entry.prompt, entry.seed) not in ours]
        donors.store.remove(strays)

    def fill_caches(self) -> None:
        """Render the workload's donors, once for each solver that rows use, and give every cache what its row reads."""
        there = {
            label: {(entry.prompt, entry.seed) for entry in donors.store.entries()} for label, donors in self.caches.items()
        }
        for index, case in enumerate(self.workload.donors):
            lacking = [row for row in self.rows if row.reuse and identity(case) not in there[row.label]]
            for scheduler in dict.fromkeys(row.scheduler for row in lacking):
                look = self.look(case, scheduler)
                meaning = understand([case.prompt], self.embedder)[0]
                reference = self.reference(f"donor{index}", look, self.backbone.encode(case.prompt, look), keep=True)
                for row in lacking:
                    if row.scheduler == scheduler:
                        self.keep(row, meaning, look, reference)
            if lacking:
                self.say(f"donor {index + 1}/{len(self.workload.donors)}")

    def keep(self, row: Row, meaning: Meaning, look: Look, reference: Reference) -> float:
        """Store a dense render as a row's method would; the seconds that took."""
        donors, reuse = self.caches[row.label], row.reuse
        assert reuse is not None
        steps = reuse.kept(*self.sigmas(look, reuse.schedule(look.num_inference_steps)))
        run = replace(reference.run, kept={step: reference.run.kept[step] for step in steps})
        began = time.perf_counter()
        why = donors.keep(meaning, look, run, sum(reference.seconds.values()), reference.frames)
        if why:
            raise ChaiError(f"a dense render could not be kept: {why}")
        return time.perf_counter() - began

    def sigmas(self, look: Look, fast: int) -> tuple[list[float], list[float]]:
        """Noise levels of the request's own schedule and of a hit's, without the last 0."""

        def levels(steps: int) -> list[float]:
            scheduler = self.backbone.schedule(replace(look, num_inference_steps=steps))
            return [float(sigma) for sigma in scheduler.sigmas][:steps]

        return levels(look.num_inference_steps), levels(fast)

    def look(self, case: Case, scheduler: str | None, steps: int | None = None) -> Look:
        look = resolve(self.backbone.record, case.settings, scheduler)
        return replace(look, num_inference_steps=steps) if steps else look

    def needs(self, look: Look, scheduler: str | None) -> frozenset[int]:
        """The steps of a dense run with this solver that any row reads."""
        found: frozenset[int] = frozenset()
        for row in self.rows:
            if row.reuse and row.scheduler == scheduler:
                found |= row.reuse.kept(*self.sigmas(look, row.reuse.schedule(look.num_inference_steps)))
        return found

    def reference(self, name: str, look: Look, text: Text, keep: bool) -> Reference:
        """The dense render of a request; made once and kept with its latents, so that a later row needs no other.

        Args:
            keep: Whether rows will store it.
        """
        scheduler = None if look.scheduler == "default" else look.scheduler
        needs = self.needs(look, scheduler) if keep else frozenset()
        path = self.folder / "dense" / f"{name}-{look.scheduler}.safetensors"
        found = load_run(path, needs)
        if found:
            run, seconds = found
            return Reference(run, seconds, self.backbone.decode(run.latents))
        seconds = {}
        with self.part(seconds, "denoise"):
            run = denoise(self.backbone, Dense(needs), look, text)
        with self.part(seconds, "decode"):
            frames = self.backbone.decode(run.latents)
        save_run(path, run, seconds)
        return Reference(run, seconds, frames)

    def part(self, seconds: dict[str, float], name: str) -> Any:
        return timed(self.backbone.device, lambda taken: seconds.__setitem__(name, seconds.get(name, 0.0) + taken))

    def warm_up(self, case: Case) -> None:
        """One short render that nobody measures: first calls are slow."""
        look = self.look(case, None, 2)
        run = denoise(self.backbone, Dense(), look, self.backbone.encode(case.prompt, look))
        frames = self.backbone.decode(run.latents)
        self.critic.see(case, frames, frames)
        understand([case.prompt], self.embedder)
        for row in self.rows:
            if row.peer is not None:  # loads its library, and measures what it needs to know of the model
                with (
                    suppress(Exception),
                    row.peer.applied(self.backbone, self.look(case, row.scheduler, row.steps), self.ratios),
                ):
                    pass

    def request(self, index: int, case: Case) -> None:
        """All rows that lack this request, in turn."""
        own = self.look(case, None)
        shared: dict[str, float] = {}
        with self.part(shared, "text"):
            text = self.backbone.encode(case.prompt, own)
        looked: dict[str, float] = {}
        with self.part(looked, "retrieval"):
            meaning = understand([case.prompt], self.embedder)[0] if self.caches else None
        references: dict[str | None, Reference] = {}

        def reference(scheduler: str | None) -> Reference:
            if scheduler not in references:
                references[scheduler] = self.reference(f"case{index}", self.look(case, scheduler), text, self.workload.grows)
            return references[scheduler]

        dense = reference(None)
        with tempfile.TemporaryDirectory() as scratch, self.part(shared, "write"):
            write_mp4(dense.frames, Path(scratch) / "a.mp4", own.fps, enlargement(own.height, own.width), None)
        for row in self.rows:
            if (row.label, index) in self.done:
                continue
            if row.label in self.failed:
                self.write_down(Measurement(row.label, index, error=self.failed[row.label]))
                continue
            reset_peak(self.backbone.device)
            try:
                made, frames = self.render(row, index, case, text, meaning, looked, reference)
            except Exception as error:  # a row that cannot go on is told and left out; the others are not lost
                self.backbone.free_memory()
                self.failed[row.label] = first_line(error) if isinstance(error, ChaiError) else repr(error)
                self.say(f"{row.label} is left out: {self.failed[row.label]}")
                self.write_down(Measurement(row.label, index, error=self.failed[row.label]))
                continue
            seen = asdict(self.critic.see(case, frames, dense.frames))
            memory = peak_mib(self.backbone.device)
            self.write_down(replace(made, seconds={**shared, **made.seconds}, seen=seen, peak_memory_mib=memory))
            if self.videos:
                keep_video(self.folder / "videos" / safe(row.label), index, case.prompt, frames, own)

    def render(
        self,
        row: Row,
        index: int,
        case: Case,
        text: Text,
        meaning: Meaning | None,
        looked: dict[str, float],
        reference: Callable[[str | None], Reference],
    ) -> tuple[Measurement, np.ndarray]:
        """One row's clip of one request, and what it cost apart from text and writing."""
        look = self.look(case, row.scheduler, row.steps)
        made = Measurement(row.label, index)
        seconds: dict[str, float] = {}
        if row.reuse is None:
            if row.label == REFERENCE:
                dense = reference(None)
                return replace(made, steps=len(dense.run.seconds), calls=dense.run.calls, seconds=dense.seconds), dense.frames
            with self.part(seconds, "denoise"), self.applied(row, look) as method:
                run = denoise(self.backbone, method, look, text)
        else:
            donors = self.caches[row.label]
            seconds.update(looked)
            with self.part(seconds, "retrieval"):
                fast = self.sigmas(look, row.reuse.schedule(look.num_inference_steps))[1]
                found = donors.find(meaning, look, fast)
            made = replace(made, why=found.why)
            if found.donor is None or found.entry is None or found.candidate is None:
                dense = reference(row.scheduler)
                if self.workload.grows:
                    assert meaning is not None
                    seconds["store"] = self.keep(row, meaning, look, dense)
                spent = {**seconds, **dense.seconds}
                return replace(made, steps=len(dense.run.seconds), calls=dense.run.calls, seconds=spent), dense.frames
            made = replace(
                made,
                hit=True,
                donor=self.place(found.entry.prompt, found.entry.seed),
                similarity=round(found.candidate.similarity, 4),
                coverage=round(found.candidate.coverage, 4),
                shared=[asdict(pair) for pair in found.candidate.shared],
            )
            with self.part(seconds, "denoise"):
                run = denoise(self.backbone, row.reuse.hit(self.backbone, found.donor), look, text)
        with self.part(seconds, "decode"):
            frames = self.backbone.decode(run.latents)
        return replace(made, steps=len(run.seconds), calls=run.calls, seconds=seconds), frames

    @contextmanager
    def applied(self, row: Row, look: Look) -> Iterator[Dense]:
        """The method that renders a row without a donor."""
        if row.peer is None:
            yield Dense()
            return
        with row.peer.applied(self.backbone, look, self.ratios) as method:
            yield method

    def own_scheduler(self) -> str:
        """The solver that requests get which ask for none."""
        kind = type(self.backbone.schedule(self.look(self.workload.cases[0], None))).__name__.lower()
        return next((name for name in SCHEDULERS if name in kind), "own")

    def place(self, prompt: str, seed: int) -> int | None:
        """Where a donor stands: among the workload's donors, or which request it was, as -1 - index."""
        for index, case in enumerate(self.workload.donors):
            if identity(case) == (prompt, seed):
                return index
        return next((-1 - i for i, case in enumerate(self.workload.cases) if identity(case) == (prompt, seed)), None)

    def write_down(self, made: Measurement) -> None:
        self.done[made.row, made.case] = made
        try:
            with self.file.open("a") as file:
                file.write(json.dumps(asdict(made)) + "\n")
        except OSError as error:
            raise ChaiError(f"cannot write {self.file}: {error.strerror or error}; free some space and run again") from None


def order(item: tuple[tuple[str, int], Measurement]) -> tuple[int, str]:
    (label, index), _ = item
    return index, label


def identity(case: Case) -> tuple[str, int]:
    return case.prompt, case.settings.seed


def read_measurements(path: Path) -> dict[tuple[str, int], Measurement]:
    """What earlier runs wrote; a torn last line and rows that failed are to be done again."""
    found = {}
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        with path.open("a") as file:
            file.write("\n")
    for line in text.splitlines():
        with suppress(json.JSONDecodeError, TypeError):
            one = Measurement(**json.loads(line))
            if not one.error:
                found[one.row, one.case] = one
    return found


def save_run(path: Path, run: Trajectory, seconds: dict[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"sigmas": run.sigmas, "step_seconds": run.seconds, "calls": run.calls, "seconds": seconds}
    tensors = {"clean": run.latents.cpu().contiguous(), **{f"step{step}": kept for step, kept in run.kept.items()}}
    beside = path.with_suffix(".part")
    save_file(tensors, beside, metadata={"run": json.dumps(told)})
    beside.replace(path)


def load_run(path: Path, needs: frozenset[int]) -> tuple[Trajectory, dict[str, float]] | None:
    """A dense run from disk, if it is there and holds these steps."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if not {f"step{step}" for step in needs} <= names:
                return None
            told = json.loads(file.metadata()["run"])
            kept = {int(name[4:]): file.get_tensor(name) for name in names if name.startswith("step")}
            run = Trajectory(file.get_tensor("clean"), told["sigmas"], kept, told["step_seconds"], told["calls"])
            return run, told["seconds"]
    except (OSError, KeyError, ValueError):
        return None


def safe(label: str) -> str:
    """A row's label as a name of a folder."""
    return "".join(c if c.isalnum() or c in "-=.+" else "_" for c in label)


def keep_video(folder: Path, index: int, prompt: str, frames: np.ndarray, look: Look) -> None:
    """An mp4, and its prompt in `prompts.json` beside it: VBench's custom input takes the folder and that file."""
    folder.mkdir(parents=True, exist_ok=True)
    note, name = folder / "prompts.json", f"{index:04d}.mp4"
    write_mp4(frames, folder / name, look.fps, enlargement(look.height, look.width), None)
    prompts = json.loads(note.read_text()) if note.exists() else {}
    note.write_text(json.dumps(prompts | {name: prompt}, ensure_ascii=False, indent=1))


def reset_peak(device: torch.device) -> None:
    """Forget how much memory was used before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # other systems than Linux keep one peak for the whole process
            Path("/proc/self/clear_refs").write_text("5")


def peak_mib(device: torch.device) -> float:
    """The highest use of memory since `reset_peak`, of the device or of the process."""
    if device.type != "cuda" and os.path.exists("/proc/self/status"):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return peak_memory_mib(device)


def open_folder(folder: Path, asked: dict[str, Any], overwrite: bool) -> None:
    """Make a bench's folder, or go on with one that was asked the same.

    Raises:
        ChaiError: it cannot be written, or holds a bench of something else.
    """
    if overwrite:
        start_over(folder)
    note, text = folder / "asked.json", json.dumps(asked, sort_keys=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if note.exists() and note.read_text() != text and (folder / "measurements.jsonl").exists():
            raise ChaiError(f"{folder} holds a bench of another workload or model; give --overwrite or another --out")
        note.write_text(text)
    except OSError as error:
        raise ChaiError(f"cannot write to {folder}: {error.strerror or error}; choose another --out") from None


def start_over(folder: Path) -> None:
    """Throw away what earlier runs left in a folder."""
    for name in ("caches", "dense", "videos"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "measurements.jsonl").unlink(missing_ok=True)
