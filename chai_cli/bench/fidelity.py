"""What a clip is worth: what it shows of its prompt, and how it differs from the dense render of the same request."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from chai_cli.bench.workload import Case, value
from chai_cli.embedded.judge import Judge, Reading
from chai_cli.embedded.world import ATTRIBUTES, Scene, Thing

FRAME_EVERY = 4  # frames that CLIP sees
MAIN = ("background", "colour", "shape", "motion")  # the attributes that `four` counts


@dataclass(frozen=True)
class Seen:
    """What was read off one clip.

    Attributes:
        clip_t: Mean cosine of the prompt and every fourth frame, by an open_clip model.
        psnr, ssim: Against the dense clip: how different, not how good. Infinite PSNR is kept as 100.
        flicker: Mean absolute second difference of neighbouring frames, over that of the dense clip: 1 is as steady.
        reading: What the judge sees; None where the world is unknown.
    """

    clip_t: float
    psnr: float
    ssim: float
    flicker: float
    reading: dict[str, Any] | None = None

    def right(self, scene: Scene) -> dict[str, bool]:
        """For each attribute, whether the clip shows what the scene says."""
        assert self.reading is not None
        things = tuple(Thing(**thing) for thing in self.reading["things"])
        return Reading(self.reading["background"], things).right(scene)


class ClipScore:
    """CLIP-T with both towers of an open_clip model."""

    def __init__(self, spec: str, device: str) -> None:
        import open_clip

        from chai_cli.embed import load_towers

        self.name, model, self.tokenizer = load_towers(spec)
        self.model = model.eval().requires_grad_(False).to(device)
        self.device = device
        config = open_clip.get_model_preprocess_cfg(self.model)
        self.transform = open_clip.image_transform(
            config["size"],
            is_train=False,
            mean=config["mean"],
            std=config["std"],
            interpolation=config["interpolation"],
            resize_mode=config["resize_mode"],
        )

    @torch.no_grad()
    def score(self, prompt: str, frames: np.ndarray) -> float:
        """Frames uint8 [T, H, W, 3]."""
        from PIL import Image

        pictures = torch.stack([self.transform(Image.fromarray(frame)) for frame in frames[::FRAME_EVERY]]).to(self.device)
        images = self.model.encode_image(pictures, normalize=True)
        text = self.model.encode_text(self.tokenizer([prompt]).to(self.device), normalize=True)
        return float((images @ text[0]).mean())


class Critic:
    """Reads clips. Without a judge (prompts of no known world) only CLIP and the comparison with dense remain."""

    def __init__(self, clip: ClipScore, judge: Judge | None) -> None:
        self.clip = clip
        self.judge = judge

    def see(self, case: Case, frames: np.ndarray, dense: np.ndarray) -> Seen:
        """Frames and those of the dense render, uint8 [T, H, W, 3]."""
        reading = None
        if self.judge is not None and case.scene is not None:
            found = self.judge.read(frames[None])[0]
            reading = {"background": found.background, "things": [asdict(thing) for thing in found.things]}
        steady = flicker(dense)
        return Seen(
            clip_t=self.clip.score(case.prompt, frames),
            psnr=psnr(frames, dense),
            ssim=ssim(frames, dense),
            flicker=flicker(frames) / steady if steady else 1.0,
            reading=reading,
        )


def critic_for(world: bool, tower: str, device: str) -> Critic:
    """A critic of clips of the embedded world, or of any others.

    Args:
        tower: An open_clip name or folder, for CLIP-T.
    """
    from chai_cli.embedded.evaluate import WEIGHTS

    return Critic(ClipScore(tower, device), Judge.load(WEIGHTS / "judge") if world else None)


def psnr(frames: np.ndarray, dense: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB over a whole clip, at most 100."""
    error = float(np.mean((frames.astype(np.float64) - dense) ** 2))
    return 100.0 if error == 0 else min(100.0, 10 * float(np.log10(255**2 / error)))


def ssim(frames: np.ndarray, dense: np.ndarray) -> float:
    """Mean structural similarity of the frames."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    ours, theirs = (torch.from_numpy(np.ascontiguousarray(x)).permute(0, 3, 1, 2).float() for x in (frames, dense))
    similarity = structural_similarity_index_measure(ours, theirs, data_range=255.0)
    assert isinstance(similarity, torch.Tensor)
    return float(similarity)


def flicker(frames: np.ndarray) -> float:
    """Mean absolute second difference of neighbouring frames, of 255."""
    if len(frames) < 3:
        return 0.0
    return float(np.abs(np.diff(frames.astype(np.float32), n=2, axis=0)).mean())


def four(right: dict[str, bool]) -> bool:
    """Whether background, colour, shape and motion are all right."""
    return all(right[name] for name in MAIN)


def lost(right: dict[str, bool], dense: dict[str, bool]) -> bool:
    """Unsafe reuse: an attribute that the dense clip shows and this one does not."""
    return any(dense[name] and not right[name] for name in right)


def drifted(seen: Seen, scene: Scene, donor: Scene) -> list[str]:
    """The attributes that differ between request and donor in which the clip shows the donor's."""
    theirs = seen.right(donor)
    return [name for name in ATTRIBUTES if value(scene, name) != value(donor, name) and theirs[name]]
