"""Contracts 2, 4 and 5 for Cache Attention, for every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.hooks.hooks import CacheContext
from torch import Tensor

from chai_cli.attention import injected, sites_of
from chai_cli.backbones.base import Backbone, Look, ModelRecord, Placement, load, resolve
from chai_cli.denoise import denoise
from chai_cli.errors import ChaiError
from chai_cli.prompts import Settings
from chai_cli.reuse.base import Donor
from chai_cli.reuse.cache_attention import CacheAttention, CacheAttentionOptions, KeySteps, cache_attention
from chai_cli.reuse.dense import Dense
from tests.contracts.families import FAMILIES

Family = tuple[ModelRecord, Backbone]
SMALL = Settings(height=64, width=64, num_frames=9, num_inference_steps=6, seed=7)
ALL_STEPS = tuple(range(1, 7))


def look_of(record: ModelRecord, scheduler: str = "euler", **changes: Any) -> Look:
    return resolve(record, replace(SMALL, **changes), scheduler)


def own_latents(backbone: Backbone, look: Look, prompt: str) -> tuple[Donor, Tensor]:
    """A dense run as its own donor, and its result."""
    every = frozenset(range(look.num_inference_steps))
    run = denoise(backbone, Dense(record=every), look, backbone.encode(prompt, look))
    return Donor(run.kept, {k: run.sigmas[k] for k in run.kept}, run.latents), run.latents


def hit(backbone: Backbone, look: Look, prompt: str, donor: Donor, **options: Any) -> Tensor:
    chosen = CacheAttentionOptions(**{"fast_steps": look.num_inference_steps, **options})
    return denoise(backbone, CacheAttention(backbone, donor, chosen), look, backbone.encode(prompt, look)).latents


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
@pytest.mark.parametrize("match", ["index", "sigma"])
@pytest.mark.parametrize("blocks", [(1,), (2,), (1, 2)])
def test_a_run_that_reads_its_own_latents_is_unchanged(
    family: Family, scheduler: str, match: str, blocks: tuple[int, ...]
) -> None:
    record, backbone = family
    look = look_of(record, scheduler)
    donor, dense = own_latents(backbone, look, "a red ball")
    assert torch.equal(hit(backbone, look, "a red ball", donor, match=match, steps=ALL_STEPS, blocks=blocks), dense)


@pytest.mark.parametrize("mode", ["replace", "append"])
@pytest.mark.parametrize("blocks", [(1,), (1, 2)])
def test_a_donor_read_twice_counts_as_once(family: Family, mode: str, blocks: tuple[int, ...]) -> None:
    record, backbone = family
    look = look_of(record)
    donor, dense = own_latents(backbone, look, "a red ball")
    twice = replace(donor, others=(donor, donor))
    read = hit(backbone, look, "a red ball", twice, mode=mode, steps=ALL_STEPS, blocks=blocks, donors=3)
    torch.testing.assert_close(read, dense, atol=1e-5, rtol=1e-5)


def test_a_second_donor_is_read(family: Family) -> None:
    record, backbone = family
    look = look_of(record)
    first, _ = own_latents(backbone, look, "a red ball")
    second, _ = own_latents(backbone, replace(look, seed=9), "a blue star")
    alone = hit(backbone, look, "a ring", first)
    together = hit(backbone, look, "a ring", replace(first, others=(second,)), donors=2)
    assert not torch.equal(alone, together)
    assert torch.equal(hit(backbone, look, "a ring", first), alone)


def test_own_keys_appended_to_themselves_change_nothing(family: Family) -> None:
    record, backbone = family
    look = look_of(record)
    donor, dense = own_latents(backbone, look, "a red ball")
    appended = hit(backbone, look, "a red ball", donor, mode="append", steps=ALL_STEPS, blocks=(1, 2))
    torch.testing.assert_close(appended, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", [{}, {"match": "final"}, {"mode": "append"}, {"sides": "cond"}, {"blocks": (2,)}])
def test_a_donor_changes_the_run(family: Family, change: dict[str, Any]) -> None:
    record, backbone = family
    look = look_of(record)
    donor, _ = own_latents(backbone, look_of(record, seed=8), "a blue star")
    dense = denoise(backbone, Dense(), look, backbone.encode("a red ball", look)).latents
    assert (hit(backbone, look, "a red ball", donor, **change) - dense).abs().max() > 1e-4


def test_only_the_chosen_steps_and_sides_read_the_donor(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    record, backbone = family
    look = look_of(record)
    donor, _ = own_latents(backbone, look, "a blue star")
    asked: list[tuple[int | None, str, bool]] = []

    def spy(transformer: Any, pick: Any, blocks: Any, mode: str) -> Any:
        def watched(context: CacheContext) -> Tensor | None:
            found: Tensor | None = pick(context)
            asked.append((context.step_index, context.name, found is not None))
            return found

        return injected(transformer, watched, blocks, mode)

    monkeypatch.setattr("chai_cli.attention.injected", spy)
    hit(backbone, look, "a red ball", donor, steps=(2, 4), sides="cond")
    assert asked == [(1, "cond", True), (1, "uncond", False), (3, "cond", True), (3, "uncond", False)]


def test_an_empty_context_does_what_the_library_does(family: Family) -> None:
    record, backbone = family
    look = look_of(record)
    dense = denoise(backbone, Dense(), look, backbone.encode("a red ball", look)).latents
    (transformer,) = backbone.transformers()
    with injected(transformer, lambda context: None, [0, 1], "replace"):
        inside = denoise(backbone, Dense(), look, backbone.encode("a red ball", look)).latents
    assert torch.equal(inside, dense)


def processors(transformer: Any) -> list[Any]:
    sites = sites_of(transformer)
    return [sites.attention(block).processor for block in sites.blocks(transformer)]


def test_nothing_of_a_hit_stays_behind(family: Family) -> None:
    record, backbone = family
    look = look_of(record)
    _, dense = own_latents(backbone, look, "a red ball")
    other, _ = own_latents(backbone, look_of(record, seed=8), "a blue star")
    (transformer,) = backbone.transformers()
    before = processors(transformer)
    hit(backbone, look, "a red ball", other, blocks=(1, 2))
    assert processors(transformer) == before
    assert torch.equal(denoise(backbone, Dense(), look, backbone.encode("a red ball", look)).latents, dense)
    with pytest.raises(ChaiError, match="same size"):
        hit(backbone, look_of(record, width=96), "a red ball", other)
    assert torch.equal(denoise(backbone, Dense(), look, backbone.encode("a red ball", look)).latents, dense)


def test_a_hit_takes_few_steps_of_its_own_schedule(family: Family) -> None:
    record, backbone = family
    look = look_of(record)
    donor, _ = own_latents(backbone, look, "a red ball")
    method = CacheAttention(backbone, donor, CacheAttentionOptions(fast_steps=3))
    run = denoise(backbone, method, look, backbone.encode("a red ball", look))
    short = denoise(backbone, Dense(), replace(look, num_inference_steps=3), backbone.encode("a red ball", look))
    assert (len(run.seconds), run.calls, run.sigmas) == (3, 6, short.sigmas)


def test_kept_steps_are_those_a_hit_will_read() -> None:
    dense, fast = [1 - i / 30 for i in range(30)], [1 - i / 8 for i in range(8)]
    assert CacheAttentionOptions().kept(dense, fast) == {1, 2, 3}
    sigma = CacheAttentionOptions(match="sigma").kept(dense, fast)
    assert all(min(abs(dense[k] - fast[s]) for k in sigma) <= 0.5 / 30 + 1e-9 for s in (1, 2, 3))
    assert CacheAttentionOptions(match="final").kept(dense, fast) == frozenset()
    assert CacheAttentionOptions(steps=(2, 40)).kept(dense, fast) == {1}


@pytest.mark.parametrize(
    "wrong", [{"match": "nearest"}, {"mode": "add"}, {"sides": "uncond"}, {"steps": ()}, {"blocks": (0,)}, {"fast_steps": 0}]
)
def test_wrong_options_are_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(ChaiError):
        CacheAttentionOptions(**wrong)


def test_a_block_the_model_does_not_have_is_one_sentence(family: Family) -> None:
    record, backbone = family
    look = look_of(record)
    donor, _ = own_latents(backbone, look, "a red ball")
    with pytest.raises(ChaiError, match="blocks 1 to 2, not 9"):
        hit(backbone, look, "a red ball", donor, blocks=(1, 9))


def test_stock_pipeline_in_three_lines_equals_chais_own_hit(family: Family) -> None:
    record, backbone = family
    if not FAMILIES[record.family].pipeline:
        pytest.skip("diffusers has no pipeline of this family")
    pipe = backbone.pipe  # type: ignore[attr-defined]
    first, second = look_of(record, seed=8), look_of(record)
    common: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 9, "output_type": "latent"}
    common |= {"guidance_scale": first.guidance_scale, "max_sequence_length": record.max_sequence_length}

    def noise(look: Look) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(look.seed)

    own = pipe.scheduler
    pipe.scheduler = backbone.schedule(first)
    try:
        pipe("a blue star", generator=noise(first), num_inference_steps=6, callback_on_step_end=(donor := KeySteps()), **common)
        with cache_attention(pipe, donor):
            stock = pipe("a red ball", generator=noise(second), num_inference_steps=4, **common).frames
        plain = pipe("a red ball", generator=noise(second), num_inference_steps=4, **common).frames
    finally:
        pipe.scheduler = own
    kept, _ = own_latents(backbone, first, "a blue star")
    assert torch.equal(stock, hit(backbone, second, "a red ball", kept, fast_steps=4))
    assert not torch.equal(stock, plain)


def test_compiled_blocks_have_two_variants_whatever_the_step_or_the_donor(family: Family) -> None:
    from torch._dynamo.utils import counters

    record, _ = family
    backbone = load(record, Placement(device="cpu"))
    (transformer,) = backbone.transformers()
    look = look_of(record)
    donor, _ = own_latents(backbone, look, "a red ball")
    other, _ = own_latents(backbone, look_of(record, seed=8), "a blue star")
    plain = hit(backbone, look, "a red ball", other)
    torch._dynamo.reset()
    counters.clear()
    transformer.compile_repeated_blocks(backend="eager")
    assert torch.allclose(hit(backbone, look, "a red ball", other), plain, atol=1e-5)
    hit(backbone, look, "a blue star rises over the desert", donor, steps=(2, 4))  # a length of text may be a variant, once
    variants = counters["stats"]["unique_graphs"]
    assert variants <= FAMILIES[record.family].variants
    hit(backbone, look, "a small red ball at sunset", donor, steps=(1, 3, 5))
    denoise(backbone, Dense(), look, backbone.encode("a red ball", look))
    assert counters["stats"]["unique_graphs"] == variants
    torch._dynamo.reset()
