"""Contracts 1, 3 and 5 of the engine, for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chai_cli.backbones.base import Backbone, Look, ModelRecord, resolve
from chai_cli.denoise import Trajectory, denoise
from chai_cli.prompts import Settings
from chai_cli.reuse.dense import Dense
from store import Entry, LatentStore
from tests.contracts.families import FAMILIES

Family = tuple[ModelRecord, Backbone]
SMALL = Settings(height=64, width=64, num_frames=9, num_inference_steps=5, seed=7)


def look_of(record: ModelRecord, scheduler: str, settings: Settings = SMALL) -> Look:
    return resolve(record, settings, scheduler)


def render(backbone: Backbone, look: Look, prompt: str, method: Dense | None = None) -> Trajectory:
    return denoise(backbone, method or Dense(), look, backbone.encode(prompt, look))


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("negative", ["", "blurred"])
def test_own_loop_equals_that_of_others(family: Family, scheduler: str, guidance: float, negative: str) -> None:
    record, backbone = family
    look = look_of(record, scheduler, replace(SMALL, guidance_scale=guidance, negative_prompt=negative))
    ours, theirs = render(backbone, look, "a red ball"), FAMILIES[record.family].latents(backbone, look, "a red ball")
    if FAMILIES[record.family].exact:
        assert torch.equal(ours.latents, theirs)
    assert torch.allclose(ours.latents, theirs, atol=1e-5 * float(theirs.abs().max()))
    assert ours.calls == look.num_inference_steps * (2 if guidance > 1 else 1)


def test_decoding_equals_that_of_others(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "euler")
    latents = render(backbone, look, "a red ball").latents
    theirs = FAMILIES[record.family].frames(backbone, look, latents).astype(int)
    assert abs(theirs - backbone.decode(latents, look)).max() <= (0 if FAMILIES[record.family].exact else 1)


def test_resumed_run_equals_uninterrupted_run(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "euler")
    whole = render(backbone, look, "a red ball", Dense(record=frozenset({2})))
    stopped = render(backbone, look, "a red ball", Dense(stop_step=2))
    assert torch.equal(stopped.latents, whole.kept[2])
    resumed = render(backbone, look, "a red ball", Dense(start_step=2, latents=whole.kept[2]))
    assert torch.equal(resumed.latents, whole.latents)
    assert (len(stopped.seconds), len(resumed.seconds), len(whole.seconds)) == (2, 3, 5)


def test_resumed_from_what_the_store_kept_equals_uninterrupted_run(family: Family, tmp_path: Path) -> None:
    record, backbone = family
    look = look_of(record, "euler")
    whole = render(backbone, look, "a red ball", Dense(record=frozenset({2})))
    store = LatentStore(tmp_path, numbers="float32")
    entry = store.put(Entry("a red ball", (), "n", record.name, look.seed, {}, (64, 64, 9), 1.0), {"step2": whole.kept[2]}, [])
    kept = store.latents(entry.id)["step2"]
    assert torch.equal(render(backbone, look, "a red ball", Dense(start_step=2, latents=kept)).latents, whole.latents)


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
def test_two_requests_in_a_row_equal_each_alone(family: Family, scheduler: str) -> None:
    record, backbone = family
    first = look_of(record, scheduler)
    second = look_of(record, scheduler, replace(SMALL, seed=8, num_inference_steps=3, width=96))
    alone = render(backbone, second, "a blue star").latents
    render(backbone, first, "a red ball")
    assert torch.equal(render(backbone, second, "a blue star").latents, alone)


def test_noise_ignores_the_global_generator(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "euler")
    torch.manual_seed(1)
    first = backbone.noise(look)
    torch.manual_seed(2)
    assert torch.equal(backbone.noise(look), first)
    assert not torch.equal(backbone.noise(replace(look, seed=8)), first)


def test_sigmas_fall_from_noise_to_clean(family: Family) -> None:
    record, backbone = family
    for scheduler in ("euler", "unipc"):
        sigmas = render(backbone, look_of(record, scheduler), "a red ball").sigmas
        assert sigmas == sorted(sigmas, reverse=True)
        assert sigmas[0] > 0.99
        assert sigmas[-1] == 0
