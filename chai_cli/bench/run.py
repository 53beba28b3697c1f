"""The instrument: every row renders every request of a workload, in turns, in one process.

What a row has of a request is written down at once, so that a bench which is stopped goes on where it was. A miss is the dense render
of the request itself: it is made once, with the solver that the row asks for, and charged to every row that missed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from chai_cli.backbones.base import Backbone, Look, Text, noise_levels, resolve
from chai_cli.bench.fidelity import Critic, Seen
from chai_cli.bench.peers import MagCache, MagRatios
from chai_cli.bench.rows import SCHEDULERS, Row
from chai_cli.bench.workload import Case, Workload
from chai_cli.cache import FIRST_ESTIMATE, Event
from chai_cli.denoise import Trajectory, denoise, timed
from chai_cli.donors import CLEAN, ESTIMATE, STEP, CacheOptions, Donors
from chai_cli.embed import Embedder
from chai_cli.errors import ChaiError, first_line
from chai_cli.render import peak_memory_mib
from chai_cli.retrieve import Meaning, understand
from chai_cli.reuse.dense import Dense
from chai_cli.video import enlargement, write_mp4
from store import Entry

REFERENCE = "dense"  # the row that all others are held against: full steps, the request's own solver
UNLIMITED = 10**15


@dataclass(frozen=True)
class Measurement:
    """One row's render of one request.

    Attributes:
        case: Index of the request.
        request: Digest of its prompt and settings.
        session: When the process began that measured it: seconds of different sessions are not of the same machine state.
        donors: Indices among the workload's donors, or of earlier requests as -1 - index; empty for a miss, and for a method that
            learns from many.
        similarity, coverage: What retrieval knew of a hit, see `retrieve.Candidate`.
        shared: Entities that request and donor share, with their cosine.
        seconds: By part: text, retrieval, denoise, decode, write, store. Text and writing do not depend on the row; they are
            measured once for a request in each session.
        peak_memory_mib: The highest during denoising and decoding.
        error: Why the row could not render it.
    """

    row: str
    case: int
    request: str = ""
    session: str = ""
    hit: bool = False
    why: str = ""
    donors: list[int] = field(default_factory=list)
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
    memory: float
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
        self.session = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.requests = [digest(case) for case in workload.cases]
        self.done = {
            key: one
            for key, one in read_measurements(self.file).items()
            if one.case < len(self.requests) and one.request == self.requests[one.case]
        }
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
        if open_ and self.videos and self.done:
            self.say("videos are kept of what is rendered now; what earlier runs measured is not rendered again")
        try:
            self.open_caches()
            if open_:
                lacking = self.lacking()
                texts = {i: self.encode(cases[i]) for i in open_}
                donors = {i: self.encode(self.workload.donors[i])[0] for i in lacking}
                self.backbone.release_text_encoder()
                self.fill_caches(lacking, donors)
                self.warm_up([cases[i] for i in open_], [texts[i][0] for i in open_])
            for count, index in enumerate(open_, 1):
                began = time.perf_counter()
                self.request(index, cases[index], *texts[index])
                self.say(f"request {index + 1}, {count}/{len(open_)}: {time.perf_counter() - began:.1f} s")
        finally:
            self.close_caches()
        return self.found(limit)

    def found(self, limit: int | None = None) -> list[Measurement]:
        """What is known of the first `limit` requests."""
        wanted, count = {row.label for row in self.rows}, len(self.workload.cases[:limit])
        return [m for (label, index), m in sorted(self.done.items(), key=order) if label in wanted and index < count]

    def encode(self, case: Case) -> tuple[Text, float]:
        """A prompt's embeddings, and the seconds they took."""
        seconds: dict[str, float] = {}
        with self.part(seconds, "text"):
            text = self.backbone.encode(case.prompt, self.look(case, None))
        return text, seconds["text"]

    def open_caches(self) -> None:
        for row in self.rows:
            if row.reuse is None:
                continue
            row.reuse.check(self.backbone)
            options = replace(self.caching, path=self.folder / "caches" / safe(row.label), budget=UNLIMITED)
            donors = Donors(self.backbone.record, self.backbone, row.reuse, options, self.embedder)
            if donors.trouble:
                raise ChaiError(donors.trouble)
            self.caches[row.label] = donors
            self.forget_unfinished(row, donors)

    def close_caches(self) -> None:
        for label, donors in self.caches.items():
            sizes = [entry.bytes for entry in donors.store.entries() if entry.latents != FIRST_ESTIMATE]
            self.entry_bytes[label] = sum(sizes) / len(sizes) if sizes else 0.0
            donors.close()
        self.caches.clear()

    def identity(self, case: Case) -> Identity:
        """What tells a request's entry from others."""
        look = self.look(case, None)
        return case.prompt, look.seed, (look.height, look.width, look.num_frames), look.num_inference_steps

    def forget_unfinished(self, row: Row, donors: Donors) -> None:
        """Take out what a killed run kept of a request that it did not finish: the request must not find itself."""
        ours = {self.identity(case) for case in self.workload.donors}
        ours |= {self.identity(case) for i, case in enumerate(self.workload.cases) if (row.label, i) in self.done}
        donors.store.remove([entry.id for entry in donors.store.entries() if identity_of(entry) not in ours])

    def lacking(self) -> dict[int, list[Row]]:
        """The workload's donors that caches do not hold yet, and the rows that read them."""
        there = {label: set(map(identity_of, donors.store.entries())) for label, donors in self.caches.items()}
        found = {}
        for index, case in enumerate(self.workload.donors):
            steps = self.look(case, None).num_inference_steps
            readers = [row for row in self.rows if row.reuse and not row.reuse.useless(steps)]
            found[index] = [row for row in readers if self.identity(case) not in there[row.label]]
        return {index: rows for index, rows in found.items() if rows}

    def fill_caches(self, lacking: dict[int, list[Row]], texts: dict[int, Text]) -> None:
        """Render donors, once for each solver that rows use, and give every cache what its row reads."""
        for index, rows in lacking.items():
            case = self.workload.donors[index]
            meaning = understand([case.prompt], self.embedder)[0]
            for scheduler in dict.fromkeys(row.scheduler for row in rows):
                look = self.look(case, scheduler)
                reference = self.reference(f"donor{index}", look, case.prompt, texts[index], keep=True)
                for row in rows:
                    if row.scheduler == scheduler:
                        self.keep(row, meaning, look, reference)
            self.say(f"donor {index + 1}/{len(self.workload.donors)}")

    def keep(self, row: Row, meaning: Meaning, look: Look, reference: Reference) -> float:
        """Store a dense render as a row's method would, if it can serve as a donor; the seconds that took."""
        donors, reuse = self.caches[row.label], row.reuse
        assert reuse is not None
        if reuse.useless(look.num_inference_steps):
            return 0.0
        steps, whole = self.kept(row, look), reference.run
        run = replace(
            whole,
            kept={step: whole.kept[step] for step in steps},
            estimates={step: whole.estimates[step] for step in steps},
        )
        began = time.perf_counter()
        why = donors.keep(meaning, look, run, sum(reference.seconds.values()), reference.frames)
        if why:
            raise ChaiError(f"a dense render could not be kept: {why}")
        return time.perf_counter() - began

    def kept(self, row: Row, look: Look) -> frozenset[int]:
        """The steps of a dense run that a row's hits read."""
        assert row.reuse is not None
        full = look.num_inference_steps
        levels = (noise_levels(self.backbone, look, steps) for steps in (full, row.reuse.schedule(full)))
        return row.reuse.kept(*levels)

    def look(self, case: Case, scheduler: str | None, steps: int | None = None) -> Look:
        look = resolve(self.backbone.record, case.settings, scheduler)
        return replace(look, num_inference_steps=min(steps, look.num_inference_steps)) if steps else look

    def needs(self, look: Look) -> frozenset[int]:
        """The steps of a dense run with this solver that any row reads."""
        found: frozenset[int] = frozenset()
        for row in self.rows:
            if row.reuse and (row.scheduler or "default") == look.scheduler:
                found |= self.kept(row, look)
        return found

    def reference(self, name: str, look: Look, prompt: str, text: Text, keep: bool) -> Reference:
        """The dense render of a request; made once and kept with its latents, so that a later row needs no other.

        Args:
            keep: Whether rows will store it.
        """
        needs = self.needs(look) if keep else frozenset()
        path = self.folder / "dense" / f"{name}-{look.scheduler}.safetensors"
        request = json.dumps([self.backbone.fingerprint, prompt, asdict(look)])
        found = load_run(path, request, needs)
        if found:
            return Reference(*found, self.backbone.decode(found[0].latents, look))
        seconds: dict[str, float] = {}
        reset_peak(self.backbone.device)
        with self.part(seconds, "denoise"):
            run = denoise(self.backbone, Dense(needs), look, text)
        with self.part(seconds, "decode"):
            frames = self.backbone.decode(run.latents, look)
        memory = peak_mib(self.backbone.device)
        save_run(path, request, run, seconds, memory)
        return Reference(run, seconds, memory, frames)

    def part(self, seconds: dict[str, float], name: str) -> Any:
        return timed(self.backbone.device, lambda taken: seconds.__setitem__(name, seconds.get(name, 0.0) + taken))

    def warm_up(self, cases: Sequence[Case], texts: Sequence[Text]) -> None:
        """One short render of each size that nobody measures: first calls are slow."""
        known = set()
        for case, text in zip(cases, texts, strict=True):
            look = self.look(case, None, 2)
            if (size := (look.height, look.width, look.num_frames)) in known:
                continue
            known.add(size)
            with suppress(ChaiError):  # what cannot be rendered is told when it is asked
                run = denoise(self.backbone, Dense(), look, text)
                frames = self.backbone.decode(run.latents, look)
                self.critic.see(case, frames, frames)
        understand([cases[0].prompt], self.embedder)
        for row in self.rows:
            if row.peer is not None:  # loads its library
                look = self.look(cases[0], row.scheduler, row.steps)
                with suppress(Exception), row.peer.applied(self.backbone, look, self.ratios):
                    pass

    def request(self, index: int, case: Case, text: Text, text_seconds: float) -> None:
        """All rows that lack this request, in turn."""
        own = self.look(case, None)
        blank = Measurement("", index, self.requests[index], self.session)
        shared, looked = {"text": text_seconds}, {"retrieval": 0.0}
        references: dict[str | None, Reference] = {}

        def reference(scheduler: str | None) -> Reference:
            if scheduler not in references:
                look, keep = self.look(case, scheduler), self.workload.grows
                references[scheduler] = self.reference(f"case{index}", look, case.prompt, text, keep)
            return references[scheduler]

        missing = [row for row in self.rows if (row.label, index) not in self.done]
        try:
            with self.part(looked, "retrieval"):
                meaning = understand([case.prompt], self.embedder)[0] if self.caches else None
            dense = reference(None)
            with tempfile.TemporaryDirectory() as scratch, self.part(shared, "write"):
                write_mp4(dense.frames, Path(scratch) / "a.mp4", own.fps, enlargement(own.height, own.width), None)
        except Exception as error:  # this request cannot be rendered at all: the others are not lost
            self.backbone.free_memory()
            self.say(f"request {index + 1} is left out: {first_line(error)}")
            for row in missing:
                self.write_down(replace(blank, row=row.label, error=first_line(error)))
            return
        for row in missing:
            if row.label in self.failed:
                self.write_down(replace(blank, row=row.label, error=self.failed[row.label]))
                continue
            reset_peak(self.backbone.device)
            try:
                made, frames = self.render(row, replace(blank, row=row.label), case, text, meaning, looked, reference)
            except Exception as error:  # a row that cannot go on is told and left out; the others are not lost
                self.backbone.free_memory()
                why = first_line(error) if isinstance(error, ChaiError) else repr(error)
                self.say(f"{row.label}, request {index + 1}: {why}")
                if not any(label == row.label and not one.error for (label, _), one in self.done.items()):
                    self.failed[row.label] = why  # it has never worked
                self.write_down(replace(blank, row=row.label, error=why))
                continue
            made = replace(made, peak_memory_mib=made.peak_memory_mib or peak_mib(self.backbone.device))
            seen = asdict(self.critic.see(case, frames, dense.frames))
            self.write_down(replace(made, seconds={**shared, **made.seconds}, seen=seen))
            if self.videos:
                keep_video(self.folder / "videos" / safe(row.label), index, case.prompt, frames, own)

    def render(
        self,
        row: Row,
        made: Measurement,
        case: Case,
        text: Text,
        meaning: Meaning | None,
        looked: dict[str, float],
        reference: Callable[[str | None], Reference],
    ) -> tuple[Measurement, np.ndarray]:
        """One row's clip of one request, and what it cost apart from text and writing."""
        look = self.look(case, row.scheduler, row.steps)
        seconds: dict[str, float] = {}

        def densely(scheduler: str | None, **spent: float) -> tuple[Measurement, np.ndarray]:
            dense = reference(scheduler)
            if self.workload.grows and row.reuse:
                assert meaning is not None
                spent["store"] = self.keep(row, meaning, look, dense)
            told = replace(made, steps=len(dense.run.seconds), calls=dense.run.calls, peak_memory_mib=dense.memory)
            return replace(told, seconds={**spent, **dense.seconds}), dense.frames

        if row.reuse is None:
            if row.label == REFERENCE:
                return densely(None)
            if row.peer is not None and row.peer.name == MagCache.name:
                self.ratios.of(self.backbone, look)  # measured once for a kind of request, and charged to none
            plain = row.peer.applied(self.backbone, look, self.ratios) if row.peer else nullcontext(Dense())
            with self.part(seconds, "denoise"), plain as method:
                run = denoise(self.backbone, method, look, text)
        else:
            donors = self.caches[row.label]
            seconds.update(looked)
            with self.part(seconds, "retrieval"):
                fast = noise_levels(self.backbone, look, row.reuse.schedule(look.num_inference_steps))
                found = donors.find(meaning, look, fast)
            made = replace(made, why=found.why)
            if found.donor is None or found.entry is None:
                return densely(row.scheduler, **seconds)
            made = replace(made, hit=True)
            if found.candidate:
                made = replace(
                    made,
                    donors=[place for entry in (found.entry, *found.others) if (place := self.place(entry)) is not None],
                    similarity=round(found.candidate.similarity, 4),
                    coverage=round(found.candidate.coverage, 4),
                    shared=[asdict(pair) for pair in found.candidate.shared],
                )
            with self.part(seconds, "denoise"):
                run = denoise(self.backbone, row.reuse.hit(self.backbone, found.donor), look, text)
            with self.part(seconds, "store"):
                donors.tell(hit_event(case.prompt, found.entry), found, look.num_inference_steps - len(run.seconds))
                if self.workload.grows:
                    donors.keep_opening(meaning, look, run)
        with self.part(seconds, "decode"):
            frames = self.backbone.decode(run.latents, look)
        return replace(made, steps=len(run.seconds), calls=run.calls, seconds=seconds), frames

    def own_scheduler(self) -> str:
        """The solver that requests get which ask for none."""
        kind = type(self.backbone.schedule(self.look(self.workload.cases[0], None))).__name__.lower()
        return next((name for name in SCHEDULERS if name in kind), "own")

    def place(self, entry: Entry) -> int | None:
        """Where a donor stands: among the workload's donors, or which request it was, as -1 - index."""
        wanted = identity_of(entry)
        for index, case in enumerate(self.workload.donors):
            if self.identity(case) == wanted:
                return index
        return next((-1 - i for i, case in enumerate(self.workload.cases) if self.identity(case) == wanted), None)

    def write_down(self, made: Measurement) -> None:
        self.done[made.row, made.case] = made
        try:
            with self.file.open("a") as file:
                file.write(json.dumps(asdict(made)) + "\n")
        except OSError as error:
            raise ChaiError(f"cannot write {self.file}: {error.strerror or error}; free some space and run again") from None


def hit_event(prompt: str, donor: Entry) -> Event:
    """What a run writes down of a hit; only what writing costs matters here."""
    return Event(0.0, "hit", donor.model, donor.size, prompt, donor=donor.id, donor_prompt=donor.prompt)


def order(item: tuple[tuple[str, int], Measurement]) -> tuple[int, str]:
    (label, index), _ = item
    return index, label


def digest(case: Case) -> str:
    """Names a prompt with its settings."""
    told = json.dumps([case.prompt, asdict(case.settings)], sort_keys=True)
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


Identity = tuple[str, int, tuple[int, ...], int]


def identity_of(entry: Entry) -> Identity:
    return entry.prompt, entry.seed, tuple(entry.size), entry.schedule["num_inference_steps"]


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


def save_run(path: Path, request: str, run: Trajectory, seconds: dict[str, float], memory: float) -> None:
    """A dense render for later sessions.

    Raises:
        ChaiError: it cannot be written.
    """
    told = {"sigmas": run.sigmas, "step_seconds": run.seconds, "calls": run.calls, "seconds": seconds, "memory": memory}
    tensors = {CLEAN: run.latents.cpu().contiguous(), **{f"{STEP}{step}": kept for step, kept in run.kept.items()}}
    tensors |= {f"{ESTIMATE}{step}": seen.contiguous() for step, seen in run.estimates.items()}
    beside = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, beside, metadata={"request": request, "run": json.dumps(told)})
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise ChaiError(f"cannot write {path}: {first_line(error)}; free some space and run again") from None


def load_run(path: Path, request: str, needs: frozenset[int]) -> tuple[Trajectory, dict[str, float], float] | None:
    """A dense render from disk with its seconds and memory, if it is whole, of this very request, and holds these steps."""
    try:
        with safe_open(path, framework="pt") as file:
            names, note = set(file.keys()), file.metadata()
            if note.get("request") != request or not {f"{kind}{step}" for step in needs for kind in (STEP, ESTIMATE)} <= names:
                return None
            told = json.loads(note["run"])
            parts = {
                part: {int(name[len(part) :]): file.get_tensor(name) for name in names if name.startswith(part)}
                for part in (STEP, ESTIMATE)
            }
            run = Trajectory(
                file.get_tensor(CLEAN), told["sigmas"], parts[STEP], parts[ESTIMATE], told["step_seconds"], told["calls"]
            )
            return run, told["seconds"], told["memory"]
    except (OSError, SafetensorError, AttributeError, KeyError, ValueError):
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
        if note.exists() and note.read_text() != text:
            raise ChaiError(f"{folder} holds a bench of another {differs(note, asked)}; give --overwrite or another --out")
        note.write_text(text)
    except OSError as error:
        raise ChaiError(f"cannot write to {folder}: {error.strerror or error}; choose another --out") from None


def differs(note: Path, asked: dict[str, Any]) -> str:
    """What the bench of a folder was asked otherwise, in words."""
    try:
        before = json.loads(note.read_text())
        return ", ".join(key for key, value in json.loads(json.dumps(asked)).items() if before.get(key) != value) or "version"
    except (OSError, ValueError, AttributeError):
        return "version"


def start_over(folder: Path) -> None:
    """Throw away what earlier runs left in a folder."""
    for name in ("caches", "dense", "videos"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("measurements.jsonl", "asked.json"):
        (folder / name).unlink(missing_ok=True)
