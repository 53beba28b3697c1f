"""Two ways of reuse at once: start from the donor's latents, and attend to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chai_cli.reuse.base import Donor, Method, Plan, Reuse, Step

if TYPE_CHECKING:
    from torch import Tensor

    from chai_cli.backbones.base import Backbone, Look


@dataclass(frozen=True)
class JointOptions:
    """The first says where a hit starts and how many steps its schedule has, the second what holds around each step."""

    first: Reuse
    second: Reuse

    @property
    def by_prompt(self) -> float | None:
        return self.first.by_prompt

    @property
    def donors(self) -> int:
        return max(self.first.donors, self.second.donors)

    @property
    def keeps_clean(self) -> bool:
        return self.first.keeps_clean or self.second.keeps_clean

    @property
    def latents_kept(self) -> int:
        return self.first.latents_kept + self.second.latents_kept

    def schedule(self, steps: int) -> int:
        return self.first.schedule(steps)

    def useless(self, steps: int) -> str:
        return self.first.useless(steps)

    def kept(self, dense: Sequence[float], fast: Sequence[float]) -> frozenset[int]:
        return self.first.kept(dense, fast) | self.second.kept(dense, fast)

    def unfit(self, donor: Donor, fast: Sequence[float]) -> str:
        return self.first.unfit(donor, fast) or self.second.unfit(donor, fast)

    def check(self, backbone: Backbone) -> None:
        self.first.check(backbone)
        self.second.check(backbone)

    def hit(self, backbone: Backbone, donor: Donor) -> Joint:
        return Joint(self.first.hit(backbone, donor), self.second.hit(backbone, donor))


class Joint:
    """The run of a hit of two methods."""

    def __init__(self, first: Method, second: Method) -> None:
        self.first = first
        self.second = second
        self.name = f"{first.name}+{second.name}"

    def plan(self, look: Look) -> Plan:
        return self.first.plan(look)

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        return self.first.start(noise, plan)

    def around(self, step: Step) -> AbstractContextManager[Any]:
        return self.second.around(step)

    def after(self, step: Step, latents: Tensor, before: Tensor, estimate: Tensor) -> Tensor:
        return self.second.after(step, self.first.after(step, latents, before, estimate), before, estimate)
