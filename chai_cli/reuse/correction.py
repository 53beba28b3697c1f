"""Few steps, each corrected by what full renders in the cache teach about its error.

A step that leaps over many is wrong in much the same way for every prompt: guidance, the curved path and the solver's order make it
so. A full render knows by how much: its latents at the far end of the leap, less where the solver arrives that is led along its path.
From the renders in the cache a linear map is fitted by ridge regression, for every step one, from what the solver sees around a
place (the clean estimate now and at the step before, and the latents) to that error; a hit adds the map's answer after each of its
steps. It costs no model call, starts from the request's own noise, and the renders need not be of related prompts.

Where the cache knows enough prompts, the first step takes no model call either: see `opening.py`. The maps are then fitted on what
each render's first step would have been told without it.

A solver with a corrector, such as UniPC, goes on from latents of its own: there the corrected ones are what the model looks at next,
and the last of them is the result. Fit and hit go the same way, so the map answers for what such a solver still lacks.

Earlier work corrects a sampler's truncation error with parameters that are trained beforehand (PAS, arXiv 2411.06503; bespoke
solvers, arXiv 2403.01329); here they come from the renders that the user has made anyway.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from chai_cli.denoise import leap
from chai_cli.errors import ChaiError
from chai_cli.reuse.base import OTHER_LATENTS, Donor, Plan, Step
from chai_cli.reuse.opening import Opening

if TYPE_CHECKING:
    from chai_cli.backbones.base import Backbone, Look

NEAR, WIDE = 3, 7  # cells of a frame over which the surroundings of a place are averaged, each way
PENALTIES = (32.0, 128.0, 512.0, 2048.0, 8192.0)  # on a map: as so many places at which nothing is to be corrected
GOOD = 16  # renders beyond which a map hardly gets better
SMALL = 2**20  # numbers in the latents of a render, below which it is learned on one thread
FOLDS = 4  # parts of the renders that are left out in turn to choose the penalty
PLACES = 2**14  # of a donor that a map is fitted on, at most


@dataclass(frozen=True)
class CorrectionOptions:
    """How a hit runs and what it learns from.

    Attributes:
        fast_steps: Solver steps of a hit.
        lean: How its steps crowd where noise is high: step k of n stands at (k/n)^lean of the full schedule; 1 spreads them evenly.
        least, most: Renders it needs, and those it learns from at most: the newest.
        strength: Share of the learned error that is taken away; 0 is plain sampling at the same noise levels.
        guess: How much of the variance of first estimates must be foretold of prompts that were left out, before a hit takes the
            guess for its first step; 1: never.
        openings: First estimates that it reads at most, besides those of its renders.
    """

    fast_steps: int = 8
    lean: float = 1.4
    least: int = 8
    most: int = 64
    strength: float = 1.0
    guess: float = 0.8
    openings: int = 256

    def __post_init__(self) -> None:
        if self.fast_steps < 1:
            raise ChaiError(f"fast steps must be at least 1, not {self.fast_steps}")
        if not 0.5 <= self.lean <= 3:
            raise ChaiError(f"lean lies between 0.5 and 3, not {self.lean}")
        if not 1 <= self.least <= self.most:
            raise ChaiError(f"least must be from 1 to most ({self.most}), not {self.least}")
        if not 0 <= self.strength <= 1.5:
            raise ChaiError(f"strength lies between 0 and 1.5, not {self.strength}")
        if not 0 <= self.guess <= 1:
            raise ChaiError(f"guess lies between 0 and 1, not {self.guess}")
        if self.openings < 0:
            raise ChaiError(f"openings must be 0 or more, not {self.openings}")

    @property
    def by_prompt(self) -> float:
        return -1.0

    @property
    def donors(self) -> int:
        return self.most

    @property
    def least_donors(self) -> int:
        return self.least

    @property
    def good_donors(self) -> int:
        return max(GOOD, self.least)

    @property
    def keeps_clean(self) -> bool:
        return True

    @property
    def latents_kept(self) -> int:
        return 2 * self.fast_steps + 1

    def schedule(self, steps: int) -> int:
        return steps

    def useless(self, steps: int) -> str:
        return f"a hit takes {self.fast_steps} steps, and this takes no more" if steps <= self.fast_steps else ""

    def leaps(self, steps: int) -> tuple[int, ...]:
        """The steps (from 0) of a full schedule that a hit runs."""
        found: list[int] = []
        for k in range(self.fast_steps):
            place = round(steps * (k / self.fast_steps) ** self.lean)
            found.append(max(place, found[-1] + 1) if found else 0)
        most = [steps - self.fast_steps + k for k in range(self.fast_steps)]
        return tuple(min(pair) for pair in zip(found, most, strict=True))

    def kept(self, dense: Sequence[float], fast: Sequence[float]) -> frozenset[int]:
        return frozenset(self.leaps(len(dense))) if len(dense) > self.fast_steps else frozenset()

    def unfit(self, donor: Donor, fast: Sequence[float]) -> str:
        leaps = self.leaps(len(fast))
        fits = donor.clean is not None and all(
            step in donor.steps and step in donor.estimates and abs(donor.sigmas[step] - fast[step]) < 1e-3 for step in leaps
        )
        return "" if fits else OTHER_LATENTS

    def check(self, backbone: Backbone) -> None:
        pass

    def learn(
        self, backbone: Backbone, look: Look, donors: Iterable[Donor], openings: Iterable[Donor] = ()
    ) -> Corrections | None:
        with on_one_thread() if math.prod(backbone.latent_shape(look)) < SMALL else nullcontext():
            return self.learned(backbone, look, donors, openings)

    def learned(self, backbone: Backbone, look: Look, donors: Iterable[Donor], openings: Iterable[Donor]) -> Corrections | None:
        opening = None
        if self.guess < 1 and self.fast_steps > 1:
            told = ((donor.prompt, donor.estimates[0]) for donor in chain(donors, openings))
            with suppress(RuntimeError, MemoryError):  # then the model is asked
                opening = Opening.of((prompt, estimate) for prompt, estimate in told if prompt is not None)
        if opening and not opening.share >= self.guess:
            opening = None
        maps = fit(backbone, look, self.leaps(look.num_inference_steps), (untold(donor, opening) for donor in donors))
        return Corrections(maps, opening) if maps else None

    def hit(self, backbone: Backbone, donor: Donor) -> Corrected:
        opening = donor.lesson.opening
        first = opening.guess(donor.prompt) if opening and donor.prompt is not None else None
        return Corrected(donor.lesson.maps, self, first)


@dataclass(frozen=True)
class Corrections:
    """What the renders taught.

    Attributes:
        maps: One [F, C] for each step of a hit.
        opening: What the first step is told from, if it is.
    """

    maps: list[Tensor]
    opening: Opening | None = None

    @property
    def prompts(self) -> int:
        return len(self.opening.rows) if self.opening else 0


def untold(donor: Donor, opening: Opening | None) -> Donor:
    """A donor whose first estimate is what a hit would have been told in its place."""
    if opening is None or donor.prompt is None:
        return donor
    return replace(donor, estimates={**donor.estimates, 0: opening.left_out(donor.prompt)})


class Corrected:
    """The run of a hit."""

    name = "correction"

    def __init__(self, maps: list[Tensor], options: CorrectionOptions, first: Tensor | None = None) -> None:
        self.maps = maps
        self.options = options
        self.first = first
        self.earlier: Tensor | None = None

    def plan(self, look: Look) -> Plan:
        leaps = self.options.leaps(look.num_inference_steps)
        if self.first is not None:
            return Plan(look.num_inference_steps, leaps=leaps, given={0: self.first})
        wanted = self.options.guess < 1  # what the model says first, later prompts may be told from
        return Plan(look.num_inference_steps, leaps=leaps, record=frozenset({0}) if wanted else frozenset())

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        return noise

    def around(self, step: Step) -> AbstractContextManager[Any]:
        return nullcontext()

    def after(self, step: Step, latents: Tensor, before: Tensor, estimate: Tensor) -> Tensor:
        seen = features(estimate, before, self.earlier)
        self.earlier = estimate
        channels = latents.shape[1]
        error = (seen @ self.maps[step.index].to(seen.device)).reshape(*latents.shape[:1], *latents.shape[2:], channels)
        return latents + self.options.strength * error.movedim(-1, 1)


def features(estimate: Tensor, latents: Tensor, earlier: Tensor | None) -> Tensor:
    """What a map reads at each place, [B * T * H * W, F].

    Args:
        estimate, latents: Clean estimate and latents of a step, [B, C, T, H, W].
        earlier: The estimate of the step before; None at the first.
    """
    parts = [estimate, around(estimate, NEAR), around(estimate, WIDE), latents]
    if earlier is not None:
        parts += [earlier, around(earlier, NEAR)]
    rows = torch.cat([part.float() for part in parts], 1).movedim(1, -1).flatten(0, -2)
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1)


def around(latents: Tensor, cells: int) -> Tensor:
    """The mean over the surroundings within a frame."""
    frames = latents.float().flatten(1, 2)
    return avg_pool2d(frames, cells, 1, cells // 2, count_include_pad=False).view_as(latents)


@contextmanager
def on_one_thread() -> Iterator[None]:
    """For many small sums: threads would mostly wait for each other, on a busy machine for seconds. Not for several threads at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def fit(backbone: Backbone, look: Look, leaps: Sequence[int], donors: Iterable[Donor]) -> list[Tensor]:
    """A map [F, C] for each leap, ridge regression over places of all donors; none without donors.

    Every donor's path is gone again with the solver, leap by leap, from its own latents and estimates: what is missing at the end of
    each leap is what the map learns.
    """
    scheduler = backbone.schedule(look)
    leap(scheduler, leaps)
    scheduler.set_begin_index(0)
    folds: list[list[Sums]] = [[] for _ in leaps]
    for number, donor in enumerate(donors):
        parts = errors(copy.deepcopy(scheduler), leaps, donor, backbone.device)
        for fold, (seen, error) in zip(folds, parts, strict=True):
            sums = Sums.of(seen, error)
            if number < FOLDS:
                fold.append(sums)
            else:
                fold[number % FOLDS] += sums
    return [ridge(fold) for fold in folds if fold]


def errors(scheduler: Any, leaps: Sequence[int], donor: Donor, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """For each leap of one donor what a map reads, [N, F], and what the solver missed there, [N, C], at places drawn at random."""
    assert donor.clean is not None
    path = [donor.steps[step].to(device).float() for step in leaps] + [donor.clean.to(device).float()]
    estimates = [donor.estimates[step].to(device).float() for step in leaps]
    drawn = torch.randperm(path[0][:, 0].numel(), generator=torch.Generator().manual_seed(0))[:PLACES].to(device)
    for index, time in enumerate(scheduler.timesteps):
        velocity = (path[index] - estimates[index]) / float(scheduler.sigmas[index])
        reached = scheduler.step(velocity, time, path[index], return_dict=False)[0]
        seen = features(estimates[index], path[index], estimates[index - 1] if index else None)
        yield seen[drawn], (path[index + 1] - reached).movedim(1, -1).flatten(0, -2)[drawn]


@dataclass(frozen=True)
class Sums:
    """What least squares needs to know of some places, float64.

    Attributes:
        square: What was seen, with itself, [F, F].
        cross: What was seen, with the error, [F, C].
        error: The error, with itself.
    """

    square: Tensor
    cross: Tensor
    error: float

    @classmethod
    def of(cls, seen: Tensor, error: Tensor) -> Sums:
        return cls((seen.T @ seen).cpu().double(), (seen.T @ error).cpu().double(), float(error.pow(2).sum()))

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.square + other.square, self.cross + other.cross, self.error + other.error)

    def left(self, map: Tensor) -> float:
        """The squared error that a map leaves."""
        return self.error + float((map * (self.square @ map - 2 * self.cross)).sum())

    def solve(self, penalty: float) -> Tensor:
        return torch.linalg.solve(self.square + penalty * torch.eye(len(self.square), dtype=torch.float64), self.cross)


def ridge(folds: Sequence[Sums]) -> Tensor:
    """The map, float32, with the penalty that serves renders best which were left out; zero if it would serve none of them."""
    whole = functools.reduce(Sums.__add__, folds)
    if len(folds) == 1:  # nothing can be left out
        return whole.solve(PENALTIES[1]).float()
    rests = [functools.reduce(Sums.__add__, (*folds[:i], *folds[i + 1 :])) for i in range(len(folds))]
    penalty, least = None, whole.error
    for tried in PENALTIES:
        left = sum(fold.left(rest.solve(tried)) for fold, rest in zip(folds, rests, strict=True))
        if left < least:
            penalty, least = tried, left
    return (torch.zeros_like(whole.cross) if penalty is None else whole.solve(penalty)).float()
