"""Filling the cache for a file of prompts: which prompts to render so that the most others find a donor, and rendering those."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chai_cli.backbones.base import Look, ModelRecord, Text, resolve, unscored
from chai_cli.batch import WAVE, told
from chai_cli.donors import Donors
from chai_cli.errors import ChaiError, first_line
from chai_cli.memory import is_out_of_memory
from chai_cli.progress import Progress
from chai_cli.prompts import Request
from chai_cli.render import Renderer, Understood
from chai_cli.report import Row
from chai_cli.retrieve import Cover, Meaning, choose_donors
from chai_cli.reuse.base import Learner
from store import Entry

MOST = 20_000  # prompts; who helps whom is a table of their square


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


def choose(requests: list[Request], record: ModelRecord, scheduler: str | None, donors: Donors, limit: int | None) -> Choice:
    """Greedy cover within each namespace (prompts of different sizes cannot help each other), within the cache's budget.

    Raises:
        ChaiError: more prompts than can be weighed against each other in memory, or none that can be a donor.
    """
    if len(requests) > MOST:
        raise ChaiError(f"{len(requests):,} prompts are too many to weigh at once; give a file of at most {MOST:,}")
    learner = donors.reuse if isinstance(donors.reuse, Learner) else None
    groups: dict[tuple[Any, ...], list[tuple[Request, Look]]] = {}
    few = ""
    for request in requests:
        look = resolve(record, request.settings, scheduler)
        if unscored(record, look):  # chai gen will not render it
            continue
        if why := donors.reuse.useless(look.num_inference_steps):
            few = why
            continue
        groups.setdefault(donors.kind(look) if learner else (donors.namespace(look),), []).append((request, look))
    if few and not groups:
        raise ChaiError(f"no prompt can be a donor: {few}; give more --num-inference-steps")
    ranked: list[tuple[int, tuple[Request, Look, Meaning]]] = []
    cached = 0
    for (name, *_), group in groups.items():
        look, prompts = group[0][1], [request.prompt for request, _ in group]
        meanings = donors.understand(prompts)
        if learner:
            if why := donors.too_small(learner, look):
                raise ChaiError(why)
            known = donors.teachers(learner, look)
            left = len(group) if limit is None else limit - len(ranked)
            cover = spread(prompts, known, learner, min(donors.room(look) - len(known), left))
        else:
            retriever = donors.retriever
            similar = retriever.min_similarity, retriever.min_prompt_similarity
            wanted = [donors.wanted(meaning) for meaning in meanings]
            already = [donors.wanted(one) for one in donors.meanings(name)]
            room = max(1, donors.room(look))
            cover = choose_donors(wanted, similar[0], limit, room, already, similar[1], retriever.min_coverage)
        cached += cover.covered - sum(cover.gains)
        ranked += [(gain, (*group[place], meanings[place])) for place, gain in zip(cover.chosen, cover.gains, strict=True)]
    ranked.sort(key=lambda pair: -pair[0])
    ranked = ranked[:limit]
    return Choice([what for _, what in ranked], cached + sum(gain for gain, _ in ranked), len(requests), cached)


def spread(prompts: list[str], known: list[Entry], reuse: Learner, most: int) -> Cover:
    """As many prompts as a method lacks to learn well, from all over the file; with them it serves every prompt.

    Args:
        known: Entries that it can learn from.
        most: At most so many are chosen.
    """
    there = {entry.prompt for entry in known}
    free = [place for place, prompt in enumerate(prompts) if prompt not in there]
    lacking = max(0, min(reuse.good_donors - len(known), len(free), most))
    chosen = [free[number * len(free) // lacking] for number in range(lacking)]
    if len(known) + lacking < reuse.least_donors:
        return Cover(chosen, [1] * lacking, lacking, len(prompts))
    already = len(known) >= reuse.least_donors
    gains = [0 if already else 1] * lacking
    if lacking and not already:
        gains[0] += len(prompts) - lacking
    return Cover(chosen, gains, len(prompts), len(prompts))


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
            for start in range(0, len(choice.chosen), WAVE):
                wave = choice.chosen[start : start + WAVE]
                texts = [encoded(request, look, renderer) for request, look, _ in wave]
                renderer.backbone.release_text_encoder()
                for (request, look, meaning), text in zip(wave, texts, strict=True):
                    progress.begin(request.name)
                    row = warm_one(request, look, meaning, text, renderer, progress)
                    report(row)
                    progress.end(row)
                    if row.not_stored:
                        raise ChaiError(f"the cache cannot be filled: {row.not_stored}")
        finally:
            progress.stop()


def encoded(request: Request, look: Look, renderer: Renderer) -> tuple[Text, float] | Exception:
    """A prompt's embeddings and the seconds they took, or why there are none."""
    try:
        return renderer.encode(request.prompt, look)
    except Exception as error:
        error.__traceback__ = None  # it holds tensors
        renderer.backbone.free_memory()
        return error


def warm_one(
    request: Request,
    look: Look,
    meaning: Meaning,
    text: tuple[Text, float] | Exception,
    renderer: Renderer,
    progress: Progress,
) -> Row:
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
        if isinstance(text, Exception):
            raise text
        understood = Understood(*text, meaning)
        made = renderer.render(request.name, look, understood, {"prompt": request.prompt}, None, progress.step)
    except Exception as error:
        error.__traceback__ = None  # it holds tensors
        renderer.backbone.free_memory()
        hint = "; try --offload model, --vae-tiling or a smaller size" if is_out_of_memory(error) else ""
        return replace(row, status="failed", why=first_line(error) + hint)
    return replace(row, **told(made))
