"""The cache as one run sees it: finds donors, keeps finished renders, and never costs a video."""

from __future__ import annotations

import io
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from chai_cli.backbones.base import Look, ModelFiles, ModelRecord
from chai_cli.cache import Event
from chai_cli.embed import Embedder, load_embedder
from chai_cli.errors import ChaiError, first_line
from chai_cli.retrieve import ENTITY, PROMPT, Candidate, Lookup, Meaning, Retriever, reason, understand
from chai_cli.reuse.base import Donor, Learner, Reuse
from store import Entry, LatentStore, StoreError, Vector, namespace

if TYPE_CHECKING:
    from chai_cli.backbones.base import Backbone
    from chai_cli.denoise import Trajectory

CLEAN, STEP, ESTIMATE = "clean", "step", "estimate"  # names of latents in an entry; the last two with the number of the step
LOOKED_AT = 8  # candidates whose latents may be read
PAGES = 1.3  # an entry on disk over its latents: vectors, thumbnail, half-filled pages
THUMBNAIL = 128  # pixels of the longer side
OPENING = "opening"  # the kind of entries that hold a first estimate alone: no donors, so no look-up finds them
GROWTH = 1.5  # with so many times the first estimates that a lesson knew, it is learned anew


@dataclass(frozen=True)
class CacheOptions:
    """Which cache, and how it is used.

    Attributes:
        budget: Bytes on disk.
        numbers: How latents are stored; see `store.LatentStore`.
        tenant: Entries of different tenants never meet.
        min_similarity: Cosine from which two entities count as the same; None for the embedder's own.
        embedder: An open_clip name or folder; None for the model's own.
        min_coverage: Share of a prompt's entities that a donor must have, each as far as it is like.
    """

    path: Path
    budget: int = 10**9
    policy: str = "lru"
    numbers: str = "bfloat16"
    readonly: bool = False
    tenant: str = ""
    min_similarity: float | None = None
    embedder: str | None = None
    min_coverage: float = 0.0


@dataclass(frozen=True)
class Found:
    """The donor of a request, or why there is none.

    Attributes:
        entry: The donor's; of a lesson, one of those it was learned from.
        candidate: How request and donor are alike; None of a lesson, which has no donor of its own.
        others: Entries of further donors, for a method that reads several.
    """

    why: str
    donor: Donor | None = None
    entry: Entry | None = None
    candidate: Candidate | None = None
    others: tuple[Entry, ...] = ()


@dataclass
class Donors:
    """One run's access to the cache. A cache that cannot be used is told about once, and every look-up is then a miss.

    Raises:
        ChaiError: the embedder that the options name cannot be loaded.

    Attributes:
        embedder: Loaded if it is not given.
        trouble: Why the cache cannot be used at all; empty if it can.
        opened: For each kind of request, the prompts whose first estimates are known.
    """

    record: ModelRecord
    files: ModelFiles
    reuse: Reuse
    options: CacheOptions
    embedder: Embedder | None = None
    trouble: str = ""
    dense_seconds: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    gathered: dict[tuple[Any, ...], Found] = field(default_factory=dict)
    counted: dict[tuple[Any, ...], int] = field(default_factory=dict)
    opened: dict[tuple[Any, ...], Opened] = field(default_factory=dict)
    earlier: dict[tuple[Any, ...], Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = self.options
        self.store = LatentStore(options.path, options.budget, options.policy, options.numbers, options.readonly)
        try:
            len(self.store)
            embedder = self.embedder or load_embedder(options.embedder or self.record.embedder)
            least = options.min_similarity, self.reuse.by_prompt, options.min_coverage
            self.retriever = Retriever(self.store, embedder, *least)
            understand(["a prompt"], embedder)  # loads the language model: part of loading, not of the first prompt
        except (StoreError, ChaiError) as error:
            if options.embedder and isinstance(error, ChaiError):
                raise
            self.trouble = str(error)

    def understand(self, prompts: Sequence[str]) -> list[Meaning]:
        """Entities and vectors of prompts; none if the cache cannot be used."""
        return [] if self.trouble else understand(prompts, self.retriever.embedder)

    def namespace(self, look: Look, kind: str = "flow") -> str:
        """Latents fit each other within a model, a size and a kind of prediction; vectors within an embedder."""
        name = f"{self.files.fingerprint}/{self.retriever.embedder.name}"
        return namespace(name, self.files.latent_shape(look), kind, self.options.tenant)

    def meanings(self, namespace: str) -> list[Meaning]:
        """What the entries of a namespace are about."""
        found = []
        for entry in self.store.entries():
            if entry.namespace == namespace:
                rows = {kind: self.store.vectors(namespace, kind, [entry.id]).get(entry.id, []) for kind in (ENTITY, PROMPT)}
                vectors = [Vector(kind, label, values) for kind, pairs in rows.items() for label, values in pairs]
                found.append(Meaning(entry.prompt, entry.entities, tuple(vectors)))
        return found

    def wanted(self, meaning: Meaning) -> Meaning:
        """What the method looks for: a method that goes by whole prompts does not ask for entities."""
        return meaning if self.reuse.by_prompt is None else meaning.unnamed()

    def foresee(self, meaning: Meaning, look: Look) -> Lookup:
        """What a look-up would find, without reading latents."""
        if useless := self.reuse.useless(look.num_inference_steps):
            return Lookup((), useless)
        if not isinstance(self.reuse, Learner):
            return self.look_up(meaning, look)
        key = self.kind(look)
        if key not in self.counted:
            self.counted[key] = len(self.teachers(self.reuse, look))
        if self.counted[key] < self.reuse.least_donors:
            return Lookup((), self.few(self.reuse, look, self.counted[key]))
        return replace(self.look_up(meaning, look), why=learned(min(self.counted[key], self.reuse.donors)))

    def kind(self, look: Look) -> tuple[Any, ...]:
        """Requests of one kind learn from the same entries."""
        return (self.namespace(look), *solved(look).values())

    def entry_bytes(self, look: Look, latents: int | None = None) -> int:
        """What an entry will take on disk, about, with so many latents or all that the method keeps."""
        width = {"float32": 4, "int8": 1}.get(self.options.numbers, 2)
        count = self.reuse.latents_kept if latents is None else latents
        return math.ceil(math.prod(self.files.latent_shape(look)) * width * count * PAGES) + 16_384

    def room(self, look: Look) -> int:
        """Entries of this size that the budget holds, about."""
        return self.options.budget // self.entry_bytes(look)

    def too_small(self, reuse: Learner, look: Look) -> str:
        """Why the cache can never hold what it takes to learn from; empty if it can."""
        room, least = self.room(look), reuse.least_donors
        if room >= least:
            return ""
        needed = math.ceil(least * self.entry_bytes(look) / 10**6)
        return (
            f"the cache has room for {room} of the {least} full renders to learn from; give --cache-budget {needed}MB or more"
        )

    def few(self, reuse: Learner, look: Look, count: int) -> str:
        """Why there is nothing to learn from yet."""
        return self.too_small(reuse, look) or f"{count} of the {reuse.least_donors} full renders to learn from"

    def teachers(self, reuse: Learner, look: Look) -> list[Entry]:
        """All entries that a method can learn from, oldest first: solved like the request, with all that it reads."""
        steps = reuse.leaps(look.num_inference_steps)
        read = {CLEAN, *(f"{kind}{step}" for step in steps for kind in (STEP, ESTIMATE))}
        return [entry for entry in self.solved_alike(look, self.namespace(look)) if read <= set(entry.latents)]

    def solved_alike(self, look: Look, namespace: str) -> list[Entry]:
        wanted = solved(look)
        return [
            entry
            for entry in self.store.entries()
            if entry.namespace == namespace and {key: entry.schedule.get(key) for key in wanted} == wanted
        ]

    def look_up(self, meaning: Meaning, look: Look) -> Lookup:
        """Entries that share something with the prompt, from their vectors alone.

        Raises:
            StoreError: the cache cannot be read.
        """
        return self.retriever.find(self.namespace(look), self.wanted(meaning), max(LOOKED_AT, 2 * self.reuse.donors))

    def find(self, meaning: Meaning | None, look: Look, fast: Sequence[float]) -> Found:
        """The best entry whose latents are whole and fit.

        Args:
            fast: Sigmas of a hit's schedule, without the last 0.
        """
        if self.trouble or meaning is None:
            return Found(self.trouble)
        if useless := self.reuse.useless(look.num_inference_steps):
            return Found(useless)
        try:
            if isinstance(self.reuse, Learner):
                many = self.find_many(self.reuse, look, fast)
                return replace(many, donor=replace(many.donor, prompt=meaning.whole)) if many.donor else many
            lookup = self.look_up(meaning, look)
            why, found = lookup.why, None
            others: list[tuple[Donor, Entry]] = []
            for candidate in lookup.candidates:
                try:
                    entry = self.store.entry(candidate.id)
                    donor = replace(self.donor(entry), similarity=candidate.similarity)
                except KeyError:
                    why = "the donor's entry is damaged or gone"
                    continue
                why = self.reuse.unfit(donor, fast)
                if why:
                    continue
                if found is None:
                    found = Found(reason(candidate), donor, entry, candidate)
                else:
                    others.append((donor, entry))
                if len(others) + 1 == self.reuse.donors:
                    break
            if found is None or found.donor is None:
                return Found(why)
            beside = tuple(donor for donor, _ in others)
            return replace(found, donor=replace(found.donor, others=beside), others=tuple(entry for _, entry in others))
        except Exception as error:  # whatever is wrong with a cache, the video is rendered
            return Found(told(error))

    def find_many(self, reuse: Learner, look: Look, fast: Sequence[float]) -> Found:
        """What the method learned from many entries, once for all requests of a kind; anew after a render that was kept."""
        key = self.kind(look)
        if key not in self.gathered:
            try:
                found = self.gather(reuse, look, fast)
            except Exception as error:  # told in every row, but not tried for every row
                found = Found(told(error))
            earlier = self.earlier.pop(key, None)
            self.gathered[key] = earlier if earlier and not found.donor else found
        return self.gathered[key]

    def gather(self, reuse: Learner, look: Look, fast: Sequence[float]) -> Found:
        """Learn from the newest entries that fit."""
        entries = self.teachers(reuse, look)
        if len(entries) < reuse.least_donors:
            return Found(self.few(reuse, look, len(entries)))
        opened = self.solved_alike(look, self.namespace(look, OPENING))[::-1][: reuse.openings]
        teachers = Reader(self, entries[::-1], reuse.donors, lambda donor: not reuse.unfit(donor, fast))
        lesson = reuse.learn(cast("Backbone", self.files), look, teachers, Reader(self, opened, len(opened)))
        used = teachers.used
        if lesson is None or len(used) < reuse.least_donors:
            return Found(self.few(reuse, look, len(used)))
        if not self.options.readonly:
            for entry in used:  # they are in use: others make room first
                self.store.touch(entry.id, look.num_inference_steps - len(reuse.leaps(look.num_inference_steps)))
        prompts = {entry.prompt for entry in (*opened, *used)}
        self.opened[self.kind(look)] = Opened(prompts, math.ceil(GROWTH * len(prompts)))
        return Found(learned(len(used), lesson.prompts), Donor(lesson=lesson), used[0])

    def donor(self, entry: Entry) -> Donor:
        kept = self.store.latents(entry.id)
        sigmas = {int(step): sigma for step, sigma in entry.schedule["sigmas"].items()}
        latents, estimates = (
            {step: kept[f"{kind}{step}"] for step in sigmas if f"{kind}{step}" in kept} for kind in (STEP, ESTIMATE)
        )
        return Donor(latents, sigmas, kept.get(CLEAN), estimates=estimates)

    def keep_opening(self, meaning: Meaning | None, look: Look, run: Trajectory) -> None:
        """Store what the model said first to a hit, once for a prompt; with enough more of them the lesson is learned anew."""
        estimate, opened = run.estimates.get(0), self.opened.get(self.kind(look))
        if (
            estimate is None
            or meaning is None
            or opened is None
            or self.options.readonly
            or not isinstance(self.reuse, Learner)
        ):
            return
        if meaning.prompt in opened.prompts or len(opened.prompts) >= self.reuse.openings:
            return
        size = (look.height, look.width, look.num_frames)
        schedule = {**solved(look), "sigmas": {"0": run.sigmas[0]}}
        entry = Entry(meaning.prompt, (), self.namespace(look, OPENING), self.record.name, look.seed, schedule, size, 0.0)
        try:
            if self.store.used() + self.entry_bytes(look, 1) > self.options.budget:
                return  # no full render makes room for it
            self.store.put(entry, {f"{ESTIMATE}0": estimate}, meaning.unnamed().vectors)
        except Exception:  # a cache that cannot be written is not worth a video
            return
        opened.prompts.add(meaning.prompt)
        if len(opened.prompts) >= opened.enough:
            opened.enough = math.ceil(GROWTH * len(opened.prompts))
            if found := self.gathered.pop(self.kind(look), None):
                self.earlier[self.kind(look)] = found  # stays if nothing comes of it

    def keep(self, meaning: Meaning | None, look: Look, run: Trajectory, seconds: float, frames: np.ndarray) -> str:
        """Store a dense render. Returns why it was not stored, or nothing."""
        why = self.trouble or ("the cache is read-only" if self.options.readonly else "")
        self.dense_seconds.setdefault(self.size(look), []).append(seconds)
        if why or meaning is None:
            return why
        if self.reuse.useless(look.num_inference_steps):
            return "too few steps to be a donor"
        size = (look.height, look.width, look.num_frames)
        schedule = {
            **solved(look),
            "sigmas": {str(step): run.sigmas[step] for step in run.kept},
        }
        name = self.record.name
        entry = Entry(meaning.prompt, meaning.entities, self.namespace(look), name, look.seed, schedule, size, seconds)
        latents = {f"{STEP}{step}": value for step, value in run.kept.items()}
        if isinstance(self.reuse, Learner):
            latents |= {f"{ESTIMATE}{step}": value for step, value in run.estimates.items()}
        if self.reuse.keeps_clean:
            latents[CLEAN] = run.latents
        try:
            self.store.put(entry, latents, meaning.vectors, thumbnail(frames))
        except Exception as error:
            return told(error)
        self.gathered = {key: found for key, found in self.gathered.items() if found.donor}
        return ""

    def saved(self, found: Found, look: Look, seconds: float) -> float:
        """Seconds saved against the median dense render of the same size and steps of this run.

        The first of a run starts cold and counts only where it is the only one. If there was none, against the donor's own, in
        proportion to the steps.
        """
        assert found.entry is not None
        steps = look.num_inference_steps / found.entry.schedule["num_inference_steps"]
        dense = self.dense_seconds.get(self.size(look)) or [found.entry.seconds * steps]
        return statistics.median(dense[1:] or dense) - seconds

    def size(self, look: Look) -> tuple[int, ...]:
        return look.height, look.width, look.num_frames, look.num_inference_steps

    def tell(self, event: Event, found: Found | None = None, steps_saved: int = 0) -> None:
        """Write down a look-up; a hit also counts for its donor. A cache that cannot be written forgets it."""
        if self.trouble or self.options.readonly:
            return
        try:
            if found and found.entry and found.candidate:
                self.store.touch(found.entry.id, steps_saved)
            self.store.log(asdict(replace(event, time=time.time())))
        except Exception:
            return

    def close(self) -> None:
        self.store.close()


@dataclass
class Opened:
    """Prompts whose first estimates are known, and how many are enough to learn anew."""

    prompts: set[str]
    enough: int


@dataclass
class Reader:
    """Donors with their prompts, read one at a time, and again each time that they are gone through.

    Attributes:
        most: So many are enough.
        used: Those of the last time.
    """

    donors: Donors
    entries: Sequence[Entry]
    most: int
    fits: Callable[[Donor], bool] = lambda donor: True
    used: list[Entry] = field(default_factory=list)

    def __iter__(self) -> Iterator[Donor]:
        self.used = []
        for entry in self.entries:
            if len(self.used) == self.most:
                return
            with suppress(KeyError):  # damaged or gone
                donor = self.donors.donor(entry)
                rows = self.donors.store.vectors(entry.namespace, PROMPT, [entry.id]).get(entry.id)
                if self.fits(donor):
                    self.used.append(entry)
                    yield replace(donor, prompt=rows[0][1] if rows else None)


def learned(count: int, prompts: int = 0) -> str:
    first = f", its first step from {prompts} prompts" if prompts else ""
    return f"learned from {count} full renders{first}"


def solved(look: Look) -> dict[str, Any]:
    """How a request is solved: what must be the same for the errors of its steps to be."""
    return {
        "scheduler": look.scheduler,
        "num_inference_steps": look.num_inference_steps,
        "guidance_scale": look.guidance_scale,
        "negative_prompt": look.negative_prompt,
        "fps": look.fps,
        "aesthetic_score": look.aesthetic_score,
    }


def told(error: Exception) -> str:
    return str(error) if isinstance(error, StoreError) else f"the cache failed ({type(error).__name__}: {first_line(error)})"


def thumbnail(frames: np.ndarray) -> bytes:
    """The middle frame of uint8 [T, H, W, 3], as a small JPEG."""
    from PIL import Image

    picture = Image.fromarray(frames[len(frames) // 2])
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
