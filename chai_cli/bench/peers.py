"""In-request caches of other projects on the same pipeline: diffusers' hooks, and DBCache of cache-dit.

Each holds for one request and leaves the model as it found it. All states are kept apart for the two sides of guidance,
which run one after the other here.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from chai_cli.backbones.base import Backbone, Look
from chai_cli.denoise import denoise
from chai_cli.errors import ChaiError, first_line
from chai_cli.reuse import converted, named_fields
from chai_cli.reuse.base import Step
from chai_cli.reuse.dense import Dense

SIDES = ("cond", "uncond")
# Every peer at settings from careful to fast, as `peer_of` reads them.
CURVES: tuple[str, ...] = (
    "first-block:threshold=0.08",
    "first-block:threshold=0.12",
    "first-block:threshold=0.2",
    "mag-cache:threshold=0.03,max-skip-steps=1",
    "mag-cache:threshold=0.06,max-skip-steps=2",
    "mag-cache:threshold=0.24,max-skip-steps=4",
    "faster-cache:unconditional-skip-range=3",
    "faster-cache:unconditional-skip-range=5",
    "pab:spatial-skip-range=2,cross-skip-range=3",
    "pab:spatial-skip-range=4,cross-skip-range=6",
    "taylorseer:interval=2",
    "taylorseer:interval=3",
    "taylorseer:interval=3,order=2",
    "taylorseer:interval=5",
    "sea-cache:threshold=0.1",
    "sea-cache:threshold=0.25",
    "sea-cache:threshold=0.5,max-consecutive-cached=4",
    "dbcache:threshold=0.08",
    "dbcache:threshold=0.12",
    "dbcache:threshold=0.2",
)


class PeerMethod(Dense):
    """Plain sampling that remembers where it is, for caches that ask.

    Attributes:
        timestep: Of the step that runs.
    """

    timestep = math.inf

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def around(self, step: Step) -> AbstractContextManager[Any]:
        self.timestep = float(step.timestep)
        return nullcontext()


class MagRatios:
    """How the residual of a model's blocks shrinks or grows from step to step, measured once per model and schedule.

    Args:
        prompts: Rendered to measure it.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts = tuple(prompts)
        self.known: dict[tuple[str, str], list[list[float]]] = {}

    def of(self, backbone: Backbone, look: Look) -> list[list[float]]:
        """For each transformer, one ratio for each step that it runs: the mean over prompts and sides of guidance.

        Raises:
            ChaiError: there is nothing to measure with.
        """
        key = backbone.fingerprint, json.dumps(asdict(replace(look, seed=0)))
        if key not in self.known:
            if not self.prompts:
                raise ChaiError("mag-cache needs prompts to measure its magnitude ratios with")
            runs = [self.measure(backbone, prompt, replace(look, seed=look.seed + n)) for n, prompt in enumerate(self.prompts)]
            self.known[key] = [
                torch.tensor([side for run in runs for side in run[place]]).mean(0).tolist() if runs[0][place] else []
                for place in range(len(runs[0]))
            ]
        return self.known[key]

    def measure(self, backbone: Backbone, prompt: str, look: Look) -> list[list[list[float]]]:
        """For each transformer, the ratios of each side that it ran."""
        from diffusers.hooks import MagCacheConfig

        # One step more than there are: at the last one the hook prints its ratios and forgets them.
        config = MagCacheConfig(calibrate=True, num_inference_steps=look.num_inference_steps + 1)
        hooks = []
        with ExitStack() as stack:
            for transformer in backbone.transformers():
                stack.enter_context(untouched(transformer))
                hooks.append(switch_on(MagCache.name, transformer, config)[0])
            denoise(backbone, Dense(), look, backbone.encode(prompt, look))
            return [self.read(*pair) for pair in zip(backbone.transformers(), hooks, strict=True)]

    def read(self, transformer: Any, hook: Any) -> list[list[float]]:
        found = []
        for side in SIDES:
            with transformer.cache_context(side):
                found.append(hook.state_manager.get_state().calibration_ratios)
        return [ratios for ratios in found if ratios]


@dataclass(frozen=True)
class Run:
    """One request that a peer serves.

    Attributes:
        stack: Closed at its end, before the model is put back.
        unprompted: What the side without the prompt reads, for caches that learn it.
    """

    backbone: Backbone
    look: Look
    method: PeerMethod
    ratios: MagRatios | None
    stack: ExitStack
    unprompted: list[Tensor] = field(default_factory=list)

    @property
    def guided(self) -> bool:
        return self.look.guidance_scale > 1

    def timestep(self) -> float:
        return self.method.timestep


@dataclass(frozen=True)
class Peer:
    """The options of one in-request cache."""

    name: ClassVar[str]
    least: ClassVar[dict[str, float]] = {}  # the smallest value of an option; 0 for the others

    def __post_init__(self) -> None:
        for option in fields(self):
            value, least = getattr(self, option.name), self.least.get(option.name, 0)
            if not least <= value < math.inf:
                raise ChaiError(f"{self.name}: {option.name} must be {least} or more, not {value}")

    @contextmanager
    def applied(self, backbone: Backbone, look: Look, ratios: MagRatios | None = None) -> Iterator[PeerMethod]:
        """Put the cache on the model's transformers for one request, and take every trace of it off at the end.

        Args:
            ratios: For `mag-cache`; measured here if they are not known yet.

        Yields:
            The method to render the request with.

        Raises:
            ChaiError: the model cannot take it.
        """
        method = PeerMethod(self.name)
        with ExitStack() as outer:
            for transformer in backbone.transformers():
                outer.enter_context(untouched(transformer))
            stack = outer.enter_context(ExitStack())
            run = Run(backbone, look, method, ratios, stack)
            for transformer in backbone.transformers():
                self.enable(transformer, run)
            yield method

    def enable(self, transformer: Any, run: Run) -> None:
        """Put the cache on one transformer; what it registers there is taken off by `applied`."""
        raise NotImplementedError


@dataclass(frozen=True)
class FirstBlock(Peer):
    """FirstBlockCache: while the first block's residual changes little, the others are left out.

    Attributes:
        threshold: Relative change up to which they are.
    """

    name = "first-block"
    threshold: float = 0.05

    def enable(self, transformer: Any, run: Run) -> None:
        from diffusers.hooks import FirstBlockCacheConfig

        switch_on(self.name, transformer, FirstBlockCacheConfig(threshold=self.threshold))


@dataclass(frozen=True)
class MagCache(Peer):
    """MagCache: all blocks are left out while known magnitude ratios predict a small error.

    Attributes:
        threshold: Accumulated error up to which they are.
        max_skip_steps: Steps in a row that may leave them out.
    """

    name = "mag-cache"
    least: ClassVar[dict[str, float]] = {"max_skip_steps": 1}
    threshold: float = 0.06
    max_skip_steps: int = 3

    def enable(self, transformer: Any, run: Run) -> None:
        from diffusers.hooks import MagCacheConfig

        if run.ratios is None:
            raise ChaiError("mag-cache needs magnitude ratios of the model")
        ratios = run.ratios.of(run.backbone, run.look)[run.backbone.transformers().index(transformer)]
        if ratios:
            config = MagCacheConfig(self.threshold, self.max_skip_steps, num_inference_steps=len(ratios), mag_ratios=ratios)
            switch_on(self.name, transformer, config)


@dataclass(frozen=True)
class FasterCache(Peer):
    """FasterCache: the side without the prompt is guessed from the other, and self-attention extrapolated meanwhile.

    The library's hook wants both sides in one batch. They run one after the other in the first step, which tells what the
    side without the prompt reads, and as one batch from then on.

    Attributes:
        spatial_skip_range: Self-attention is computed every so many steps (`spatial_attention_block_skip_range`).
        unconditional_skip_range: So is the side without the prompt (`unconditional_batch_skip_range`).
    """

    name = "faster-cache"
    least: ClassVar[dict[str, float]] = {"spatial_skip_range": 1, "unconditional_skip_range": 1}
    spatial_skip_range: int = 2
    unconditional_skip_range: int = 5

    def enable(self, transformer: Any, run: Run) -> None:
        from diffusers.hooks import FasterCacheConfig

        if not run.guided:
            raise ChaiError("faster-cache guesses the side without the prompt: it needs a guidance scale above 1")
        run.stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "torch.meshgrid")
        config = FasterCacheConfig(
            spatial_attention_block_skip_range=self.spatial_skip_range,
            unconditional_batch_skip_range=self.unconditional_skip_range,
            current_timestep_callback=run.timestep,
            attention_weight_callback=lambda module: 0.5,
            tensor_format="BCFHW",
        )
        SidesTogether(self.name, transformer, config, run.unprompted)


class SidesTogether:
    """Runs both sides of guidance as one batch when the first is asked for, and keeps the second until it is.

    Args:
        config: Of the cache to switch on when the batch starts.
        unprompted: What the side without the prompt reads, once that is known; the transformers of a run share it.
    """

    def __init__(self, name: str, transformer: Any, config: Any, unprompted: list[Tensor]) -> None:
        self.name = name
        self.transformer = transformer
        self.config = config
        self.unprompted = unprompted
        self.waiting: list[Tensor] = []
        self.side = ""
        self.own = transformer.forward
        self.context = transformer.cache_context
        self.batched: Any = None
        transformer.forward = self.first
        transformer.cache_context = self.cache_context

    @contextmanager
    def cache_context(self, side: str, **where: Any) -> Iterator[None]:
        if self.unprompted and self.batched is None:
            self.transformer.forward = self.own  # the hooks go around it
            switch_on(self.name, self.transformer, self.config)
            self.batched = self.transformer.forward
            self.transformer.forward = self.both
        self.side = side
        with self.context(side, **where):
            yield

    def first(self, **inputs: Any) -> Any:
        if self.side == "uncond":
            self.unprompted.append(inputs["encoder_hidden_states"])
        return self.own(**inputs)

    def both(self, **inputs: Any) -> tuple[Tensor]:
        if self.side == "uncond":
            return (self.waiting.pop(),)
        firsts = inputs | {"encoder_hidden_states": self.unprompted[0]}
        inputs = {key: torch.cat([firsts[key], value]) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        uncond, cond = self.batched(**inputs)[0].chunk(2)
        self.waiting = [uncond]
        return (cond,)


@dataclass(frozen=True)
class PyramidAttention(Peer):
    """Pyramid Attention Broadcast: what an attention said is said again for some steps.

    Attributes:
        spatial_skip_range: Self-attention is computed every so many steps (`spatial_attention_block_skip_range`).
        cross_skip_range: So is the attention to the prompt (`cross_attention_block_skip_range`).
    """

    name = "pab"
    least: ClassVar[dict[str, float]] = {"spatial_skip_range": 1, "cross_skip_range": 1}
    spatial_skip_range: int = 2
    cross_skip_range: int = 3

    def enable(self, transformer: Any, run: Run) -> None:
        from diffusers.hooks import PyramidAttentionBroadcastConfig

        config = PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=self.spatial_skip_range,
            cross_attention_block_skip_range=self.cross_skip_range,
            current_timestep_callback=run.timestep,
        )
        states_by_side(transformer, switch_on(self.name, transformer, config))


def states_by_side(transformer: Any, hooks: Sequence[Any]) -> None:
    """Give hooks that know one state, and would mix the two sides of guidance, a state for each."""
    own = transformer.cache_context
    kept: dict[tuple[str, int], Any] = {}

    @contextmanager
    def cache_context(side: str, **where: Any) -> Iterator[None]:
        for place, hook in enumerate(hooks):
            hook.state = kept.setdefault((side, place), type(hook.state)())
        with own(side, **where):
            yield

    transformer.cache_context = cache_context


@dataclass(frozen=True)
class TaylorSeer(Peer):
    """TaylorSeer: between full steps, outputs follow their Taylor series over the steps before.

    Attributes:
        interval: Steps from one full one to the next (`cache_interval`).
        order: Of the series (`max_order`).
        warmup_steps: Full steps at the start (`disable_cache_before_step`).
        lite: 1 to predict only the last layer (`use_lite_mode`), 0 every attention and feed-forward.
    """

    name = "taylorseer"
    least: ClassVar[dict[str, float]] = {"interval": 1}
    interval: int = 5
    order: int = 1
    warmup_steps: int = 3
    lite: int = 1

    def enable(self, transformer: Any, run: Run) -> None:
        from diffusers.hooks import TaylorSeerCacheConfig

        config = TaylorSeerCacheConfig(
            cache_interval=self.interval,
            disable_cache_before_step=self.warmup_steps,
            max_order=self.order,
            taylor_factors_dtype=transformer.dtype,
            use_lite_mode=bool(self.lite),
            # The default pattern matches no attention of Wan, whose names end in a number.
            cache_identifiers=None if self.lite else [r"blocks\.\d+\.(attn1|attn2|ffn)"],
        )
        switch_on(self.name, transformer, config)


@dataclass(frozen=True)
class SeaCache(Peer):
    """SeaCache: all blocks are left out while the latents, filtered for their noise level, change little.

    Attributes:
        threshold: Accumulated relative change up to which they are.
        max_consecutive_cached: Steps in a row that may leave them out; 0 for any number.
        residual_order: 0 repeats the residual of the blocks, 1 goes on along its last two.
    """

    name = "sea-cache"
    threshold: float = 0.25
    max_consecutive_cached: int = 2
    residual_order: int = 1

    def enable(self, transformer: Any, run: Run) -> None:
        from diffusers.hooks import SeaCacheConfig

        config = SeaCacheConfig(
            threshold=self.threshold,
            max_consecutive_cached=self.max_consecutive_cached,
            residual_order=self.residual_order,
            raw_vision_callback=lambda module, args, inputs: list(inputs["hidden_states"]),
        )
        switch_on(self.name, transformer, config)


@dataclass(frozen=True)
class DBCache(Peer):
    """DBCache of cache-dit: while the residual of the first blocks changes little, the others are left out.

    Attributes:
        threshold: Relative change up to which they are (`residual_diff_threshold`).
        first_blocks: Blocks that always run (`Fn_compute_blocks`).
        warmup_steps: Full steps at the start (`max_warmup_steps`).
    """

    name = "dbcache"
    least: ClassVar[dict[str, float]] = {"first_blocks": 1}
    threshold: float = 0.08
    first_blocks: int = 1
    warmup_steps: int = 4

    def enable(self, transformer: Any, run: Run) -> None:
        try:
            cache_dit = importlib.import_module("cache_dit")
        except ImportError:
            raise ChaiError("dbcache needs cache-dit: pip install 'chai-cli[bench]'") from None
        for handler in logging.getLogger("CACHE_DIT").handlers:  # its loggers share one
            handler.setLevel(logging.ERROR)
        blocks = getattr(transformer, "blocks", ())
        if len(blocks) <= self.first_blocks:
            raise ChaiError(f"dbcache needs more than {self.first_blocks} blocks, and this model has {len(blocks)}")
        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=self.first_blocks,
            residual_diff_threshold=self.threshold,
            max_warmup_steps=self.warmup_steps,
            num_inference_steps=run.look.num_inference_steps,
            enable_separate_cfg=run.guided,
        )
        adapter = cache_dit.BlockAdapter(
            transformer=transformer,
            blocks=transformer.blocks,
            forward_pattern=cache_dit.ForwardPattern.Pattern_2,
            has_separate_cfg=run.guided,
        )
        with refused(self.name, transformer):
            adapter = cache_dit.enable_cache(adapter, cache_config=config)

        def release() -> None:
            transformer.__dict__.pop("_original_forward", None)  # the library cannot put back every kind; `untouched` does
            cache_dit.disable_cache(adapter)

        run.stack.callback(release)


PEERS: dict[str, type[Peer]] = {
    kind.name: kind for kind in (FirstBlock, MagCache, FasterCache, PyramidAttention, TaylorSeer, SeaCache, DBCache)
}


def peer_of(spec: str) -> Peer:
    """An in-request cache with its options: a name, `first-block`, or with options behind a colon, `first-block:threshold=0.1`.

    Raises:
        ChaiError: no such cache or option, or a value that it cannot have.
    """
    name, _, told = spec.partition(":")
    if name not in PEERS:
        raise ChaiError(f"no in-request cache named {name!r}; there is {', '.join(PEERS)}")
    kind = PEERS[name]
    written = [part.partition("=") for part in told.split(",") if part]
    options = {key.strip().replace("-", "_"): value.strip() for key, _, value in written}
    for key in options:
        if key not in named_fields(kind):
            raise ChaiError(f"{name} has no option {key!r}; it has {', '.join(sorted(named_fields(kind)))}")
    return kind(**{key: converted(kind, key, value) for key, value in options.items()})


@contextmanager
def refused(name: str, transformer: Any) -> Iterator[None]:
    """What a library says about a model that it cannot cache, in one sentence."""
    try:
        yield
    except Exception as error:  # they raise whatever the unexpected model makes them raise
        raise ChaiError(f"{name} cannot be used on {type(transformer).__name__}: {first_line(error)}") from None


def switch_on(name: str, transformer: Any, config: Any) -> list[Any]:
    """Switch one of diffusers' caches on.

    Returns:
        Its hooks.

    Raises:
        ChaiError: the transformer cannot take it.
    """
    before = set(map(id, hooks_of(transformer)))
    with refused(name, transformer):
        transformer.enable_cache(config)
    hooks = [hook for hook in hooks_of(transformer) if id(hook) not in before]
    if not hooks:
        raise ChaiError(f"{name} finds nothing to cache in {type(transformer).__name__}")
    return hooks


def hooks_of(transformer: nn.Module) -> list[Any]:
    registries = [vars(module).get("_diffusers_hook") for module in transformer.modules()]
    return [hook for registry in registries if registry for hook in registry.hooks.values()]


@contextmanager
def untouched(transformer: nn.Module) -> Iterator[None]:
    """Put a model back as it was: its hooks, and whatever its modules hold besides weights."""
    modules = [(module, dict(vars(module)), dict(module._modules)) for module in transformer.modules()]
    hooks = set(map(id, hooks_of(transformer)))
    try:
        yield
    finally:
        for module, attributes, children in modules:
            now = vars(module)
            if registry := now.get("_diffusers_hook"):
                for name in [name for name, hook in registry.hooks.items() if id(hook) not in hooks]:
                    registry.remove_hook(name, recurse=False)
                registry._child_registries_cache = None
            for key in now.keys() - attributes.keys():
                del now[key]
            if "forward" in attributes:
                now["forward"] = attributes["forward"]
            if list(module._modules) != list(children):  # cache-dit exchanges the blocks and appends them at the end
                module._modules.clear()
                module._modules.update(children)
