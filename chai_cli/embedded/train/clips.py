"""Shards of painted clips on disk: painting costs 20 ms a clip, so training paints each one once."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from chai_cli.embedded.paint import paint_with_cover
from chai_cli.embedded.world import Scene, scenes

SHARD = 500
TRAIN_SEED, TEST_SEED = 10_000, 900_000
CELL = 8  # pixels of one latent cell, each way; a cell is 4 frames long, the first one frame


@dataclass(frozen=True)
class Shard:
    """`clips` uint8 [500, 17, 64, 64, 3]; `cover` uint8 [500, 2, 5, 8, 8], 255 where an object fills the latent cell."""

    seed: int
    clips: np.ndarray
    cover: np.ndarray
    scenes: list[Scene]


def cells(cover: np.ndarray) -> np.ndarray:
    """Mean cover of each latent cell: [2, T, H, W] -> [2, 1 + (T - 1) / 4, H / 8, W / 8]."""
    two, _, height, width = cover.shape
    square = cover.reshape(two, -1, height // CELL, CELL, width // CELL, CELL).mean((3, 5))
    later = square[:, 1:].reshape(two, -1, 4, *square.shape[2:]).mean(2)
    return np.concatenate([square[:, :1], later], 1)


def shard_scenes(seed: int) -> list[Scene]:
    return list(islice(scenes(seed), SHARD))


def paint_shard(job: tuple[Path, int]) -> None:
    path, seed = job
    painted = [paint_with_cover(scene) for scene in shard_scenes(seed)]
    np.save(path.with_suffix(".cover.npy"), np.stack([(cells(cover) * 255).astype(np.uint8) for _, cover in painted]))
    part = path.with_suffix(".part.npy")
    np.save(part, np.stack([clip for clip, _ in painted]))
    part.rename(path)


def clip_shards(folder: Path, first: int, count: int, workers: int = 2) -> list[Shard]:
    """The shards of seeds `first` to `first + count - 1`, painted if they are missing, mapped from disk."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {seed: folder / f"{seed}.npy" for seed in range(first, first + count)}
    missing = [(path, seed) for seed, path in paths.items() if not path.exists()]
    if missing:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for done, _ in enumerate(pool.imap_unordered(paint_shard, missing), 1):
                print(f"painted {done}/{len(missing)} shards", flush=True)
    return [
        Shard(seed, np.load(path, mmap_mode="r"), np.load(path.with_suffix(".cover.npy")), shard_scenes(seed))
        for seed, path in paths.items()
    ]
