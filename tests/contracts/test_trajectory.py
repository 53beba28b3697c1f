"""Contract 3 for reuse that starts from a donor's latents, and contract 5 for two methods together, for every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from chai_cli.backbones.base import Backbone, Look
from chai_cli.denoise import denoise
from chai_cli.errors import ChaiError
from chai_cli.reuse import reuse_of
from chai_cli.reuse.base import Donor
from chai_cli.reuse.dense import Dense
from chai_cli.reuse.trajectory import LEVELS, TrajectoryOptions
from tests.contracts.test_cache_attention import Family, look_of, own_latents


def hit(backbone: Backbone, look: Look, prompt: str, donor: Donor, spec: str) -> tuple[Tensor, int]:
    reuse = reuse_of(spec)
    assert reuse is not None
    run = denoise(backbone, reuse.hit(backbone, donor), look, backbone.encode(prompt, look))
    return run.latents, len(run.seconds)


@pytest.mark.parametrize("similarity", [0.7, 0.8, 0.9, 0.96, 1.0])
def test_a_run_that_starts_from_its_own_latents_equals_the_uninterrupted_one(family: Family, similarity: float) -> None:
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=10)
    donor, dense = own_latents(backbone, look, "a red ball")
    resumed, steps = hit(backbone, look, "a red ball", replace(donor, similarity=similarity), "nirvana")
    assert torch.equal(resumed, dense)
    assert steps == 10 - round(10 * max(share for least, share in LEVELS if similarity >= least))


def test_clean_latents_with_the_same_noise_lie_on_the_straight_path_to_them(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=10)
    donor, _ = own_latents(backbone, look, "a red ball")
    options = TrajectoryOptions(source="clean", start_sigma=0.5)
    noise = backbone.noise(look)
    method = options.hit(backbone, donor)
    plan = method.plan(look)
    sigma = float(backbone.schedule(look).sigmas[plan.start_step])
    assert sigma <= 0.5 < float(backbone.schedule(look).sigmas[plan.start_step - 1])
    assert donor.clean is not None
    torch.testing.assert_close(method.start(noise, plan), noise + (1 - sigma) * (donor.clean - noise))


def test_what_an_entry_keeps_is_what_a_hit_reads(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=10)
    sigmas = [float(sigma) for sigma in backbone.schedule(look).sigmas][:10]
    options = TrajectoryOptions()
    kept = options.kept(sigmas, sigmas)
    assert kept == {1, 2, 3, 4, 5}
    assert options.latents_kept == len(kept)
    donor, _ = own_latents(backbone, look, "a red ball")
    stored = Donor({k: donor.steps[k] for k in kept}, {k: donor.sigmas[k] for k in kept})
    for least, _ in LEVELS:
        assert options.unfit(replace(stored, similarity=least), sigmas) == ""
    assert "too little alike" in options.unfit(replace(stored, similarity=0.6), sigmas)
    assert "does not hold" in options.unfit(Donor(similarity=0.9), sigmas)
    assert TrajectoryOptions(source="clean").kept(sigmas, sigmas) == frozenset()
    assert "does not hold" in TrajectoryOptions(source="clean").unfit(replace(stored, similarity=0.9), sigmas)


def test_a_shorter_schedule_joins_where_the_noise_level_fits(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=12)
    donor, _ = own_latents(backbone, look, "a red ball")
    _, steps = hit(backbone, look, "a blue star", donor, "nirvana:fast-steps=4,start-sigma=0.95")
    sigmas = [float(sigma) for sigma in backbone.schedule(replace(look, num_inference_steps=4)).sigmas][:4]
    assert steps == sum(sigma <= 0.95 for sigma in sigmas) < 4


@pytest.mark.parametrize(
    "spec", ["nirvana", "nirvana:source=clean", "nirvana+chai:match=sigma,steps=2/3/4", "nirvana+chai:match=final"]
)
def test_two_requests_in_a_row_equal_each_alone(family: Family, spec: str) -> None:
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=10)
    donor, _ = own_latents(backbone, look, "a red ball")
    other = replace(look, seed=look.seed + 1)
    first, second = (hit(backbone, one, text, donor, spec)[0] for one, text in ((look, "a star"), (other, "a blue ring")))
    assert torch.equal(hit(backbone, other, "a blue ring", donor, spec)[0], second)
    assert torch.equal(hit(backbone, look, "a star", donor, spec)[0], first)
    plain = denoise(backbone, Dense(), look, backbone.encode("a star", look)).latents
    assert not torch.equal(first, plain)


def test_together_they_do_what_each_does(family: Family) -> None:
    """Started from its own latents and attending to them, a run is unchanged; attending to another's, it is not."""
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=10)
    donor, dense = own_latents(backbone, look, "a red ball")
    spec = "nirvana+chai:match=sigma,steps=6/7/8"
    assert torch.equal(hit(backbone, look, "a red ball", donor, spec)[0], dense)
    stranger, _ = own_latents(backbone, replace(look, seed=99), "a blue star")
    mixed = Donor({**donor.steps, **{k: stranger.steps[k] for k in (6, 7)}}, donor.sigmas, donor.clean)
    assert not torch.equal(hit(backbone, look, "a red ball", mixed, spec)[0], dense)


@pytest.mark.parametrize("wrong", [{"source": "frames"}, {"fast_steps": 1}, {"start_sigma": 0.0}, {"start_sigma": 1.5}])
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ChaiError):
        TrajectoryOptions(**wrong)
