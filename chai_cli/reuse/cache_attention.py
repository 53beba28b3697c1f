"""Cache Attention (CHAI, arXiv 2602.16132): a short run whose first block attends, in a few early steps, to a donor's latents.

It works with every solver: the donor reaches the run only through keys and values, never as its latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chai_cli.errors import ChaiError
from chai_cli.reuse.base import OTHER_LATENTS, Donor, Plan, Step

if TYPE_CHECKING:
    from diffusers.hooks.hooks import CacheContext
    from torch import Tensor

    from chai_cli.backbones.base import Backbone, Look

MATCHES = ("index", "sigma", "final")
MODES = ("replace", "append")
SIDES = ("cond", "both")


def listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True)
class CacheAttentionOptions:
    """How the donor is used. Steps and blocks count from 1, as in the paper.

    Attributes:
        fast_steps: Solver steps of a hit.
        match: Which of the donor's latents a step reads: those of the same step of its run (`index`, the paper's words), those
            nearest in noise level (`sigma`), or the finished ones (`final`).
        steps: Steps that read the donor.
        blocks: Blocks that read it.
        mode: `replace` the current keys and values, or `append` the donor's.
        sides: Read it on the conditional side of guidance only (`cond`), or on `both`.
        donors: Attend to so many donors at once, at most: their keys and values one behind the other.
    """

    fast_steps: int = 8
    match: str = "index"
    steps: tuple[int, ...] = (2, 3, 4)
    blocks: tuple[int, ...] = (1,)
    mode: str = "replace"
    sides: str = "both"
    donors: int = 1

    def __post_init__(self) -> None:
        for name, known in (("match", MATCHES), ("mode", MODES), ("sides", SIDES)):
            if getattr(self, name) not in known:
                raise ChaiError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        for name in ("fast_steps", "donors"):
            if getattr(self, name) < 1:
                raise ChaiError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}")
        for name in ("steps", "blocks"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ChaiError(f"{name} of Cache Attention are numbers from 1, such as 2,3,4, not {getattr(self, name)}")
        if min(self.steps) > self.fast_steps:
            raise ChaiError(
                f"none of the steps that read the donor ({listed(self.steps)}) is among the {self.fast_steps} of a hit"
            )

    @property
    def by_prompt(self) -> None:
        return None

    @property
    def keeps_clean(self) -> bool:
        return self.match == "final"

    @property
    def latents_kept(self) -> int:
        return 1 if self.match == "final" else len(self.steps)

    def schedule(self, steps: int) -> int:
        return min(self.fast_steps, steps)

    def useless(self, steps: int) -> str:
        return f"a hit takes {self.fast_steps} steps, and this takes no more" if steps <= self.fast_steps else ""

    def kept(self, dense: Sequence[float], fast: Sequence[float]) -> frozenset[int]:
        if self.match == "final":
            return frozenset()
        wanted = [step - 1 for step in self.steps if step <= len(fast)]
        if self.match == "sigma":
            wanted = [min(range(len(dense)), key=lambda i: abs(dense[i] - fast[step])) for step in wanted]
        return frozenset(step for step in wanted if step < len(dense))

    def unfit(self, donor: Donor, fast: Sequence[float]) -> str:
        read = [step - 1 for step in self.steps if step <= len(fast)]
        return OTHER_LATENTS if any(self.latents(donor, step, fast[step]) is None for step in read) else ""

    def check(self, backbone: Backbone) -> None:
        from chai_cli.attention import check_blocks, sites_of

        for transformer in backbone.transformers():
            check_blocks(sites_of(transformer).blocks(transformer), [block - 1 for block in self.blocks])

    def hit(self, backbone: Backbone, donor: Donor) -> CacheAttention:
        return CacheAttention(backbone, donor, self)

    def all_latents(self, donor: Donor, step: int, sigma: float) -> Tensor | None:
        """What a step (from 0) reads of a donor and of those beside it, [K, C, T, H, W]; None if the first has nothing for it."""
        first = self.latents(donor, step, sigma)
        if first is None or not donor.others:
            return first
        import torch

        others = (self.latents(other, step, sigma) for other in donor.others)
        return torch.cat([first, *(latents for latents in others if latents is not None)])

    def latents(self, donor: Donor, step: int, sigma: float) -> Tensor | None:
        """What a step (from 0) reads of one donor, or None if it reads nothing or the donor has nothing for it."""
        if step + 1 not in self.steps:
            return None
        if self.match == "final":
            return donor.clean
        if self.match == "index":
            return donor.steps.get(step)
        nearest = donor.nearest(sigma)
        return None if nearest is None else donor.steps[nearest]


DEFAULTS = CacheAttentionOptions()


class CacheAttention:
    """The short run of a hit."""

    name = "chai"

    def __init__(self, backbone: Backbone, donor: Donor, options: CacheAttentionOptions) -> None:
        self.backbone = backbone
        self.donor = donor
        self.options = options

    def plan(self, look: Look) -> Plan:
        return Plan(self.options.schedule(look.num_inference_steps))

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        return noise

    def around(self, step: Step) -> AbstractContextManager[Any]:
        found = self.options.all_latents(self.donor, step.index, step.sigma)
        if found is None:
            return nullcontext()
        return reading(self.backbone.transformers(), lambda context: found, self.options)

    def after(self, step: Step, latents: Tensor, before: Tensor, estimate: Tensor) -> Tensor:
        return latents


@contextmanager
def reading(
    transformers: Sequence[Any], pick: Callable[[CacheContext], Tensor | None], options: CacheAttentionOptions
) -> Iterator[None]:
    """The transformers read what `pick` gives, on the sides that the options name."""
    from chai_cli.attention import injected

    def sided(context: CacheContext) -> Tensor | None:
        return pick(context) if options.sides == "both" or context.name == "cond" else None

    blocks = [block - 1 for block in options.blocks]
    with ExitStack() as stack:
        for transformer in transformers:
            stack.enter_context(injected(transformer, sided, blocks, options.mode))
        yield


class KeySteps:
    """A donor recorded from a diffusers pipeline: give it as `callback_on_step_end`.

    Args:
        options: Says which latents a later run will read; `sigma` keeps those of every step.
    """

    def __init__(self, options: CacheAttentionOptions = DEFAULTS) -> None:
        self.options = options
        self.donor = Donor({}, {})

    def __call__(self, pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        latents, entering = kwargs["latents"].detach().cpu().clone(), index + 1
        sigmas = [float(sigma) for sigma in pipe.scheduler.sigmas]
        if entering == len(sigmas) - 1:
            self.donor = replace(self.donor, clean=latents)
        elif self.options.match == "sigma" or entering + 1 in self.options.steps:
            steps, kept = {**self.donor.steps, entering: latents}, {**self.donor.sigmas, entering: sigmas[entering]}
            self.donor = replace(self.donor, steps=steps, sigmas=kept)
        return {}


@contextmanager
def cache_attention(pipe: Any, donor: Donor | KeySteps, options: CacheAttentionOptions | None = None) -> Iterator[None]:
    """Cache Attention for a stock diffusers pipeline (`WanPipeline`) while the `with` block lasts.

    Args:
        pipe: Its steps are found by the `cache_context` that the pipeline opens around each call of its transformer.
        donor: Latents of an earlier run of the same size; `KeySteps` records them.

    Example:
        >>> pipe(first, num_inference_steps=30, callback_on_step_end=(donor := KeySteps()))  # doctest: +SKIP
        >>> with cache_attention(pipe, donor):  # doctest: +SKIP
        ...     video = pipe(second, num_inference_steps=8)
    """
    known = donor.donor if isinstance(donor, KeySteps) else donor
    chosen = options or (donor.options if isinstance(donor, KeySteps) else DEFAULTS)

    def pick(context: CacheContext) -> Tensor | None:
        if context.step_index is None:
            raise ChaiError("this pipeline does not say which step it is at; Cache Attention needs diffusers 0.42 or newer")
        return chosen.latents(known, context.step_index, context.sigma or 0.0)

    transformers = [t for t in (pipe.transformer, getattr(pipe, "transformer_2", None)) if t is not None]
    with reading(transformers, pick, chosen):
        yield
