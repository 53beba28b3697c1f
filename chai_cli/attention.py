"""Self-attention that takes keys and values from a donor: what holds during one forward, and how it reaches the blocks.

A family says through `Sites` where its self-attention is and how a latent becomes its input; everything else is the same for
all of them. Nothing is global and nothing stays: processors and hooks live as long as the `with` block of `injected`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import BaseState, CacheContext, StateManager
from torch import Tensor, nn

from chai_cli.backbones.base import FAMILIES
from chai_cli.errors import ChaiError

HOOK = "chai_cache_attention"


@dataclass
class Source:
    """What one attention site reads during one forward. Without tokens it does bit for bit what the library does.

    Attributes:
        block: The transformer block that holds the site.
        tokens: The donor as it enters that block [B, N, D]; several donors of one request are [K, N, D].
        conditioning: What the model modulates the block with, at the current step.
    """

    block: nn.Module
    mode: str
    tokens: Tensor | None = None
    conditioning: Any = None


class Sites(Protocol):
    """Where a family's self-attention is, and how a latent gets there."""

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        """The blocks in their order."""

    def attention(self, block: nn.Module) -> Any:
        """The self-attention of a block; its `processor` is exchanged."""

    def conditioner(self, transformer: nn.Module) -> nn.Module:
        """The part that runs once before the blocks and whose output they are modulated with."""

    def tokens(self, transformer: nn.Module, latents: Tensor, conditioning: Any) -> Tensor:
        """Latents [B, C, T, H, W] as they enter the first block [B, N, D]."""

    def through(self, transformer: nn.Module, block: nn.Module, tokens: Tensor, conditioning: Any, latents: Tensor) -> Tensor:
        """Tokens after a block."""

    def processor(self, own: Any, source: Source) -> Any:
        """A processor that does what `own` does, with the keys and values of `source` when it has tokens."""


@dataclass
class StepContext:
    """What holds during one forward of one transformer: the donor's latents for it, and the sites that read them."""

    sources: dict[int, Source] = field(default_factory=dict)
    latents: Tensor | None = None

    def clear(self) -> None:
        self.latents = None
        for source in self.sources.values():
            source.tokens = source.conditioning = None


Pick = Callable[[CacheContext], Tensor | None]


class StepHook(ModelHook):  # type: ignore[misc]
    """Asks, before each forward, which donor latents it reads. The pipeline's `cache_context` says where the run is."""

    _is_stateful = True

    def __init__(self, context: StepContext, pick: Pick) -> None:
        super().__init__()
        self.context = context
        self.pick = pick
        self.state_manager = StateManager(BaseState)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.context.clear()
        found = self.pick(self.state_manager.context)
        if found is not None:
            latents = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            several = latents.shape[0] == 1  # donors for one request
            if found.shape[1:] != latents.shape[1:] or not (several or found.shape[0] in (1, latents.shape[0])):
                raise ChaiError(
                    f"the donor's latents are {list(found.shape)}, this render's {list(latents.shape)}: "
                    "Cache Attention needs the same size and number of frames"
                )
            found = found.to(latents)
            self.context.latents = found if several else found.expand_as(latents)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.context.clear()
        return output

    def reset_state(self, module: nn.Module) -> nn.Module:
        return module


def sites_of(transformer: nn.Module) -> Sites:
    """The family's sites.

    Raises:
        ChaiError: no family with such a transformer is known.
    """
    kind = type(transformer).__name__
    for family in FAMILIES.values():
        if family.transformer == kind:
            made: Sites = family.load(family.sites)()
            return made
    known = ", ".join(family.transformer for family in FAMILIES.values())
    raise ChaiError(f"Cache Attention does not know the transformer {kind}; it knows {known}")


def check_blocks(known: Sequence[nn.Module], places: Sequence[int]) -> None:
    """Raises ChaiError for blocks (from 0) that a transformer does not have."""
    wrong = [str(place + 1) for place in places if not 0 <= place < len(known)]
    if wrong:
        raise ChaiError(f"the model has blocks 1 to {len(known)}, not {', '.join(wrong)}")


@contextmanager
def injected(transformer: nn.Module, pick: Pick, blocks: Sequence[int], mode: str) -> Iterator[None]:
    """Let the self-attention of some blocks read a donor for as long as the `with` block lasts.

    Args:
        pick: Given the library's `CacheContext` (side, step index, sigma), the donor's latents [1, C, T, H, W], those of several
            donors [K, C, T, H, W], or None.
        blocks: Places of the blocks, from 0. Beyond the first, the donor is taken through the blocks before.
        mode: `replace` the current keys and values, or `append` the donor's to them.
    """
    sites = sites_of(transformer)
    all_blocks = sites.blocks(transformer)
    check_blocks(all_blocks, blocks)
    context = StepContext({block: Source(all_blocks[block], mode) for block in blocks})

    def conditioned(module: nn.Module, args: Any, conditioning: Any) -> None:
        if context.latents is None:
            return
        latents, context.latents = context.latents, None
        entering = [tokens := sites.tokens(transformer, latents, conditioning)]
        for block in all_blocks[: max(blocks)]:  # before any source is set, so that the donor sees only itself
            entering.append(tokens := sites.through(transformer, block, tokens, conditioning, latents))
        for place, source in context.sources.items():
            source.tokens, source.conditioning = entering[place], conditioning

    registry = HookRegistry.check_if_exists_or_initialize(transformer)
    own = {block: sites.attention(all_blocks[block]).processor for block in blocks}
    handle = sites.conditioner(transformer).register_forward_hook(conditioned)
    try:
        registry.register_hook(StepHook(context, pick), HOOK)
        for block in blocks:
            sites.attention(all_blocks[block]).processor = sites.processor(own[block], context.sources[block])
        yield
    finally:
        for block in blocks:
            sites.attention(all_blocks[block]).processor = own[block]
        registry.remove_hook(HOOK, recurse=False)
        handle.remove()
        context.clear()
