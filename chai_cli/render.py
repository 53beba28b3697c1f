"""Renderer: one request, from its prompt to its mp4."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from chai_cli.backbones.base import Backbone, Look, Text, noise_levels
from chai_cli.cache import Event
from chai_cli.denoise import Trajectory, denoise, timed
from chai_cli.donors import Donors, Found
from chai_cli.errors import ChaiError
from chai_cli.preview import Preview
from chai_cli.retrieve import Meaning
from chai_cli.reuse.base import Method
from chai_cli.reuse.dense import Dense
from chai_cli.video import write_mp4


@dataclass(frozen=True)
class Rendered:
    """What a render cost and what it reused.

    Attributes:
        seconds: By part.
        peak_memory_mib: The highest that the process or the device had so far.
        latents_reused: The latents kept from an earlier run were decoded, nothing was sampled.
        found: The donor, or why there was none; None for a method that reuses nothing.
        calls_saved, seconds_saved: Of a hit, against a dense render of the same size.
        not_stored: Why a dense render was not kept as a donor; empty if it was, or if the method keeps nothing.
    """

    steps: int
    model_calls: int
    seconds: dict[str, float]
    peak_memory_mib: float
    latents_reused: bool
    found: Found | None = None
    calls_saved: int = 0
    seconds_saved: float = 0.0
    not_stored: str = ""


@dataclass(frozen=True)
class Understood:
    """A prompt as the models read it, and the seconds that took."""

    text: Text
    text_seconds: float
    meaning: Meaning | None = None
    meaning_seconds: float = 0.0


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
        donors: Where donors come from and go to; None renders everything densely.
        scratch: Folder for latents and unfinished files, on the file system of the videos.
        scale: Enlargement, see `video.write_mp4`; None picks one that makes small clips visible.
        metadata: Write prompt and settings into the mp4.
    """

    def __init__(
        self, backbone: Backbone, donors: Donors | None, scratch: Path, scale: Callable[[Look], int], metadata: bool
    ) -> None:
        self.backbone = backbone
        self.donors = donors
        self.scratch = scratch
        self.scale = scale
        self.metadata = metadata
        self.preview: Preview | None = None

    def encode(self, prompt: str, look: Look) -> tuple[Text, float]:
        """The prompt's embeddings and the seconds they took."""
        seconds: list[float] = []
        with timed(self.backbone.device, seconds.append):
            text = self.backbone.encode(prompt, look)
        return text, seconds[0]

    def understand(self, prompts: Sequence[str]) -> tuple[list[Meaning], float]:
        """What prompts are about, and the seconds each took; nothing for a method that reuses nothing."""
        if self.donors is None or not prompts:
            return [], 0.0
        seconds: list[float] = []
        with timed(self.backbone.device, seconds.append):
            meanings = self.donors.understand(prompts)
        return meanings, seconds[0] / len(prompts)

    def render(
        self,
        name: str,
        look: Look,
        understood: Understood,
        wanted: dict[str, Any],
        target: Path | None,
        on_step: Callable[[int, int], None],
    ) -> Rendered:
        """Write `target`, whole or not at all; without a target the prompt is rendered densely and only the cache is filled.

        `wanted` is the whole request, settings and all, the same from run to run: it tells whether kept latents are this
        request's, and goes into the mp4 so that `chai show` can repeat it.

        The clean latents are on disk before they are decoded; if decoding or writing fails they stay, and the next
        call for the same request takes them instead of sampling again.
        """
        device = self.backbone.device
        seconds = {"text": understood.text_seconds, "retrieval": understood.meaning_seconds}

        def part(key: str) -> Any:
            return timed(device, lambda taken: seconds.__setitem__(key, seconds.get(key, 0.0) + taken))

        kept = self.scratch / f"{name}.latents.safetensors"
        key = json.dumps([self.backbone.fingerprint, wanted], sort_keys=True)
        latents, run, found = load_latents(kept, key), None, None
        if latents is None:
            with part("retrieval"):
                method, found = self.choose(understood.meaning, look, fresh=target is None)
            with part("denoise"):
                run = denoise(self.backbone, method, look, understood.text, self.watched(on_step, look))
            latents = run.latents
            if not torch.isfinite(latents).all():
                raise ChaiError("the model gave values that are no numbers; try --dtype float32 or another --scheduler")
            with part("write"):
                save_latents(latents, kept, key)
        with part("decode"):
            frames = self.backbone.decode(latents, look)
        if target is not None:
            part_file = self.scratch / f"{name}.part.mp4"
            try:
                with part("write"):
                    write_mp4(frames, part_file, look.fps, self.scale(look), wanted if self.metadata else None)
                    part_file.replace(target)
            finally:
                part_file.unlink(missing_ok=True)
        kept.unlink(missing_ok=True)
        if self.preview:
            self.preview.learn(latents, frames)
        steps, calls = (len(run.seconds), run.calls) if run else (0, 0)
        made = Rendered(steps, calls, seconds, 0.0, run is None, found)
        if run and found:
            with part("store"):
                made = self.account(made, found, wanted["prompt"], understood.meaning, look, run, frames)
        seconds["total"] = sum(seconds.values())
        return replace(made, peak_memory_mib=peak_memory_mib(device))

    def watched(self, on_step: Callable[[int, int], None], look: Look) -> Callable[[int, int, torch.Tensor], None]:
        """What is told of each step: to the progress bar, and to the preview."""

        def step(done: int, total: int, estimate: torch.Tensor) -> None:
            on_step(done, total)
            if self.preview:
                self.preview.step(done, total, estimate, look.fps)

        return step

    def choose(self, meaning: Meaning | None, look: Look, fresh: bool) -> tuple[Method, Found | None]:
        """The method for a request: a hit's if the cache has a donor, else dense, recording what later hits will read."""
        if self.donors is None:
            return Dense(), None
        reuse, steps = self.donors.reuse, look.num_inference_steps
        fast = noise_levels(self.backbone, look, reuse.schedule(steps))
        found = Found("rendered to be a donor") if fresh else self.donors.find(meaning, look, fast)
        if found.donor:
            return reuse.hit(self.backbone, found.donor), found
        return Dense(reuse.kept(noise_levels(self.backbone, look, steps), fast)), found

    def account(
        self,
        made: Rendered,
        found: Found,
        prompt: str,
        meaning: Meaning | None,
        look: Look,
        run: Trajectory,
        frames: np.ndarray,
    ) -> Rendered:
        """Keep a miss as a donor, count a hit, and write both down."""
        assert self.donors is not None
        so_far = sum(made.seconds.values())
        size = (look.height, look.width, look.num_frames)
        event = Event(
            time=0.0,
            kind="miss",
            model=self.backbone.record.name,
            size=size,
            prompt=prompt,
            why=found.why,
            seconds=so_far,
            steps=made.steps,
            calls=made.model_calls,
        )
        if found.donor is None or found.entry is None:
            why = self.donors.keep(meaning, look, run, so_far, frames)
            self.donors.tell(event)
            return replace(made, not_stored=why)
        saved = self.donors.saved(found, look, so_far)
        self.donors.keep_opening(meaning, look, run)
        calls_saved = run.step_calls * look.num_inference_steps - run.calls
        hit = replace(event, kind="hit")
        if found.candidate:
            hit = replace(hit, donor=found.entry.id, donor_prompt=found.entry.prompt)
        self.donors.tell(replace(hit, saved=saved, calls_saved=calls_saved), found, look.num_inference_steps - made.steps)
        return replace(made, calls_saved=calls_saved, seconds_saved=saved)


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
