"""The Open-Sora family: Open-Sora 1.2, and a small model of its kind with any autoencoder that chai knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from diffusers import AutoencoderKLWan, DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from chai_cli.backbones.base import Look, ModelRecord, Placement, part_of, read_json
from chai_cli.backbones.opensora.captions import prepared
from chai_cli.backbones.opensora.transformer import STDiT3
from chai_cli.backbones.opensora.vae import OpenSoraVAE, latent_frames
from chai_cli.backbones.pipeline import SCHEDULERS, PipelineBackbone, decode_wan, fingerprint, wan_latent_frames
from chai_cli.errors import ChaiError

IMAGE_FPS = 120  # what Open-Sora is told of a single frame
SPACE = 8  # pixels of a latent cell each way


class OpenSoraPipeline(DiffusionPipeline):  # type: ignore[misc]
    """The parts of an Open-Sora, kept together so that they can be saved, moved and offloaded; it samples nothing by itself."""

    model_cpu_offload_seq = "text_encoder->transformer->vae"

    def __init__(self, transformer: Any, vae: Any, text_encoder: Any, tokenizer: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer)


@dataclass(frozen=True)
class OpenSoraFiles:
    """What the files of an Open-Sora tell without loading it.

    Attributes:
        fingerprint: Tells models apart whose latents do not fit each other.
        channels: Of a latent.
        wan: The autoencoder is Wan's.
        piece, time: Frames that are coded as one piece (None: all), frames of one latent.
    """

    fingerprint: str
    channels: int
    wan: bool
    piece: int | None = 17
    time: int = 4

    @classmethod
    def read(cls, record: ModelRecord, folder: Path, placement: Placement) -> OpenSoraFiles:
        index = read_json(folder / "model_index.json", f"{record.name} is not whole: it has no readable model_index.json")
        parts = {}
        for name in ("transformer", "vae"):
            path = part_of(folder, index, name) / "config.json"
            parts[name] = read_json(path, f"{record.name} is not whole: {path} is missing or broken")
        transformer, vae = parts.values()
        own = fingerprint(record, folder, placement, index.get("_class_name"))
        wan = vae.get("_class_name") == AutoencoderKLWan.__name__
        time = 2 ** sum(vae.get("halved", (False, True, True)))
        return cls(own, int(transformer.get("in_channels", 4)), wan, vae.get("micro_frame_size", 17), 4 if wan else time)

    def latent_shape(self, look: Look) -> tuple[int, int, int, int, int]:
        """[1, C, T, H, W].

        Raises:
            ChaiError: a size the model cannot make.
        """
        if self.wan and (look.height % SPACE or look.width % SPACE):
            raise ChaiError(f"height and width must be multiples of {SPACE}, not {look.height} and {look.width}")
        count = look.num_frames
        frames = wan_latent_frames(count, self.time) if self.wan else latent_frames(count, self.piece, self.time)
        return 1, self.channels, frames, look.height // SPACE, look.width // SPACE


class OpenSoraBackbone(PipelineBackbone):
    """An Open-Sora: its velocity, turned round, is that of diffusers' flow matching solvers."""

    def __init__(self, record: ModelRecord, folder: Path, placement: Placement) -> None:
        self.files = OpenSoraFiles.read(record, folder, placement)
        super().__init__(record, folder, placement, self.files)

    def open(self, folder: Path) -> OpenSoraPipeline:
        index = read_json(folder / "model_index.json", f"{folder / 'model_index.json'} cannot be read")
        names = ("transformer", "vae", "vae_2d", "text_encoder", "tokenizer")
        transformer, coder, spatial, text, words = (part_of(folder, index, name) for name in names)
        if self.files.wan:
            vae = AutoencoderKLWan.from_pretrained(coder, dtype=torch.float32, local_files_only=True)
        else:
            vae = OpenSoraVAE.from_pretrained(coder, dtype=torch.float32, vae_2d=spatial if spatial.is_dir() else None)
        encoder = getattr(transformers, index.get("text_encoder", [None, None])[1] or "T5EncoderModel")
        return OpenSoraPipeline(
            transformer=STDiT3.from_pretrained(transformer, dtype=self.dtype),
            vae=vae,
            text_encoder=encoder.from_pretrained(text, dtype=self.dtype, local_files_only=True),
            tokenizer=transformers.AutoTokenizer.from_pretrained(words if words.is_dir() else text, local_files_only=True),
        )

    def add_loras(self, loras: tuple[str, ...]) -> None:
        if loras:
            raise ChaiError(f"{self.record.name} takes no --lora; Wan models do")

    def embed(self, prompt: str, look: Look) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        cond, cut = self.read(prepared(prompt, look.aesthetic_score))
        if look.guidance_scale <= 1:
            return cond, None, cut
        if look.negative_prompt:
            return cond, self.read(prepared(look.negative_prompt, None))[0], cut
        nothing = self.pipe.transformer.y_embedder.y_embedding[: cond.shape[1]]  # as many tokens as the prompt has
        return cond, nothing.unsqueeze(0), cut

    def read(self, text: str) -> tuple[torch.Tensor, int]:
        """Embeddings of a text [1, L, C], without padding, and the tokens that were cut off."""
        limit = self.record.max_sequence_length
        tokens = self.pipe.tokenizer(text).input_ids
        kept = self.pipe.tokenizer(text, truncation=True, max_length=limit, return_tensors="pt").input_ids
        return self.pipe.text_encoder(kept.to(self.device)).last_hidden_state, len(tokens) - limit

    def schedule(self, look: Look) -> Any:
        made = SCHEDULERS.get(look.scheduler, FlowMatchEulerDiscreteScheduler)
        shift = time_shift(look, self.pipe.transformer.config.input_sq_size)
        if made is FlowMatchEulerDiscreteScheduler:
            scheduler = made(shift=shift)
        else:
            scheduler = made(flow_shift=shift, use_flow_sigmas=True, prediction_type="flow_prediction")
        steps = look.num_inference_steps
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), device=self.device)
        return scheduler

    def predict(
        self, model: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, look: Look
    ) -> torch.Tensor:
        out = model(
            hidden_states=latents.to(model.dtype),
            timestep=timestep.expand(latents.shape[0]),
            encoder_hidden_states=text.expand(latents.shape[0], -1, -1) if text.shape[0] == 1 else text,
            fps=float(look.fps if look.num_frames > 1 else IMAGE_FPS),
            height=float(look.height),
            width=float(look.width),
            return_dict=False,
        )[0]
        return -out[:, : latents.shape[1]]

    def frames(self, latents: torch.Tensor, look: Look) -> Iterable[torch.Tensor]:
        vae = self.pipe.vae
        return decode_wan(vae, latents) if isinstance(vae, AutoencoderKLWan) else vae.frames(latents, look.num_frames)


def time_shift(look: Look, side: int) -> float:
    """How far the times of a schedule lean to noise: with the root of the pixels and that of the latent frames.

    Source: `timestep_transform` of Open-Sora 1.2, with one square frame of a `side` of 512 pixels as 1. Frames beyond whole
    pieces of 17 do not count, as there; less than one piece, for which Open-Sora has no schedule, counts by its latent frames.
    """
    frames = look.num_frames // 17 * 5 or latent_frames(look.num_frames)
    return float((look.height * look.width) ** 0.5 / side * frames**0.5)
