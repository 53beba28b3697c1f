"""Clips as latents on disk: what the transformer trains on, and where in each latent the objects are."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from chai_cli.embedded.train.clips import SHARD, TRAIN_SEED, clip_shards
from chai_cli.embedded.train.numbers import fast_products
from chai_cli.embedded.train.vae import as_video
from chai_cli.embedded.world import Scene, Thing, left_to_right

STILLS = 4  # single frames of each clip that are encoded as pictures
TURN = {"left": "right", "right": "left"}


@dataclass(frozen=True)
class Sample:
    """A clip's background and its objects from left to right."""

    background: str
    things: tuple[Thing, ...]

    def scene(self) -> Scene:
        return Scene(self.background, self.things, seed=1)


def sample(scene: Scene, mirrored: bool) -> Sample:
    """What a clip, or its mirror image, shows."""
    things = left_to_right(scene)
    if mirrored:
        things = tuple(replace(thing, motion=TURN.get(thing.motion, thing.motion)) for thing in things[::-1])
    return Sample(scene.background, things)


@dataclass(frozen=True)
class LatentShard:
    """Clips and their mirror images.

    `video` float16 [1000, C, 5, 8, 8], `stills` float16 [1000, 4, C, 8, 8], both as the encoder gives them (not scaled);
    `cover` uint8 [1000, 2, 5, 8, 8]; `samples` what each shows.
    """

    video: np.ndarray
    stills: np.ndarray
    cover: np.ndarray
    samples: list[Sample]


@torch.no_grad()
def encode_shard(job: tuple[Path, Path, int, Path]) -> None:
    clips, folder, seed, weights = job
    torch.set_num_threads(1)
    vae = AutoencoderKLWan.from_pretrained(weights, torch_dtype=torch.float32).eval()
    shard = clip_shards(clips, seed, 1)[0]
    video, stills = [], []
    for mirrored in (False, True):
        for start in range(0, SHARD, 20):
            x = as_video(np.array(shard.clips[start : start + 20]))
            x = x.flip(-1) if mirrored else x
            with fast_products():
                video.append(vae.encode(x).latent_dist.mean.half())
                frames = x[:, :, torch.linspace(0, 16, STILLS).long()].transpose(1, 2).flatten(0, 1).unsqueeze(2)
                stills.append(vae.encode(frames).latent_dist.mean.half().view(-1, STILLS, vae.config.z_dim, 8, 8))
    part = folder / f"{seed}.part.npz"
    np.savez(part, video=torch.cat(video).numpy(), stills=torch.cat(stills).numpy())
    part.rename(folder / f"{seed}.npz")


def latent_shards(clips: Path, folder: Path, weights: Path, count: int, workers: int = 2) -> list[LatentShard]:
    """The latents of the first `count` training shards, encoded by the autoencoder in `weights` if they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    seeds = range(TRAIN_SEED, TRAIN_SEED + count)
    jobs = [(clips, folder, seed, weights) for seed in seeds if not (folder / f"{seed}.npz").exists()]
    if jobs:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for done, _ in enumerate(pool.imap_unordered(encode_shard, jobs), 1):
                print(f"encoded {done}/{len(jobs)} shards", flush=True)
    shards = []
    for seed, painted in zip(seeds, clip_shards(clips, TRAIN_SEED, count), strict=True):
        arrays = np.load(folder / f"{seed}.npz")
        mirror = painted.cover[:, ::-1, :, :, ::-1].copy()
        alone = [i for i, scene in enumerate(painted.scenes) if len(scene.things) == 1]
        mirror[alone] = mirror[alone][:, ::-1]
        samples = [sample(scene, mirrored) for mirrored in (False, True) for scene in painted.scenes]
        shards.append(LatentShard(arrays["video"], arrays["stills"], np.concatenate([painted.cover, mirror]), samples))
    return shards
