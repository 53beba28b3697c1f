"""A glance at the clip that is being made: the clean estimate of a step as colours, without the autoencoder.

A cell of latents says nearly linearly which colour its place has. The map is fitted by least squares on the first clips that a model
decodes here, and kept for later runs.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool3d

TIMES = 6  # a clip is shown so many times while it is made, about
CLIPS = 4  # that a map is fitted on
SIDE = 192  # pixels of the shorter side
COMMENT = b"chai preview"  # tells a picture of ours, which may go, from one of somebody else


class Preview:
    """Writes an animated picture of what is being rendered.

    Args:
        path: The picture, a GIF; whole or not there, and gone when the run ends.
        fingerprint: Of the model: its map is kept under this name.
        folder: Where maps are kept.
    """

    def __init__(self, path: Path, fingerprint: str, folder: Path) -> None:
        self.path = path
        self.kept = folder / f"{hashlib.blake2b(fingerprint.encode(), digest_size=12).hexdigest()}.npy"
        self.map: np.ndarray | None = None
        self.seen: list[tuple[Tensor, Tensor]] = []
        with suppress(Exception):  # a map that cannot be read is fitted anew
            map = np.load(self.kept, allow_pickle=False)
            self.map = map if map.ndim == 2 and map.shape[1] == 3 else None

    def learn(self, latents: Tensor, frames: np.ndarray) -> None:
        """Fit the map [C + 1, 3] on the first clips. What goes wrong costs the picture alone.

        Args:
            latents: Clean, [1, C, T, H, W].
            frames: Their clip, uint8 [T', H', W', 3].
        """
        if len(self.seen) >= CLIPS or (self.map is not None and not self.seen):
            return
        with suppress(Exception):
            self.seen.append((cells(latents), colours(frames, latents.shape[2:])))
            seen, told = (torch.cat(side).double() for side in zip(*self.seen, strict=True))
            square = seen.T @ seen + torch.eye(seen.shape[1], dtype=torch.float64)
            self.map = torch.linalg.solve(square, seen.T @ told).float().numpy()
            if len(self.seen) == CLIPS:
                self.kept.parent.mkdir(parents=True, exist_ok=True)
                beside = self.kept.with_suffix(f".{os.getpid()}.npy")
                np.save(beside, self.map, allow_pickle=False)
                beside.replace(self.kept)

    def step(self, done: int, total: int, estimate: Tensor, fps: int) -> None:
        """Show a step's clean estimate [1, C, T, H, W], if it is one that is shown and the map is known."""
        if done % max(1, round(total / TIMES)) and done != total:
            return
        if self.map is None or len(self.map) != estimate.shape[1] + 1:
            return
        with suppress(Exception):
            self.write(picture(estimate, self.map), fps)

    def write(self, frames: np.ndarray, fps: int) -> None:
        from PIL import Image

        times = max(1, round(SIDE / min(frames.shape[1:3])))
        size = (frames.shape[2] * times, frames.shape[1] * times)
        pictures = [Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in frames]
        beside = self.path.with_suffix(".part")
        pictures[0].save(
            beside, "GIF", save_all=True, append_images=pictures[1:], duration=round(4000 / fps), loop=0, comment=COMMENT
        )
        beside.replace(self.path)

    def close(self) -> None:
        """Take the picture away."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.with_suffix(".part").unlink(missing_ok=True)


def clear(path: Path) -> None:
    """Take away what a run that was killed left."""
    from PIL import Image

    with suppress(Exception):
        path.with_suffix(".part").unlink(missing_ok=True)
        with Image.open(path) as left:
            ours = left.info.get("comment") == COMMENT
        if ours:
            path.unlink()


def picture(latents: Tensor, map: np.ndarray) -> np.ndarray:
    """Latents [1, C, T, H, W] as colours, uint8 [T, H, W, 3]."""
    shown = cells(latents) @ torch.from_numpy(map)
    return (shown.clamp(0, 1) * 255).round().byte().view(*latents.shape[2:], 3).numpy()


def cells(latents: Tensor) -> Tensor:
    """What is seen of each cell, [T H W, C + 1]: its latents and a one."""
    rows = latents.cpu().float()[0].flatten(1).T
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1)


def colours(frames: np.ndarray, shape: torch.Size) -> Tensor:
    """The mean colour of each cell, [T H W, 3], from 0 to 1."""
    clip = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 255
    return adaptive_avg_pool3d(clip, (shape[0], shape[1], shape[2]))[0].flatten(1).T
