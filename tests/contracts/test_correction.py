"""Steps that leap over others, and few steps that full renders correct, for every family."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from chai_cli.backbones.base import Backbone, Look
from chai_cli.denoise import denoise, leap
from chai_cli.errors import ChaiError
from chai_cli.reuse.base import Donor, Learner
from chai_cli.reuse.cache_attention import CacheAttentionOptions
from chai_cli.reuse.correction import PENALTIES, CorrectionOptions, Sums, ridge
from chai_cli.reuse.dense import Dense
from tests.contracts.test_cache_attention import Family, look_of

PROMPTS = ("a red ball", "a blue star in a city", "a green ring", "a white heart at sea")


def taught(backbone: Backbone, look: Look, options: CorrectionOptions, prompts: Iterable[str] = PROMPTS) -> list[Donor]:
    """Full renders as an entry keeps them, each with a seed of its own."""
    donors = []
    for number, prompt in enumerate(prompts):
        own = replace(look, seed=100 + number)
        leaps = frozenset(options.leaps(look.num_inference_steps))
        run = denoise(backbone, Dense(leaps), own, backbone.encode(prompt, own))
        sigmas = {step: run.sigmas[step] for step in leaps}
        donors.append(Donor(run.kept, sigmas, run.latents, estimates=run.estimates))
    return donors


def corrected(backbone: Backbone, look: Look, prompt: str, options: CorrectionOptions, donors: list[Donor]) -> Tensor:
    lesson = options.learn(backbone, look, donors)
    run = denoise(backbone, options.hit(backbone, Donor(lesson=lesson)), look, backbone.encode(prompt, look))
    assert len(run.seconds) == options.fast_steps
    return run.latents


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
def test_to_leap_over_nothing_changes_nothing(family: Family, scheduler: str) -> None:
    record, backbone = family
    look = look_of(record, scheduler, num_inference_steps=6)
    options = CorrectionOptions(fast_steps=6, lean=1, strength=0)
    assert options.leaps(6) == tuple(range(6))
    donors = taught(backbone, look, options, PROMPTS[:1])
    dense = denoise(backbone, Dense(), look, backbone.encode("a star", look)).latents
    assert torch.equal(corrected(backbone, look, "a star", options, donors), dense)


def test_a_leap_of_euler_goes_straight_from_noise_level_to_noise_level(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=9)
    options = CorrectionOptions(fast_steps=3, strength=0)
    leaps = options.leaps(9)
    text = backbone.encode("a star", look)
    scheduler = backbone.schedule(look)
    sigmas = [*(float(scheduler.sigmas[step]) for step in leaps), 0.0]
    latents = backbone.noise(look)
    for step, here, there in zip(leaps, sigmas, sigmas[1:], strict=False):
        context = {"step_index": step, "sigma": here, "num_inference_steps": 9}
        velocity, _ = backbone.velocity(latents, scheduler.timesteps[step], text, look, context)
        latents = latents + (there - here) * velocity
    made = corrected(backbone, look, "a star", options, taught(backbone, look, options, PROMPTS[:1]))
    torch.testing.assert_close(made, latents, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
def test_a_request_that_it_learned_from_is_led_back_to_its_full_render(family: Family, scheduler: str) -> None:
    record, backbone = family
    look = look_of(record, scheduler, num_inference_steps=12)
    options = CorrectionOptions(fast_steps=3)
    (donor,) = taught(backbone, look, options, PROMPTS[:1])
    own = replace(look, seed=100)
    assert donor.clean is not None
    plain = corrected(backbone, own, PROMPTS[0], replace(options, strength=0), [donor])
    led = corrected(backbone, own, PROMPTS[0], options, [donor])
    assert (led - donor.clean).norm() < 0.97 * (plain - donor.clean).norm()


def test_the_trained_model_comes_nearer_to_full_renders_that_it_never_saw(embedded: Backbone) -> None:
    look = look_of(embedded.record, "default", num_inference_steps=16, num_frames=17)
    options = CorrectionOptions(fast_steps=4)
    teachers = (
        "a small red ball rises in the desert",
        "a large blue star sways in a forest",
        "a small green ring circles at sea",
    )
    donors = taught(embedded, look, options, (*teachers, "a large white heart falls at sunset"))
    lessons = options.learn(embedded, look, donors)
    errors: dict[float, float] = {0.0: 0.0, 1.0: 0.0}
    for prompt in (
        "a large yellow square falls in the desert",
        "a small purple star moves left in space",
        "a large pink ring in a city",
    ):
        text = embedded.encode(prompt, look)
        full = denoise(embedded, Dense(), look, text).latents
        for strength in errors:
            method = replace(options, strength=strength).hit(embedded, Donor(lesson=lessons))
            errors[strength] += float((denoise(embedded, method, look, text).latents - full).pow(2).mean().sqrt())
    assert errors[1.0] < 0.9 * errors[0.0], errors


@pytest.mark.parametrize("noise", [0.0, 5.0, 30.0])
def test_the_penalty_is_the_one_that_serves_what_was_left_out(noise: float) -> None:
    generator = torch.Generator().manual_seed(0)
    law = torch.randn(20, 3, generator=generator)
    parts = []
    for _ in range(4):
        seen = torch.randn(200, 20, generator=generator)
        parts.append((seen, seen @ law + noise * torch.randn(200, 3, generator=generator)))

    def solved(chosen: list[tuple[Tensor, Tensor]], penalty: float) -> Tensor:
        seen, error = (torch.cat(side).double() for side in zip(*chosen, strict=True))
        return torch.linalg.solve(seen.T @ seen + penalty * torch.eye(20), seen.T @ error)

    def left_out(penalty: float) -> float:
        maps = [solved(parts[:i] + parts[i + 1 :], penalty) for i in range(4)]
        return sum(float((error - seen.double() @ map).pow(2).sum()) for map, (seen, error) in zip(maps, parts, strict=True))

    best = min(PENALTIES, key=left_out)
    expected = solved(parts, best)
    if left_out(best) >= sum(float(error.double().pow(2).sum()) for _, error in parts):
        expected = torch.zeros(20, 3)
    torch.testing.assert_close(ridge([Sums.of(*part) for part in parts]), expected.float(), rtol=1e-3, atol=1e-4)
    assert (best == PENALTIES[0]) == (noise < 30)


def test_what_serves_nobody_corrects_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    law, seen = torch.randn(20, 3, generator=generator), torch.randn(200, 20, generator=generator)
    contrary = [Sums.of(seen, seen @ (share * law)) for share in (1, -1, 2, -2)]
    assert torch.equal(ridge(contrary), torch.zeros(20, 3))


def test_two_requests_in_a_row_equal_each_alone(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "unipc", num_inference_steps=8)
    options = CorrectionOptions(fast_steps=4)
    donors = taught(backbone, look, options)
    other = replace(look, seed=look.seed + 1)
    first = corrected(backbone, look, "a star", options, donors)
    second = corrected(backbone, other, "a ring", options, donors)
    assert torch.equal(corrected(backbone, look, "a star", options, donors), first)
    assert torch.equal(corrected(backbone, other, "a ring", options, donors), second)


def test_what_an_entry_keeps_is_what_it_learns_from(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "unipc", num_inference_steps=8)
    options = CorrectionOptions(fast_steps=4)
    sigmas = [float(sigma) for sigma in backbone.schedule(look).sigmas][:8]
    assert options.kept(sigmas, sigmas) == frozenset(options.leaps(8))
    (donor,) = taught(backbone, look, options, PROMPTS[:1])
    assert options.latents_kept == len(donor.steps) + len(donor.estimates) + 1
    assert options.unfit(donor, sigmas) == ""
    for lacking in ({"clean": None}, {"estimates": {}}, {"sigmas": {step: s + 0.01 for step, s in donor.sigmas.items()}}):
        assert "does not hold" in options.unfit(replace(donor, **lacking), sigmas)
    assert "does not hold" in CorrectionOptions(fast_steps=5).unfit(donor, sigmas)
    assert options.learn(backbone, look, []) is None
    assert isinstance(options, Learner)
    assert not isinstance(CacheAttentionOptions(), Learner)


@pytest.mark.parametrize("steps", [5, 8, 30, 50])
@pytest.mark.parametrize("fast", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("lean", [0.5, 1.0, 1.4, 3.0])
def test_leaps_rise_from_the_first_step_and_stay_within_the_schedule(steps: int, fast: int, lean: float) -> None:
    leaps = CorrectionOptions(fast_steps=fast, lean=lean).leaps(steps)
    assert (len(leaps), leaps[0]) == (fast, 0)
    assert list(leaps) == sorted(set(leaps))
    assert leaps[-1] < steps


def test_steps_crowd_where_noise_is_high() -> None:
    assert CorrectionOptions(fast_steps=4).leaps(30) == (0, 4, 11, 20)
    assert CorrectionOptions(fast_steps=4, lean=1).leaps(30) == (0, 8, 15, 22)


def test_a_scheduler_that_leaps_ends_clean(family: Family) -> None:
    record, backbone = family
    scheduler = backbone.schedule(look_of(record, "unipc", num_inference_steps=8))
    before = scheduler.sigmas.clone()
    leap(scheduler, (0, 3, 5))
    assert scheduler.sigmas.tolist() == before[[0, 3, 5, 8]].tolist()
    assert len(scheduler.timesteps) == 3


@pytest.mark.parametrize(
    "wrong", [{"fast_steps": 0}, {"lean": 0.1}, {"least": 0}, {"least": 9, "most": 8}, {"strength": -1.0}, {"strength": 2.0}]
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ChaiError):
        CorrectionOptions(**wrong)
