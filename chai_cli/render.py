"""Renderer: one request, from its prompt to its mp4."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from chai_cli.backbones.base import Backbone, Look, Text
from chai_cli.denoise import denoise, timed
from chai_cli.errors import ChaiError
from chai_cli.reuse import METHODS
from chai_cli.video import write_mp4


@dataclass(frozen=True)
class Rendered:
    """What a render cost. Seconds by part; memory in MiB, the highest the process or the device had so far."""

    steps: int
    model_calls: int
    seconds: dict[str, float]
    peak_memory_mib: float
    latents_reused: bool


def is_out_of_memory(error: BaseException) -> bool:
    """True for the device's own error and for the ways in which the CPU allocator words it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said)


def peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows keeps no such figure
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class Renderer:
    """Holds the loaded model; nothing of a request stays in it.

    Args:
        backbone: The model.
        method: Name of a method.
        scratch: Folder for latents and unfinished files, on the file system of the videos.
        scale: Enlargement, see `video.write_mp4`; None picks one that makes small clips visible.
        metadata: Write prompt and settings into the mp4.
    """

    def __init__(self, backbone: Backbone, method: str, scratch: Path, scale: Callable[[Look], int], metadata: bool) -> None:
        self.backbone = backbone
        self.method = method
        self.scratch = scratch
        self.scale = scale
        self.metadata = metadata

    def encode(self, prompt: str, look: Look) -> tuple[Text, float]:
        """The prompt's embeddings and the seconds they took."""
        seconds: list[float] = []
        with timed(self.backbone.device, seconds.append):
            text = self.backbone.encode(prompt, look)
        return text, seconds[0]

    def render(
        self,
        name: str,
        look: Look,
        text: tuple[Text, float],
        wanted: dict[str, Any],
        target: Path,
        on_step: Callable[[int, int], None],
    ) -> Rendered:
        """Write `target`, whole or not at all.

        `wanted` is the whole request, settings and all, the same from run to run: it tells whether kept latents are this
        request's, and goes into the mp4 so that `chai show` can repeat it.

        The clean latents are on disk before they are decoded; if decoding or writing fails they stay, and the next
        call for the same request takes them instead of sampling again.
        """
        device = self.backbone.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = {"text": text[1], "retrieval": 0.0}

        def part(key: str) -> Any:
            return timed(device, lambda taken: seconds.__setitem__(key, taken))

        kept = self.scratch / f"{name}.latents.safetensors"
        key = json.dumps([self.backbone.fingerprint, wanted], sort_keys=True)
        latents, calls, steps = load_latents(kept, key), 0, 0
        found = latents is not None
        with part("denoise"):
            if latents is None:
                trajectory = denoise(self.backbone, METHODS[self.method](), look, text[0], on_step)
                latents, calls, steps = trajectory.latents, trajectory.calls, len(trajectory.seconds)
                if not torch.isfinite(latents).all():
                    raise ChaiError("the model gave values that are no numbers; try --dtype float32 or another --scheduler")
                save_latents(latents, kept, key)
        with part("decode"):
            frames = self.backbone.decode(latents)
        part_file = self.scratch / f"{name}.part.mp4"
        try:
            with part("write"):
                write_mp4(frames, part_file, look.fps, self.scale(look), wanted if self.metadata else None)
                part_file.replace(target)
        finally:
            part_file.unlink(missing_ok=True)
        kept.unlink(missing_ok=True)
        seconds["total"] = sum(seconds.values())
        return Rendered(steps, calls, seconds, peak_memory_mib(device), found)


def save_latents(latents: torch.Tensor, path: Path, key: str) -> None:
    beside = path.with_suffix(".part")
    save_file({"latents": latents.cpu().contiguous()}, beside, metadata={"request": key})
    beside.replace(path)


def load_latents(path: Path, key: str) -> torch.Tensor | None:
    """The latents of exactly this request, or None."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("latents") if file.metadata().get("request") == key else None
    except (OSError, SafetensorError):
        return None
