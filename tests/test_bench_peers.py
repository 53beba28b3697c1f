"""In-request caches of other projects: each saves work, keeps to its request, and leaves the model as it was."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chai_cli.backbones.base import Look, Placement, find_record, load, resolve
from chai_cli.backbones.wan import WanBackbone
from chai_cli.bench.peers import CURVES, PEERS, MagRatios, Peer, peer_of
from chai_cli.denoise import denoise
from chai_cli.errors import ChaiError
from chai_cli.prompts import Settings
from chai_cli.reuse.dense import Dense

STEPS = 8
FAST = {
    "first-block": "first-block:threshold=10",
    "mag-cache": "mag-cache:threshold=10",
    "faster-cache": "faster-cache",
    "pab": "pab:spatial-skip-range=3,cross-skip-range=3",
    "taylorseer": "taylorseer:interval=3",
    "sea-cache": "sea-cache:threshold=10",
    "dbcache": "dbcache:threshold=0.99,warmup-steps=1",
}
needs_cache_dit = pytest.mark.skipif(importlib.util.find_spec("cache_dit") is None, reason="cache-dit is not installed")
every_peer = pytest.mark.parametrize(
    "peer",
    [pytest.param(peer_of(spec), id=name, marks=needs_cache_dit if name == "dbcache" else ()) for name, spec in FAST.items()],
)


def tiny(folder: Path) -> WanBackbone:
    loaded = load(find_record(str(folder)), Placement(device="cpu"))
    assert isinstance(loaded, WanBackbone)
    return loaded


@pytest.fixture(scope="module")
def backbone(tiny_folder: Path) -> WanBackbone:
    return tiny(tiny_folder)


@pytest.fixture(scope="module")
def two_transformers(tiny_folder: Path) -> WanBackbone:
    """One for the noisy steps and one for the others, as in Wan 2.2."""
    made = tiny(tiny_folder)
    made.pipe.register_modules(transformer_2=copy.deepcopy(made.pipe.transformer))
    made.pipe.register_to_config(boundary_ratio=0.8)
    made.fingerprint += "-two"
    return made


@pytest.fixture(scope="module")
def ratios() -> MagRatios:
    return MagRatios(["a blue star at sunset", "a red ball on a snowy field"])


def look_of(backbone: WanBackbone, **changes: Any) -> Look:
    settings = Settings(height=64, width=64, num_frames=9, num_inference_steps=STEPS, seed=3)
    return replace(resolve(backbone.record, settings, None), **changes)


@contextmanager
def computations(backbone: WanBackbone) -> Iterator[list[str]]:
    """Which layers ran, an entry for each side of guidance."""
    ran: list[str] = []

    def noting(name: str) -> Callable[[Any, tuple[Tensor]], None]:
        return lambda module, inputs: ran.extend([name] * inputs[0].shape[0])

    handles = [
        layer.register_forward_pre_hook(noting(name))
        for transformer in backbone.transformers()
        for block in transformer.blocks
        for name, layer in (("self", block.attn1.to_q), ("cross", block.attn2.to_q), ("feed", block.ffn.net[0]))
    ]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def render(backbone: WanBackbone, look: Look, peer: Peer | None = None, ratios: MagRatios | None = None, **how: Any) -> Tensor:
    text = backbone.encode("a red ball on a snowy field", look)
    if peer is None:
        return denoise(backbone, Dense(), look, text, **how).latents
    with peer.applied(backbone, look, ratios) as method:
        return denoise(backbone, method, look, text, **how).latents


def shape(backbone: WanBackbone) -> list[Any]:
    """What a transformer is made of, hooks and attributes of its modules included."""
    return [
        (name, type(module), sorted(vars(module)), sorted(getattr(vars(module).get("_diffusers_hook"), "hooks", ())))
        for transformer in backbone.transformers()
        for name, module in transformer.named_modules()
    ]


@every_peer
def test_a_peer_computes_less_and_other_latents(backbone: WanBackbone, ratios: MagRatios, peer: Peer) -> None:
    look = look_of(backbone)
    ratios.of(backbone, look)
    with computations(backbone) as dense_ran:
        dense = render(backbone, look)
    with computations(backbone) as ran:
        fast = render(backbone, look, peer, ratios)
    assert len(ran) < len(dense_ran)
    assert torch.isfinite(fast).all()
    assert not torch.equal(fast, dense)


@every_peer
def test_the_model_is_as_it_was_afterwards(backbone: WanBackbone, ratios: MagRatios, peer: Peer) -> None:
    look = look_of(backbone)
    dense, before = render(backbone, look), shape(backbone)
    render(backbone, look, peer, ratios)
    assert shape(backbone) == before
    assert torch.equal(render(backbone, look), dense)


@every_peer
def test_a_request_knows_nothing_of_the_one_before(backbone: WanBackbone, ratios: MagRatios, peer: Peer) -> None:
    first, second = look_of(backbone), look_of(backbone, seed=4)
    one_way = [render(backbone, look, peer, ratios) for look in (first, second)]
    other_way = [render(backbone, look, peer, ratios) for look in (second, first)]
    assert torch.equal(one_way[0], other_way[1])
    assert torch.equal(one_way[1], other_way[0])


@every_peer
def test_a_failed_render_leaves_nothing_behind(backbone: WanBackbone, ratios: MagRatios, peer: Peer) -> None:
    look = look_of(backbone)
    dense, before = render(backbone, look), shape(backbone)
    whole = render(backbone, look, peer, ratios)

    def stop(done: int, total: int, estimate: torch.Tensor) -> None:
        if done == STEPS - 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        render(backbone, look, peer, ratios, on_step=stop)
    assert shape(backbone) == before
    assert torch.equal(render(backbone, look), dense)
    assert torch.equal(render(backbone, look, peer, ratios), whole)


@every_peer
def test_a_model_with_two_transformers(two_transformers: WanBackbone, ratios: MagRatios, peer: Peer) -> None:
    look = look_of(two_transformers)
    dense = render(two_transformers, look)
    assert not torch.equal(render(two_transformers, look, peer, ratios), dense)
    assert torch.equal(render(two_transformers, look), dense)


@pytest.mark.parametrize("name", ["first-block", "mag-cache", "pab", "taylorseer", "sea-cache"])
def test_no_guidance(backbone: WanBackbone, ratios: MagRatios, name: str) -> None:
    look = look_of(backbone, guidance_scale=1.0)
    ratios.of(backbone, look)
    with computations(backbone) as ran:
        render(backbone, look, peer_of(FAST[name]), ratios)
    assert len(ran) < 3 * 2 * STEPS  # layers, blocks


def test_attention_that_is_said_again_is_that_of_the_same_side(backbone: WanBackbone) -> None:
    per_step: list[int] = []
    with computations(backbone) as ran:

        def count(done: int, total: int, estimate: torch.Tensor) -> None:
            per_step.append(ran.count("self"))
            ran.clear()

        render(backbone, look_of(backbone), peer_of("pab:spatial-skip-range=2"), on_step=count)
    assert set(per_step) == {0, 4}  # both sides of both blocks, or none


def test_one_batch_of_both_sides_is_what_two_calls_are(backbone: WanBackbone) -> None:
    look = look_of(backbone)
    never_skips = peer_of("faster-cache:spatial-skip-range=1,unconditional-skip-range=1")
    torch.testing.assert_close(render(backbone, look, never_skips), render(backbone, look), rtol=1e-3, atol=1e-4)


def test_ratios_are_measured_once(
    backbone: WanBackbone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []
    own = MagRatios.measure

    def measure(self: MagRatios, backbone: WanBackbone, prompt: str, look: Look) -> Any:
        measured.append((prompt, look.num_inference_steps))
        return own(self, backbone, prompt, look)

    monkeypatch.setattr(MagRatios, "measure", measure)
    ratios = MagRatios(["one", "two"])
    peer = peer_of("mag-cache:threshold=0.5")
    for seed in (1, 2):
        render(backbone, look_of(backbone, seed=seed), peer, ratios)
    assert measured == [("one", STEPS), ("two", STEPS)]
    assert [len(one) for one in ratios.of(backbone, look_of(backbone))] == [STEPS]
    ratios.of(backbone, look_of(backbone, num_inference_steps=2))
    assert measured[2:] == [("one", 2), ("two", 2)]
    assert "MagCache" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("teacache", "no in-request cache named 'teacache'; there is first-block, .*, dbcache"),
        ("first-block:order=2", "first-block has no option 'order'; it has threshold"),
        ("first-block:threshold=much", "threshold must be a number, not 'much'"),
        ("first-block:threshold=nan", "first-block: threshold must be 0 or more, not nan"),
        ("taylorseer:interval=2.5", "interval must be a whole number, not '2.5'"),
        ("taylorseer:interval=0", "taylorseer: interval must be 1 or more, not 0"),
    ],
)
def test_a_spec_that_cannot_be(spec: str, said: str) -> None:
    with pytest.raises(ChaiError, match=f"^{said}$"):
        peer_of(spec)


def test_the_curves_name_every_peer() -> None:
    assert {peer_of(spec).name for spec in CURVES} == set(PEERS)
    assert len(set(CURVES)) == len(CURVES)


def refusal(backbone: WanBackbone, spec: str, **changes: Any) -> str:
    before = shape(backbone)
    with pytest.raises(ChaiError) as caught:
        render(backbone, look_of(backbone, **changes), peer_of(spec))
    assert shape(backbone) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_model_cannot_take_is_one_sentence(backbone: WanBackbone, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a guidance scale above 1" in refusal(backbone, "faster-cache", guidance_scale=1.0)
    assert "needs magnitude ratios" in refusal(backbone, "mag-cache")
    transformer = backbone.transformers()[0]
    blocks = transformer.blocks
    transformer.blocks = blocks[:0]
    try:
        for name in PEERS.keys() - {"mag-cache", "faster-cache", "taylorseer", "dbcache"}:
            assert refusal(backbone, name).startswith(f"{name} ")
    finally:
        transformer.blocks = blocks
    monkeypatch.setitem(sys.modules, "cache_dit", None)
    assert refusal(backbone, "dbcache") == "dbcache needs cache-dit: pip install 'chai-cli[bench]'"
