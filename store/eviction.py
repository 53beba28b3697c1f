"""Which entry goes first when room is needed: policies as data, told figures and nothing of bytes or disks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """How an entry was used: seconds since the epoch of its storing and its last use, hits, and steps saved by them."""

    stored: float
    used: float
    hits: int
    saved: float


def lcbfu(use: Use) -> float:
    """NIRVANA's least-computation-benefit-and-frequently-used (NSDI'24): accesses times steps saved.

    Plain, a new entry has no accesses and would leave before it could ever hit; here it starts as if it had hit once and saved
    one step.
    """
    return (use.hits + 1) * (use.saved / use.hits if use.hits else 1.0)


POLICIES: dict[str, Callable[[Use], tuple[float, float]]] = {
    "lru": lambda use: (use.used, use.stored),
    "lfu": lambda use: (use.hits, use.used),
    "lcbfu": lambda use: (lcbfu(use), use.used),
}
