"""A short run that takes over how a donor's path bends, for every family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chai_cli.denoise import denoise
from chai_cli.errors import ChaiError
from chai_cli.reuse.base import Donor
from chai_cli.reuse.curvature import CurvatureOptions
from chai_cli.reuse.dense import Dense
from tests.contracts.test_cache_attention import Family, look_of, own_latents

FULL, FEW = 10, 4  # every noise level of the short schedule is one of the long one


@pytest.mark.parametrize("skip", [0, 1, 3])
def test_its_own_bend_takes_a_short_run_where_the_full_one_ends(family: Family, skip: int) -> None:
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=FULL)
    donor, dense = own_latents(backbone, look, "a red ball")
    options = CurvatureOptions(fast_steps=FEW, skip=skip)
    fast = [float(sigma) for sigma in backbone.schedule(replace(look, num_inference_steps=FEW)).sigmas][:FEW]
    long = [donor.sigmas[step] for step in range(FULL)]
    kept = options.kept(long, fast)
    assert len(kept) + 1 <= options.latents_kept
    stored = Donor({k: donor.steps[k] for k in kept}, {k: long[k] for k in kept}, donor.clean)
    assert options.unfit(stored, fast) == ""
    run = denoise(backbone, options.hit(backbone, stored), look, backbone.encode("a red ball", look))
    assert len(run.seconds) == FEW - skip
    torch.testing.assert_close(run.latents, dense, atol=1e-4, rtol=1e-4)


def test_without_strength_it_is_plain_sampling_from_the_donors_noise(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=FULL)
    donor, _ = own_latents(backbone, look, "a red ball")
    text = backbone.encode("a blue star", look)
    bare = denoise(backbone, CurvatureOptions(fast_steps=FEW, strength=0.0).hit(backbone, donor), replace(look, seed=99), text)
    plain = denoise(backbone, Dense(), replace(look, num_inference_steps=FEW), text)
    torch.testing.assert_close(bare.latents, plain.latents, atol=1e-5, rtol=1e-5)
    bent = denoise(backbone, CurvatureOptions(fast_steps=FEW).hit(backbone, donor), look, text)
    assert not torch.allclose(bent.latents, plain.latents, atol=1e-3)


def test_what_it_lacks_is_told(family: Family) -> None:
    record, backbone = family
    look = look_of(record, "euler", num_inference_steps=FULL)
    donor, _ = own_latents(backbone, look, "a red ball")
    options = CurvatureOptions(fast_steps=FEW)
    assert "does not hold" in options.unfit(replace(donor, clean=None), [1.0, 0.9])
    assert "does not hold" in options.unfit(Donor(clean=donor.clean), [1.0, 0.9])
    assert "takes no more" in options.useless(FEW)
    with pytest.raises(ChaiError, match="skip must leave a step"):
        CurvatureOptions(fast_steps=3, skip=3)
