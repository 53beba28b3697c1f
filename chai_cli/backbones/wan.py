"""The Wan family: Wan 2.1 and 2.2 text-to-video, and the embedded model, all through diffusers' `WanPipeline`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

from chai_cli.backbones.base import Look, ModelRecord, Placement, read_json
from chai_cli.backbones.pipeline import SCHEDULERS, PipelineBackbone, decode_wan, fingerprint, wan_latent_frames
from chai_cli.errors import ChaiError


@dataclass(frozen=True)
class WanFiles:
    """What the files of a pipeline tell without loading it.

    Attributes:
        fingerprint: Tells models apart whose latents do not fit each other.
        channels: Of a latent.
        space, time: Pixels of a latent cell each way, frames of one.
        grid: What height and width must be multiples of.
    """

    fingerprint: str
    channels: int
    space: int
    time: int
    grid: int

    @classmethod
    def read(cls, record: ModelRecord, folder: Path, placement: Placement) -> WanFiles:
        parts = {}
        for name in ("model_index.json", "transformer/config.json", "vae/config.json"):
            parts[name] = read_json(folder / name, f"{record.name} is not whole: {folder / name} is missing or broken")
        index, transformer, vae = parts.values()
        space, time = int(vae.get("scale_factor_spatial", 8)), int(vae.get("scale_factor_temporal", 4))
        patch = transformer.get("patch_size", (1, 2, 2))
        own = fingerprint(record, folder, placement, index.get("_class_name"))
        grid = max(16, space * patch[1], space * patch[2])
        return cls(own, int(transformer.get("in_channels", 16)), space, time, grid)

    def latent_shape(self, look: Look) -> tuple[int, int, int, int, int]:
        """[1, C, T, H, W].

        Raises:
            ChaiError: a size the model cannot make.
        """
        if look.height % self.grid or look.width % self.grid:
            raise ChaiError(f"height and width must be multiples of {self.grid}, not {look.height} and {look.width}")
        frames = wan_latent_frames(look.num_frames, self.time)
        return 1, self.channels, frames, look.height // self.space, look.width // self.space


class WanBackbone(PipelineBackbone):
    """A `WanPipeline` taken apart."""

    negative: tuple[str, torch.Tensor] | None = None  # what was read last, and its embeddings: the same for most prompts

    def __init__(self, record: ModelRecord, folder: Path, placement: Placement) -> None:
        super().__init__(record, folder, placement, WanFiles.read(record, folder, placement))

    def open(self, folder: Path) -> Any:
        vae = AutoencoderKLWan.from_pretrained(folder / "vae", dtype=torch.float32, local_files_only=True)
        return WanPipeline.from_pretrained(folder, vae=vae, dtype=self.dtype, local_files_only=True)

    def transformers(self) -> list[Any]:
        return [t for t in (self.pipe.transformer, self.pipe.transformer_2) if t is not None]

    def transformer_at(self, timestep: torch.Tensor) -> Any:
        boundary = self.pipe.config.boundary_ratio
        if boundary is not None and timestep < boundary * self.pipe.scheduler.config.num_train_timesteps:
            return self.pipe.transformer_2
        return self.pipe.transformer

    def embed(self, prompt: str, look: Look) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        cond, cut = self.read(prompt), len(self.pipe.tokenizer(prompt).input_ids) - self.record.max_sequence_length
        if look.guidance_scale <= 1:
            return cond, None, cut
        if self.negative is None or self.negative[0] != look.negative_prompt:
            self.negative = look.negative_prompt, self.read(look.negative_prompt)
        return cond, self.negative[1], cut

    def read(self, text: str) -> torch.Tensor:
        """Embeddings of a text [1, L, D], padded with zeros."""
        length = self.record.max_sequence_length
        made: torch.Tensor = self.pipe.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=length, device=self.device
        )[0]
        return made

    def schedule(self, look: Look) -> Any:
        own = self.pipe.scheduler
        made = SCHEDULERS.get(look.scheduler, type(own))
        shift = self.record.flow_shift or own.config.get("flow_shift") or own.config.get("shift") or 1.0
        if made is UniPCMultistepScheduler:
            scheduler = made.from_config(own.config, flow_shift=shift, use_flow_sigmas=True, prediction_type="flow_prediction")
        else:
            scheduler = made.from_config(own.config, shift=shift)
        scheduler.set_timesteps(look.num_inference_steps, device=self.device)
        return scheduler

    def predict(
        self, model: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, look: Look
    ) -> torch.Tensor:
        times = timestep.expand(latents.shape[0])
        if self.pipe.config.expand_timesteps:  # Wan 2.2 5B: one time for each token
            times = torch.ones_like(latents[:, 0, :, ::2, ::2]).flatten(1) * timestep
        inputs = latents.to(model.dtype)
        return model(hidden_states=inputs, timestep=times, encoder_hidden_states=text, return_dict=False)[0]

    def frames(self, latents: torch.Tensor, look: Look) -> Iterable[torch.Tensor]:
        return decode_wan(self.pipe.vae, latents)
