"""Bounds and intervals, and the frontier of plain sampling that every method is held against."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 5000
TINY = 1e-9  # two means of the same scores may differ by rounding


def upper_bound(bad: int, count: int) -> float:
    """The share of bad outcomes that the true one stays below with 95 % confidence, one-sided (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    return 1.0 if count == 0 or bad >= count else float(beta.ppf(CONFIDENCE, bad + 1, count - bad))


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Bootstrap interval (95 %, percentiles) of the mean of paired differences, one for each request."""
    values = np.asarray(differences, np.float64)
    if not len(values):
        return float("nan"), float("nan")
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Setting:
    """Plain sampling with some steps and a solver.

    Attributes:
        seconds: Of one request.
        scores: What each request's clip scores [N].
    """

    label: str
    seconds: float
    scores: tuple[float, ...]

    @property
    def fidelity(self) -> float:
        return statistics.fmean(self.scores)


@dataclass(frozen=True)
class Mix:
    """Two neighbouring settings of the frontier, and the share of the second."""

    low: Setting
    high: Setting
    share: float

    @property
    def fidelity(self) -> float:
        return (1 - self.share) * self.low.fidelity + self.share * self.high.fidelity

    def scores(self) -> np.ndarray:
        return (1 - self.share) * np.asarray(self.low.scores) + self.share * np.asarray(self.high.scores)


class Frontier:
    """The best that plain sampling gives at each price: the upper concave hull over its settings.

    A point between two settings is reached by rendering some requests with one and the rest with the other, so the hull is what
    a user without any cache can have.
    """

    def __init__(self, settings: Sequence[Setting]) -> None:
        hull: list[Setting] = []
        for setting in sorted(settings, key=lambda one: (one.seconds, -one.fidelity)):
            if hull and setting.fidelity <= hull[-1].fidelity:
                continue  # dearer and no better
            while len(hull) > 1 and slope(hull[-2], setting) >= slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(setting)
        self.hull = hull

    def at(self, seconds: float) -> Mix:
        """What plain sampling gives at a price; at one below the cheapest setting, the cheapest."""
        below = [setting for setting in self.hull if setting.seconds <= seconds] or self.hull[:1]
        above = [setting for setting in self.hull if setting.seconds > seconds]
        low = below[-1]
        if not above or low.seconds > seconds:
            return Mix(low, low, 0.0)
        return Mix(low, above[0], (seconds - low.seconds) / (above[0].seconds - low.seconds))

    def seconds_for(self, fidelity: float) -> float | None:
        """The least price of a fidelity; None if plain sampling does not reach it."""
        fidelity -= TINY
        if not self.hull or self.hull[-1].fidelity < fidelity:
            return None
        at = next(i for i, setting in enumerate(self.hull) if setting.fidelity >= fidelity)
        if at == 0:
            return self.hull[0].seconds
        low, high = self.hull[at - 1], self.hull[at]
        share = (fidelity - low.fidelity) / (high.fidelity - low.fidelity)
        return low.seconds + share * (high.seconds - low.seconds)


def slope(low: Setting, high: Setting) -> float:
    rise = high.fidelity - low.fidelity
    return rise / (high.seconds - low.seconds) if high.seconds > low.seconds else float("inf")
