"""What the loop asks a method. A method object serves one request and is then thrown away: no state survives it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from chai_cli.backbones.base import Look


@dataclass(frozen=True)
class Plan:
    """Which steps run and which latents are kept. Steps count from 0; `stop_step` is the first that does not run."""

    start_step: int = 0
    stop_step: int | None = None
    record: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Step:
    """One solver step about to run: sigma 1 is pure noise, 0 is clean."""

    index: int
    total: int
    sigma: float
    timestep: Tensor


class Method(Protocol):
    name: str

    def plan(self, look: Look) -> Plan:
        """Decide before the first step."""

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        """Latents to begin with, [1, C, T, H, W]."""

    def around(self, step: Step) -> AbstractContextManager[None]:
        """What holds while the model runs this step."""

    def after(self, step: Step, latents: Tensor) -> Tensor:
        """Latents to go on with."""
