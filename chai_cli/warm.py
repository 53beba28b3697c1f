"""Filling the cache for a file of prompts: which prompts to render so that the most others find a donor, and rendering those."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from chai_cli.backbones.base import Look, ModelRecord, resolve
from chai_cli.batch import told
from chai_cli.donors import Donors
from chai_cli.errors import ChaiError, first_line
from chai_cli.progress import Progress
from chai_cli.prompts import Request
from chai_cli.render import Renderer, Understood, is_out_of_memory
from chai_cli.report import Row
from chai_cli.retrieve import Meaning, choose_donors

MOST = 20_000  # prompts; who helps whom is a table of their square
PAGES = 1.3  # an entry on disk over its latents: vectors, thumbnail, half-filled pages


@dataclass(frozen=True)
class Choice:
    """What to render.

    Attributes:
        chosen: Requests with their settings and meanings, best gain first.
        covered: Prompts that have a donor then, the chosen ones and those that the cache covers already included.
        total: All prompts.
        cached: Prompts that the cache covers already.
    """

    chosen: list[tuple[Request, Look, Meaning]] = field(default_factory=list)
    covered: int = 0
    total: int = 0
    cached: int = 0

    def words(self) -> str:
        """One sentence for the user, before anything is rendered."""
        there = f" (the cache covers {self.cached} already)" if self.cached else ""
        if not self.chosen:
            return f"nothing to render: the cache covers {self.covered} of {self.total} prompts"
        return f"{len(self.chosen)} of {self.total} prompts cover {self.covered}{there}"


def entry_bytes(donors: Donors, look: Look) -> int:
    """What an entry will take on disk, about."""
    width = {"float32": 4, "int8": 1}.get(donors.options.numbers, 2)
    return math.ceil(math.prod(donors.files.latent_shape(look)) * width * donors.reuse.latents_kept * PAGES) + 16_384


def choose(requests: list[Request], record: ModelRecord, scheduler: str | None, donors: Donors, limit: int | None) -> Choice:
    """Greedy cover within each namespace (prompts of different sizes cannot help each other), within the cache's budget.

    Raises:
        ChaiError: more prompts than can be weighed against each other in memory.
    """
    if len(requests) > MOST:
        raise ChaiError(f"{len(requests):,} prompts are too many to weigh at once; give a file of at most {MOST:,}")
    groups: dict[str, list[tuple[Request, Look]]] = {}
    for request in requests:
        look = resolve(record, request.settings, scheduler)
        groups.setdefault(donors.namespace(look), []).append((request, look))
    ranked, cached = [], 0
    for name, group in groups.items():
        meanings = donors.understand([request.prompt for request, _ in group])
        already = donors.meanings(name)
        retriever = donors.retriever
        similar = retriever.min_similarity, retriever.min_prompt_similarity
        room = max(1, donors.options.budget // entry_bytes(donors, group[0][1]))
        wanted = [donors.wanted(meaning) for meaning in meanings]
        known = [donors.wanted(one) for one in already]
        cover = choose_donors(wanted, similar[0], limit, room, known, similar[1], retriever.min_coverage)
        cached += cover.covered - sum(cover.gains)
        ranked += [(gain, (*group[place], meanings[place])) for place, gain in zip(cover.chosen, cover.gains, strict=True)]
    ranked.sort(key=lambda pair: -pair[0])
    ranked = ranked[:limit]
    return Choice([what for _, what in ranked], cached + sum(gain for gain, _ in ranked), len(requests), cached)


def warm(choice: Choice, renderer: Renderer, progress: Progress, report: Callable[[Row], None]) -> None:
    """Render the chosen prompts densely and keep each as it is done: stopped at any time, the next call goes on.

    One failure is one row; a cache that takes no more ends the run, since nothing else would be gained.

    Raises:
        ChaiError: the cache cannot be filled.
    """
    assert renderer.donors is not None
    with tempfile.TemporaryDirectory(prefix="chai-") as scratch:
        renderer.scratch = Path(scratch)
        progress.start(len(choice.chosen))
        try:
            for request, look, meaning in choice.chosen:
                progress.begin(request.name)
                row = warm_one(request, look, meaning, renderer, progress)
                report(row)
                progress.end(row)
                if row.not_stored:
                    raise ChaiError(f"the cache cannot be filled: {row.not_stored}")
        finally:
            progress.stop()


def warm_one(request: Request, look: Look, meaning: Meaning, renderer: Renderer, progress: Progress) -> Row:
    row = Row(
        id=request.id or request.name,
        index=request.index,
        prompt=request.prompt,
        status="done",
        seed=look.seed,
        height=look.height,
        width=look.width,
        num_frames=look.num_frames,
        fps=look.fps,
        method="dense",
        model=renderer.backbone.record.name,
    )
    try:
        understood = Understood(*renderer.encode(request.prompt, look), meaning)
        made = renderer.render(request.name, look, understood, {"prompt": request.prompt}, None, progress.step)
    except Exception as error:
        renderer.backbone.free_memory()
        hint = "; try --offload model, --vae-tiling or a smaller size" if is_out_of_memory(error) else ""
        return replace(row, status="failed", why=first_line(error) + hint)
    return replace(row, **told(made))
