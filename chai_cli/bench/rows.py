"""The rows of a bench: methods with their options, plain sampling with fewer steps, in-request caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chai_cli.errors import ChaiError
from chai_cli.reuse import DENSE, METHODS, reuse_of
from chai_cli.reuse.base import Reuse

if TYPE_CHECKING:
    from chai_cli.bench.peers import Peer

FRONTIER_STEPS = (1, 2, 3, 4, 6, 8, 12, 16)
SCHEDULERS = ("euler", "unipc")
# Rows that answer one question each; `--set NAME` takes them all.
SETS: dict[str, tuple[str, ...]] = {
    # Few steps corrected by what full renders teach, beside the same steps with the model asked in the first, and without correction.
    "correction": (
        *(f"correction:fast-steps={count}" for count in (3, 4, 5)),
        *(f"correction:fast-steps={count},guess=1" for count in (3, 4, 5)),
        *(f"correction:fast-steps={count},guess=1,strength=0" for count in (3, 4, 5)),
        "correction:fast-steps=4,guess=1,least=4,most=4",
    ),
    # Does Cache Attention as published beat plain sampling in as few steps?
    "published": tuple(f"chai:fast-steps={count}" for count in (2, 3, 4, 6, 8, 12)),
    # Which of its forms is best?
    "variants": (
        "chai:fast-steps=4",
        "chai:fast-steps=4,match=sigma",
        "chai:fast-steps=4,match=final",
        "chai:fast-steps=4,steps=1",
        "chai:fast-steps=4,steps=2",
        "chai:fast-steps=4,steps=1/2/3/4,match=sigma",
        "chai:fast-steps=4,sides=cond",
        "chai:fast-steps=4,blocks=2",
        "chai:fast-steps=4,blocks=1/2/3/4,match=sigma",
        "chai:fast-steps=4,mode=append",
        "chai:fast-steps=4,mode=append,match=sigma",
        "chai:fast-steps=4,mode=append,match=final",
        "chai:fast-steps=4,mode=append,match=final,blocks=1/2/3/4",
        "chai:fast-steps=4,mode=append,match=final,donors=3",
        "chai:fast-steps=4,match=sigma,donors=3",
    ),
    # Starting from the donor, alone and together with attending to it.
    "starts": (
        "nirvana:scheduler=euler",
        "nirvana:fast-steps=8,scheduler=euler",
        "nirvana:fast-steps=8",
        *(f"nirvana:fast-steps=6,start-sigma={sigma}" for sigma in (0.95, 0.9, 0.8, 0.7)),
        *(f"nirvana:fast-steps=6,start-sigma={sigma},source=clean" for sigma in (0.95, 0.9, 0.8, 0.7)),
        "nirvana+chai:fast-steps=6,start-sigma=0.9,source=clean,match=final,steps=2/3/4",
        "nirvana+chai:fast-steps=6,start-sigma=0.9,match=sigma,steps=2/3/4",
    ),
}


@dataclass(frozen=True)
class Row:
    """One way of rendering every request.

    Attributes:
        label: As it was asked for: the row's name in tables and files.
        steps: Solver steps of the schedule; None for the request's own.
        scheduler: None for the request's own.
        reuse: What a hit does; None for plain sampling.
        peer: An in-request cache around plain sampling.
    """

    label: str
    steps: int | None = None
    scheduler: str | None = None
    reuse: Reuse | None = None
    peer: Peer | None = None

    @property
    def plain(self) -> bool:
        return self.reuse is None and self.peer is None


def row_of(spec: str) -> Row:
    """`chai:match=sigma`, `nirvana`, `dense:steps=8,scheduler=euler`, `first-block:threshold=0.1`.

    `scheduler` goes with every row, `steps` with plain sampling and in-request caches (Cache Attention's own `steps` are those
    that read the donor).

    Raises:
        ChaiError: no such method, option or value.
    """
    named, _, told = spec.partition(":")
    parts = {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in told.split(",") if part.strip())}
    scheduler = parts.pop("scheduler", None)
    if scheduler is not None and scheduler not in SCHEDULERS:
        raise ChaiError(f"{spec}: the scheduler is one of {', '.join(SCHEDULERS)}, not {scheduler!r}")
    reuses = all(name in METHODS for name in named.split("+"))
    steps = None if reuses else parts.pop("steps", None)
    if steps is not None and not (steps.isdecimal() and int(steps) > 0):
        raise ChaiError(f"{spec}: steps must be a whole number from 1, not {steps!r}")
    rest = named + (":" + ",".join(f"{key}={value}" for key, value in parts.items()) if parts else "")
    count = None if steps is None else int(steps)
    if named == DENSE or reuses:
        return Row(spec, count, scheduler, reuse_of(rest))
    from chai_cli.bench.peers import PEERS, peer_of

    if named not in PEERS:
        raise ChaiError(f"no method named {named!r}; there is {', '.join([*METHODS, DENSE, *PEERS])}")
    return Row(spec, count, scheduler, None, peer_of(rest))


def frontier(full: int, own: str, steps: Sequence[int] = FRONTIER_STEPS, schedulers: Sequence[str] = SCHEDULERS) -> list[Row]:
    """Plain sampling at few and at full steps with every solver, except what the reference is already.

    Args:
        full: The most steps that a request has.
        own: The model's own solver, which the reference uses.

    Raises:
        ChaiError: there is no such solver.
    """
    if unknown := [name for name in schedulers if name not in SCHEDULERS]:
        raise ChaiError(f"the scheduler is one of {', '.join(SCHEDULERS)}, not {unknown[0]!r}")
    few = [
        Row(f"dense:steps={count},scheduler={scheduler}", count, scheduler)
        for scheduler in schedulers
        for count in steps
        if count < full
    ]
    return few + [Row(f"dense:scheduler={scheduler}", None, scheduler) for scheduler in schedulers if scheduler != own]
