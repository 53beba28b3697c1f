"""A model whose parts come and go makes what one makes that stays, and what fails leaves nothing on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from chai_cli.backbones.base import Backbone, Incomplete, ModelRecord, Placement, load
from chai_cli.denoise import denoise
from chai_cli.errors import ChaiError
from chai_cli.reuse.dense import Dense
from tests.contracts.test_loop import SMALL, Family, look_of, render


def clips(record: ModelRecord, backbone: Backbone) -> list[np.ndarray]:
    """Two requests, the second with other words on both sides of guidance."""
    look = look_of(record, "unipc", replace(SMALL, num_inference_steps=2))
    asked = [("a red ball", look), ("a blue star over the sea", replace(look, negative_prompt="blurred"))]
    return [backbone.decode(render(backbone, one, prompt).latents, one) for prompt, one in asked]


@pytest.mark.parametrize("offload", ["model", "group"])
def test_an_offloaded_model_makes_the_same(family: Family, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the device here."""
    record, backbone = family
    moved = load(record, Placement(device="cpu"))
    moved.offload = offload  # type: ignore[attr-defined]
    if offload == "group":  # it may not fit there as a whole
        monkeypatch.setattr(moved.pipe.text_encoder, "to", lambda *_: pytest.fail("moved whole"))  # type: ignore[attr-defined]
    moved.place(Placement(device="cpu", offload=offload))  # type: ignore[attr-defined]
    assert all(map(np.array_equal, clips(record, moved), clips(record, backbone)))
    if offload == "group":  # the text encoder comes block by block too
        blocks = moved.pipe.text_encoder.encoder.block  # type: ignore[attr-defined]
        assert all(hasattr(block, "_diffusers_hook") for block in blocks)


def test_nothing_stays_on_the_device_after_decoding_or_a_failure(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hook:
        calls = 0

        def offload(self) -> None:
            self.calls += 1

    record, backbone = family
    hook, pipe = Hook(), backbone.pipe  # type: ignore[attr-defined]
    monkeypatch.setattr(pipe, "_all_hooks", [hook], raising=False)
    look = look_of(record, "euler")
    backbone.decode(backbone.noise(look), look)
    assert hook.calls == 1
    if hasattr(pipe.vae, "_feat_map"):
        pipe.vae._feat_map = [torch.ones(1)]
    backbone.free_memory()
    assert hook.calls == 2
    assert all(kept is None for kept in getattr(pipe.vae, "_feat_map", []))


def test_a_text_encoder_that_did_not_fit_is_not_left_half_there(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    record, backbone = family
    went = []

    def to(where: object) -> None:
        went.append(str(where))
        if str(where) != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backbone, "device", torch.device("meta"))
    monkeypatch.setattr(backbone.pipe.text_encoder, "to", to)  # type: ignore[attr-defined]
    with pytest.raises(torch.OutOfMemoryError):
        backbone.encode("a red ball", look_of(record, "euler"))
    assert went == ["meta", "cpu"]


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
def test_latents_are_not_rounded_to_the_numbers_of_the_model(family: Family, scheduler: str) -> None:
    record, _ = family
    backbone, look = load(record, Placement(device="cpu", dtype="bfloat16")), look_of(record, scheduler)
    latents = denoise(backbone, Dense(), look, backbone.encode("a red ball", look)).latents
    assert latents.dtype == torch.float32
    assert not torch.equal(latents, latents.bfloat16().float())


@pytest.mark.parametrize(
    ("part", "error", "said"),
    [
        ("place", torch.OutOfMemoryError("CUDA out of memory"), "does not fit on cpu: try --offload model"),
        ("open", MemoryError("no room"), "does not fit into the memory of this machine"),
        ("open", ImportError("needs the sentencepiece library"), "needs the sentencepiece library"),
    ],
)
def test_what_no_download_mends_is_one_sentence_at_once(
    family: Family, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception, said: str
) -> None:
    record, backbone = family

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(type(backbone), part, fails)
    with pytest.raises(ChaiError, match=said) as told:
        load(record, Placement(device="cpu"))
    assert not isinstance(told.value, Incomplete)
