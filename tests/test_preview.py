"""The picture of a clip in the making."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import Result

from chai_cli.backbones.base import Backbone, resolve
from chai_cli.denoise import denoise
from chai_cli.preview import CLIPS, Preview, clear, picture
from chai_cli.prompts import Settings
from chai_cli.reuse.dense import Dense

SHAPE = (1, 4, 3, 6, 8)


def clip_of(latents: torch.Tensor, law: torch.Tensor) -> np.ndarray:
    """Frames whose colours follow from the latents linearly, 8 pixels a cell, 3 frames a latent frame."""
    colours = (latents[0].movedim(0, -1) @ law).sigmoid()
    return (colours.repeat_interleave(3, 0).repeat_interleave(8, 1).repeat_interleave(8, 2) * 255).byte().numpy()


def test_colours_follow_from_the_latents_and_are_known_in_the_next_run(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    law = 0.3 * torch.randn(4, 3, generator=generator)
    first = Preview(tmp_path / "preview.gif", "a model", tmp_path / "maps")
    latents = [torch.randn(SHAPE, generator=generator) for _ in range(CLIPS + 1)]
    first.step(30, 30, latents[0], 8)
    assert not (tmp_path / "preview.gif").exists()  # nothing is known yet
    for one in latents[:CLIPS]:
        first.learn(one, clip_of(one, law))
    shown = picture(latents[-1], first.map if first.map is not None else np.empty(0))
    truth = clip_of(latents[-1], law)[::3, ::8, ::8]
    assert shown.shape == truth.shape
    assert np.abs(shown.astype(int) - truth).mean() < 8
    again = Preview(tmp_path / "preview.gif", "a model", tmp_path / "maps")
    again.step(30, 30, latents[0], 8)
    with Image.open(tmp_path / "preview.gif") as made:
        assert getattr(made, "n_frames", 1) == 3
    again.close()
    assert list(tmp_path.glob("preview*")) == []
    assert Preview(tmp_path / "x.gif", "another model", tmp_path / "maps").map is None


@pytest.mark.parametrize("steps", [1, 4, 30])
def test_it_is_shown_a_few_times(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preview = Preview(tmp_path / "preview.gif", "m", tmp_path)
    preview.map = np.zeros((5, 3), np.float32)
    shown: list[Any] = []
    monkeypatch.setattr(preview, "write", lambda *given: shown.append(given))
    for done in range(1, steps + 1):
        preview.step(done, steps, torch.zeros(SHAPE), 8)
    assert min(steps, 4) <= len(shown) <= 7


def test_a_picture_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    preview = Preview(tmp_path / "nowhere" / "preview.gif", "m", tmp_path / "nothing")
    preview.learn(torch.zeros(SHAPE), np.zeros((9, 48, 64, 3), np.uint8))
    preview.step(1, 1, torch.zeros(SHAPE), 8)
    preview.close()


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY"])
def test_a_map_that_cannot_be_read_is_fitted_anew(content: bytes, tmp_path: Path) -> None:
    kept = Preview(tmp_path / "preview.gif", "m", tmp_path).kept
    kept.write_bytes(content)
    preview = Preview(tmp_path / "preview.gif", "m", tmp_path)
    assert preview.map is None
    for _ in range(CLIPS):
        preview.learn(torch.randn(SHAPE), np.zeros((9, 48, 64, 3), np.uint8))
    assert Preview(tmp_path / "preview.gif", "m", tmp_path).map is not None
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_the_estimate_of_a_late_step_looks_like_the_clip(embedded: Backbone, tmp_path: Path) -> None:
    preview = Preview(tmp_path / "preview.gif", "m", tmp_path)
    look = resolve(embedded.record, Settings(num_inference_steps=6), "unipc")
    run = denoise(embedded, Dense(), look, embedded.encode("a red ball in the desert", look))
    preview.learn(run.latents, embedded.decode(run.latents, look))
    estimates: list[torch.Tensor] = []
    other = resolve(embedded.record, Settings(num_inference_steps=6, seed=1), "unipc")
    text = embedded.encode("a large blue star at sea", other)
    last = denoise(embedded, Dense(), other, text, lambda done, total, estimate: estimates.append(estimate))
    assert preview.map is not None
    shown = torch.from_numpy(picture(estimates[3], preview.map)).float()
    frames = torch.from_numpy(embedded.decode(last.latents, other)).permute(3, 0, 1, 2)[None].float()
    truth = torch.nn.functional.adaptive_avg_pool3d(frames, shown.shape[:3])[0].movedim(0, -1)
    assert torch.corrcoef(torch.stack([shown.flatten(), truth.flatten()]))[0, 1] > 0.7


def test_a_run_shows_it_and_takes_it_away(
    chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    written: list[Path] = []
    whole = Preview.write
    monkeypatch.setattr(Preview, "write", lambda self, *given: (whole(self, *given), written.append(self.path))[0])
    (tmp_path / "p.txt").write_text("a\nb\n")
    size = ("--height", "64", "--width", "64", "--num-frames", "9", "--steps", "3")
    out = tmp_path / "out"
    result = chai("gen", tmp_path / "p.txt", "--out", out, "--model", tiny_folder, *size, "--no-cache", "--preview")
    assert result.exit_code == 0, result.output
    assert written == [out / "preview.gif"] * 3  # the first clip taught it
    assert not (out / "preview.gif").exists()


def test_what_a_killed_run_left_goes_and_a_picture_of_somebody_else_stays(tmp_path: Path) -> None:
    left = tmp_path / "preview.gif"
    clear(left)
    preview = Preview(left, "m", tmp_path)
    preview.write(np.zeros((3, 48, 64, 3), np.uint8), 8)
    clear(left)
    assert not left.exists()
    Image.new("RGB", (8, 8)).save(left)
    clear(left)
    assert left.exists()
    left.write_bytes(b"GIF89a")
    clear(left)
    assert left.exists()
