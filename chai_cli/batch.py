"""A run over many requests: resume, one failure is one row, nothing half done."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from chai_cli.backbones.base import Look, ModelRecord, Placement, known_identity, read_files, resolve, unscored
from chai_cli.errors import ChaiError, first_line
from chai_cli.gallery import POSTERS, Gallery
from chai_cli.machine import versions
from chai_cli.progress import Progress
from chai_cli.prompts import BadLine, Request
from chai_cli.report import Report, Row
from chai_cli.reuse.base import Learner, Reuse
from chai_cli.video import enlargement, holds

if TYPE_CHECKING:
    from chai_cli.backbones.base import Text
    from chai_cli.donors import CacheOptions, Donors
    from chai_cli.preview import Preview
    from chai_cli.render import Rendered, Renderer
    from chai_cli.retrieve import Lookup

WAVE = 256  # prompts encoded before the transformer runs: bounds the memory of embeddings
LOG, PREVIEW = "run.log", "preview.gif"
STATUSES = ("done", "skipped", "failed")


@dataclass(frozen=True)
class Options:
    """How a whole run is done."""

    out: Path
    record: ModelRecord
    placement: Placement
    reuse: Reuse | None = None
    method: str = "dense"
    scheduler: str | None = None
    scale: int | None = None
    metadata: bool = True
    overwrite: bool = False
    gallery: bool = True
    preview: bool = False


@dataclass(frozen=True)
class Job:
    """A request with every choice made, and the file it becomes."""

    request: Request
    look: Look
    file: str
    wanted: dict[str, Any]


@dataclass
class Batch:
    """One run. `rows` holds every outcome so far, also after an interruption."""

    options: Options
    progress: Progress
    rows: list[Row] = field(default_factory=list)
    gallery: Gallery | None = None

    def __post_init__(self) -> None:
        self.scratch = self.options.out / ".chai"
        self.versions = versions()
        self.identity = known_identity(self.options.record)

    def scale(self, look: Look) -> int:
        return self.options.scale or enlargement(look.height, look.width)

    def job(self, request: Request) -> Job:
        options = self.options
        look = resolve(options.record, request.settings, options.scheduler)
        wanted = {
            "prompt": request.prompt,
            **asdict(look),
            "model": options.record.name,
            "weights": self.identity,
            "method": options.method,
            "reuse": asdict(options.reuse) if options.reuse else {},  # type: ignore[call-overload]
            "dtype": options.placement.dtype,
            "lora": list(options.placement.lora),
            "scale": self.scale(look),
            "metadata": options.metadata,
        }
        if look.aesthetic_score is None:  # most models know none
            del wanted["aesthetic_score"]
        return Job(request, look, f"{request.name}.mp4", json.loads(json.dumps(wanted)))

    def row(self, job: Job, status: str, **found: Any) -> Row:
        look, request = job.look, job.request
        return Row(
            id=request.id or request.name,
            index=request.index,
            prompt=request.prompt,
            status=status,
            file=job.file,
            seed=look.seed,
            height=look.height,
            width=look.width,
            num_frames=look.num_frames,
            fps=look.fps,
            method=self.options.method,
            model=self.options.record.name,
            request=job.wanted,
            unknown_words=self.unknown(request.prompt),
            versions=self.versions,
            **found,
        )

    def unknown(self, prompt: str) -> list[str]:
        ask = self.options.record.unknown_words
        return ask(prompt) if ask else []

    def split(self, requests: Iterable[Request], report: Report) -> tuple[list[Job], list[Job]]:
        """Jobs to do, and jobs that an earlier run finished."""
        todo: list[Job] = []
        finished: list[Job] = []
        for request in requests:
            job = self.job(request)
            there = not self.options.overwrite and (report.finished(job.file, job.wanted) or self.adopted(job, report))
            (finished if there else todo).append(job)
        return todo, finished

    def adopted(self, job: Job, report: Report) -> bool:
        """True for a whole video of this very request that the report knows nothing of: the report was lost, not the work."""
        path = self.options.out / job.file
        return job.file not in report.last and path.is_file() and holds(path, job.wanted)

    def plan(self, requests: list[Request]) -> tuple[list[Job], list[Job]]:
        """What `run` would do and skip. Touches nothing."""
        if self.options.out.exists() and not self.options.out.is_dir():
            raise ChaiError(f"cannot write to {self.options.out}: it is a file; choose another --out")
        return self.split(requests, Report(self.options.out / "report.jsonl"))

    def run(self, requests: list[Request], bad: list[BadLine], load: Callable[[], Renderer]) -> None:
        """Render every request that is not there yet.

        Args:
            load: Gives the renderer; called only if there is something to render.

        Raises:
            ChaiError: nothing can be rendered at all (no such model, the folder cannot be written, another run is there).
            KeyboardInterrupt: passed on; rows so far are on disk, unfinished files are gone.
        """
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.scratch / "lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise ChaiError(f"another chai gen is writing to {self.options.out}; wait for it or choose another --out") from None
        except OSError as error:
            raise ChaiError(f"cannot write to {self.options.out}: {error.strerror or error}; choose another --out") from None
        renderer: Renderer | None = None
        try:
            for torn in self.scratch.glob("*.part*"):
                torn.unlink()
            if any(self.options.out.glob("preview.*")):
                from chai_cli.preview import clear

                clear(self.options.out / PREVIEW)
            report = Report(self.options.out / "report.jsonl")
            todo, finished = self.split(requests, report)
            self.rows += [self.row(job, "skipped", why="already rendered") for job in finished]
            self.log(f"chai gen: {len(todo)} to render, {len(finished)} already there, {len(bad)} bad lines; {self.versions}")
            if self.options.gallery:
                self.gallery = Gallery(self.options.out, len(todo) + len(finished) + len(bad))
            self.show(self.rows)
            self.warn_unknown(todo)
            self.progress.start(len(todo) + len(bad))
            for line in bad:
                self.record(report, bad_row(line, self.versions))
            if todo:
                if not finished:
                    self.check_sizes(todo)
                renderer = load()
                self.warn_small(todo, renderer.donors)
                renderer.preview = self.preview(renderer)
                if self.gallery:
                    self.gallery.open()
                for start in range(0, len(todo), WAVE):
                    self.wave(todo[start : start + WAVE], renderer, report)
        finally:
            with suppress(OSError):  # the terminal is gone
                self.progress.stop()
            if renderer and renderer.preview:
                renderer.preview.close()
            if self.gallery:
                self.gallery.close()
                if self.gallery.trouble:
                    self.progress.note(f"no gallery: {self.gallery.trouble}")
            self.log(f"ended: {', '.join(f'{sum(row.status == s for row in self.rows)} {s}' for s in STATUSES)}")
            lock.release()
            if renderer and renderer.donors:
                renderer.donors.close()

    def preview(self, renderer: Renderer) -> Preview | None:
        if not self.options.preview:
            return None
        from platformdirs import user_cache_path

        from chai_cli.preview import Preview

        return Preview(self.options.out / PREVIEW, renderer.backbone.fingerprint, user_cache_path("chai") / "previews")

    def log(self, text: str) -> None:
        """Add to the run's log, `.chai/run.log`; a log that cannot be written is no failure."""
        with suppress(OSError), (self.scratch / LOG).open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def show(self, rows: Iterable[Row], renderer: Renderer | None = None) -> None:
        """Put rows into the gallery, with a picture of a donor that the cache knows."""
        if self.gallery is None:
            return
        for row in rows:
            if row.donor and renderer and renderer.donors:
                with suppress(Exception):
                    self.draw_donor(row.donor, renderer.donors)
            self.gallery.add(asdict(row))

    def draw_donor(self, id: str, donors: Donors) -> None:
        target = self.options.out / POSTERS / f"donor-{id}.jpg"
        if not target.exists() and (picture := donors.store.thumbnail(id)):
            target.parent.mkdir(exist_ok=True)
            beside = self.scratch / f"donor-{id}.part"
            beside.write_bytes(picture)
            beside.replace(target)

    def check_sizes(self, todo: list[Job]) -> None:
        """Say at once, before anything is loaded, if the model can make no request at all."""
        found = self.misfits(todo)
        if len(found) == len(todo):
            why = next(iter(found.values()))
            raise ChaiError(why if len(todo) == 1 else f"none of the {len(todo)} prompts can be rendered: {why}")

    def misfits(self, todo: list[Job]) -> dict[str, str]:
        """Requests that the model cannot make, by file, and why: sizes of their own, a score that it does not know."""
        record = self.options.record
        own = (record.height, record.width, record.num_frames)
        unusual = [job for job in todo if (job.look.height, job.look.width, job.look.num_frames) != own]
        files = read_files(record, self.options.placement) if unusual else None
        found = {job.file: why for job in todo if (why := unscored(record, job.look))}
        for job in unusual if files else ():
            try:
                files.latent_shape(job.look)  # type: ignore[union-attr]
            except ChaiError as error:
                found[job.file] = str(error)
        return found

    def predict(self, todo: list[Job], caching: CacheOptions) -> dict[str, Lookup]:
        """What the present cache would give, by file; nothing while the model is not on this disk or there is no cache."""
        if self.options.reuse is None or not todo or not (caching.path / "data.mdb").exists():
            return {}
        self.progress.note("looking into the cache …")
        files = read_files(self.options.record, self.options.placement)
        if files is None:
            return {}
        from chai_cli.donors import Donors

        donors = Donors(self.options.record, files, self.options.reuse, replace(caching, readonly=True))
        if donors.trouble:
            self.progress.note(f"no hits: {donors.trouble}")
            return {}
        meanings = donors.understand([job.request.prompt for job in todo])
        found = {}
        for job, meaning in zip(todo, meanings, strict=True):
            try:
                found[job.file] = donors.foresee(meaning, job.look)
            except ChaiError:  # a size that the model cannot make: its row will say so
                continue
        donors.close()
        return found

    def warn_unknown(self, jobs: list[Job]) -> None:
        """Name each word the model has never seen once, with the first prompts it stands in."""
        places: dict[str, list[int]] = {}
        for job in jobs:
            for word in self.unknown(job.request.prompt):
                places.setdefault(word, []).append(job.request.index)
        if places:
            told = [f"{word} (prompt {places[word][0]})" for word in list(places)[:20]]
            more = f" and {len(places) - 20} more, named in the rows" if len(places) > 20 else ""
            name = self.options.record.name
            self.progress.note(f"the {name} model does not know these words, and guesses: {', '.join(told)}{more}")

    def warn_small(self, todo: list[Job], donors: Donors | None) -> None:
        """Say at once if the cache is too small for any hit, not only in the row of each miss."""
        if donors is None or donors.trouble or not isinstance(donors.reuse, Learner):
            return
        found = {}
        for look in {donors.size(job.look): job.look for job in todo}.values():
            with suppress(ChaiError):  # a size that the model cannot make is told in its row
                why = donors.too_small(donors.reuse, look)
                if why and len(donors.teachers(donors.reuse, look)) < donors.reuse.least_donors:  # kept under a larger budget
                    found[f"{look.width}x{look.height}, {look.num_frames} frames"] = why
        for size, why in found.items():
            self.progress.note(f"no prompt of {size} can be a hit: {why}")

    def warn_cut(self, cut: list[tuple[Job, int]]) -> None:
        """Say which prompts are longer than the model reads."""
        if cut:
            told = [f"{job.request.index} ({tokens} tokens too long)" for job, tokens in cut[:10]]
            more = f" and {len(cut) - 10} more, with tokens_cut in their rows" if len(cut) > 10 else ""
            self.progress.note(f"the end of these prompts does not reach the model: {', '.join(told)}{more}; shorten them")

    def wave(self, jobs: list[Job], renderer: Renderer, report: Report) -> None:
        """Encode some prompts, then render them."""
        from chai_cli.render import Understood

        texts: dict[tuple[Any, ...], tuple[Text, float]] = {}
        ready = []
        for job in jobs:
            key = (job.request.prompt, job.look.negative_prompt, job.look.guidance_scale > 1, job.look.aesthetic_score)
            try:
                if why := unscored(self.options.record, job.look):
                    raise ChaiError(why)
                if key not in texts:
                    texts[key] = renderer.encode(job.request.prompt, job.look)
                    ready.append((job, texts[key]))
                else:
                    ready.append((job, (texts[key][0], 0.0)))
            except Exception as error:
                self.fail(job, error, renderer, report)
        renderer.backbone.release_text_encoder()
        self.warn_cut([(job, text.tokens_cut) for job, (text, _) in ready if text.tokens_cut])
        prompts = list(dict.fromkeys(job.request.prompt for job, _ in ready))
        meanings, meaning_seconds = renderer.understand(prompts)
        means = dict(zip(prompts, meanings, strict=bool(meanings)))
        for job, text in ready:
            self.progress.begin(job.request.name)
            target = self.options.out / job.file
            understood = Understood(*text, means.get(job.request.prompt), meaning_seconds)
            try:
                made = renderer.render(job.request.name, job.look, understood, job.wanted, target, self.progress.step)
            except Exception as error:
                self.fail(job, error, renderer, report)
                continue
            found = self.row(job, "done", bytes=target.stat().st_size, tokens_cut=text[0].tokens_cut, **told(made))
            self.record(report, found, renderer)

    def fail(self, job: Job, error: Exception, renderer: Renderer, report: Report) -> None:
        """One failed prompt is one row; the traceback goes to the log, memory is given back."""
        from chai_cli.memory import is_out_of_memory

        self.log(f"{job.file} failed\n{''.join(traceback.format_exception(error))}")
        if "No space left" in str(error):
            why = f"the disk of {self.options.out} is full; free some space and run again"
        elif is_out_of_memory(error):
            look = job.look
            why = (
                f"out of memory at {look.width}x{look.height}, {look.num_frames} frames: try --offload model, "
                "--vae-tiling, fewer --num-frames or a smaller --height and --width"
            )
        else:
            said = first_line(error)
            why = said if isinstance(error, ChaiError) else f"{type(error).__name__}: {said} (see .chai/{LOG})"
        error.__traceback__ = None
        renderer.backbone.free_memory()
        self.record(report, self.row(job, "failed", why=why))

    def record(self, report: Report, row: Row, renderer: Renderer | None = None) -> None:
        self.rows.append(row)
        try:
            report.append(row)
        except OSError as error:
            raise ChaiError(f"cannot write {report.path}: {error.strerror or error}; free some space and run again") from None
        self.show([row], renderer)
        self.progress.end(row)


def told(made: Rendered) -> dict[str, Any]:
    """What a row says about a render."""
    found: dict[str, Any] = {
        "steps": made.steps,
        "model_calls": made.model_calls,
        "seconds": {key: round(value, 4) for key, value in made.seconds.items()},
        "peak_memory_mib": round(made.peak_memory_mib, 1),
    }
    if made.latents_reused:
        found["why"] = "decoded the latents kept from an earlier run"
    if made.found is None:
        return found
    found |= {"reuse": "miss", "why": made.found.why, "not_stored": made.not_stored}
    if made.found.donor:
        found |= {"reuse": "hit", "calls_saved": made.calls_saved, "seconds_saved": round(made.seconds_saved, 4)}
    if made.found.entry and made.found.candidate:
        found |= {
            "donor": made.found.entry.id,
            "donor_prompt": made.found.entry.prompt,
            "similarity": round(made.found.candidate.similarity, 4),
            "shared": [asdict(pair) for pair in made.found.candidate.shared],
        }
    return found


def bad_row(line: BadLine, found: dict[str, str]) -> Row:
    return Row(
        id=f"line-{line.line}",
        index=line.index,
        prompt=line.text,
        status="failed",
        why=f"line {line.line}: {line.why}",
        versions=found,
    )
