"""First estimates that are foretold from the prompt, and hits that take them for the model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from chai_cli.backbones.base import Backbone, Look
from chai_cli.denoise import denoise
from chai_cli.reuse.base import Donor, Plan
from chai_cli.reuse.correction import CorrectionOptions
from chai_cli.reuse.dense import Dense
from chai_cli.reuse.opening import FEW, PENALTIES, Opening
from tests.contracts.test_cache_attention import Family, look_of
from tests.contracts.test_correction import PROMPTS, taught

SHAPE = (1, 2, 3, 4, 4)


def embedded_prompts(count: int, width: int = 6) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(count, width))
    return list((rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))


def answers(prompts: Sequence[np.ndarray], law: float, noise: float) -> list[Tensor]:
    """Estimates that follow from the prompt linearly, and noise."""
    generator = torch.Generator().manual_seed(0)
    map = torch.randn(len(prompts[0]), int(np.prod(SHAPE)), generator=generator)
    whole = torch.from_numpy(np.stack(prompts)) @ map * law
    whole += noise * torch.randn(whole.shape, generator=generator)
    return [row.view(SHAPE).bfloat16().float() for row in whole]


def fitted(prompts: Sequence[np.ndarray], estimates: Sequence[Tensor]) -> Opening:
    opening = Opening.of(zip(prompts, estimates, strict=True))
    assert opening is not None
    return opening


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_what_a_prompt_is_told_without_itself_is_what_a_fit_of_the_others_says(noise: float) -> None:
    prompts = embedded_prompts(FEW + 3)
    estimates = answers(prompts, 1.0, noise)
    embedded = torch.from_numpy(np.stack(prompts)).double()
    rows = torch.stack([one.flatten().double() for one in estimates])
    centred = embedded - embedded.mean(0)
    added = float((centred @ centred.T).diagonal().mean())

    def without(place: int, penalty: float) -> Tensor:
        others = [i for i in range(len(prompts)) if i != place]
        mean = embedded[others].mean(0)
        x, y = embedded[others] - mean, rows[others] - rows[others].mean(0)
        map = torch.linalg.solve(x.T @ x + penalty * added * torch.eye(x.shape[1]), x.T @ y)
        return rows[others].mean(0) + (embedded[place] - mean) @ map

    left_out = {p: torch.stack([without(place, p) for place in range(len(prompts))]) for p in PENALTIES}
    missed = {p: float((told - rows).square().sum()) for p, told in left_out.items()}
    best = min(missed, key=lambda penalty: missed[penalty])
    opening = fitted(prompts, estimates)
    assert opening.share == pytest.approx(1 - missed[best] / float((rows - rows.mean(0)).square().sum()), abs=1e-4)
    for place, prompt in enumerate(prompts):
        torch.testing.assert_close(opening.left_out(prompt).flatten().double(), left_out[best][place], rtol=1e-3, atol=1e-3)


def test_the_share_that_is_foretold_tells_a_law_from_noise() -> None:
    prompts = embedded_prompts(40)
    assert fitted(prompts, answers(prompts, 1.0, 0.01)).share > 0.95
    assert fitted(prompts, answers(prompts, 0.0, 1.0)).share < 0.1


def test_the_guess_of_a_new_prompt_follows_the_law() -> None:
    prompts = embedded_prompts(41)
    estimates = answers(prompts, 1.0, 0.01)
    guess = fitted(prompts[:40], estimates[:40]).guess(prompts[40])
    assert guess.shape == SHAPE
    assert (guess - estimates[40]).norm() < 0.2 * estimates[40].norm()


def test_a_prompt_counts_once_and_few_tell_nothing() -> None:
    prompts = embedded_prompts(FEW)
    estimates = answers(prompts, 1.0, 0.1)
    twice = fitted([*prompts, *prompts], [*estimates, *(-one for one in estimates)])
    assert len(twice.rows) == FEW
    assert twice.share == pytest.approx(fitted(prompts, estimates).share)
    assert Opening.of(zip(prompts[1:], estimates[1:], strict=True)) is None
    assert Opening.of(zip([prompts[0]] * FEW, estimates, strict=True)) is None


def test_a_given_estimate_stands_for_the_model(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "unipc", num_inference_steps=4)
    text = backbone.encode("a star", look)
    whole = denoise(backbone, Dense(frozenset({0})), look, text)

    class Told(Dense):
        def plan(self, look: Look) -> Plan:
            return replace(super().plan(look), given={0: whole.estimates[0]})

    told = denoise(backbone, Told(), look, text)
    torch.testing.assert_close(told.latents, whole.latents, rtol=1e-4, atol=1e-4)
    assert (told.calls, len(told.seconds)) == (whole.calls * 3 // 4, 4)


def known(backbone: Backbone, look: Look, count: int) -> list[Donor]:
    """Donors that hold a first estimate alone, following from the prompt."""
    noise = backbone.noise(look)
    prompts = embedded_prompts(count)
    law = torch.randn(len(prompts[0]), noise.numel(), generator=torch.Generator().manual_seed(1))
    return [Donor(estimates={0: (torch.from_numpy(one) @ law).view(noise.shape)}, prompt=one) for one in prompts]


@pytest.mark.parametrize("guess", [0.5, 1.0])
def test_a_hit_saves_the_calls_of_its_first_step_where_enough_is_foretold(family: Family, guess: float) -> None:
    record, backbone = family
    look = look_of(record, "unipc", num_inference_steps=8)
    options = CorrectionOptions(fast_steps=4, guess=guess)
    openings = known(backbone, look, 30)
    donors = [replace(donor, prompt=one.prompt) for donor, one in zip(taught(backbone, look, options), openings, strict=False)]
    lesson = options.learn(backbone, look, donors, openings[len(donors) :])
    assert lesson is not None
    assert lesson.prompts == (30 if guess < 1 else 0)
    run = denoise(
        backbone, options.hit(backbone, Donor(lesson=lesson, prompt=openings[0].prompt)), look, backbone.encode("a star", look)
    )
    whole = denoise(backbone, Dense(), look, backbone.encode("a star", look))
    assert run.calls == whole.calls * (3 if guess < 1 else 4) // 8
    assert len(run.seconds) == 4
    assert run.estimates == {}
    unknown = denoise(backbone, options.hit(backbone, Donor(lesson=lesson)), look, backbone.encode("a star", look))
    assert unknown.calls == whole.calls // 2  # without the request's embedding the model is asked


def test_a_hit_that_asks_the_model_leaves_its_first_estimate_behind(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "unipc", num_inference_steps=8)
    options = CorrectionOptions(fast_steps=4)
    donors = taught(backbone, look, options, PROMPTS)
    text = backbone.encode("a star", look)
    run = denoise(backbone, options.hit(backbone, Donor(lesson=options.learn(backbone, look, donors))), look, text)
    whole = denoise(backbone, Dense(frozenset({0})), look, text)
    assert torch.equal(run.estimates[0], whole.estimates[0])
