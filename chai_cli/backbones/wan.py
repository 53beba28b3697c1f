"""The Wan family: Wan 2.1 and 2.2 text-to-video, and the embedded model, all through diffusers' `WanPipeline`."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from diffusers.utils import logging as diffusers_logging
from diffusers.utils.torch_utils import randn_tensor
from transformers.utils import logging as transformers_logging

from chai_cli.backbones.base import Look, ModelRecord, Placement, Text, identity, read_json
from chai_cli.errors import ChaiError, first_line

SCHEDULERS = {"euler": FlowMatchEulerDiscreteScheduler, "unipc": UniPCMultistepScheduler}
HEAVY = 2**30  # bytes; a text encoder beyond this leaves the accelerator while the transformer works


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or the best there is.

    Raises:
        ChaiError: this machine has no such device.
    """
    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ChaiError(f"this machine has no device {name!r}; try --device cpu, or leave --device out") from None
    return device


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name is not None:
        return names[name]
    return torch.float32 if device.type == "cpu" else torch.bfloat16 if device.type == "cuda" else torch.float16


def weigh(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@dataclass(frozen=True)
class WanFiles:
    """What the files of a pipeline tell without loading it.

    Attributes:
        fingerprint: Tells models apart whose latents do not fit each other: weights, numbers, text length, LoRAs.
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
        dtype = choose_dtype(placement.dtype, choose_device(placement.device))
        said = json.dumps([index.get("_class_name"), str(dtype), record.max_sequence_length, placement.lora])
        fingerprint = hashlib.blake2b((said + identity(folder)).encode(), digest_size=12).hexdigest()
        grid = max(16, space * patch[1], space * patch[2])
        return cls(fingerprint, int(transformer.get("in_channels", 16)), space, time, grid)

    def latent_shape(self, look: Look) -> tuple[int, int, int, int, int]:
        """[1, C, T, H, W].

        Raises:
            ChaiError: a size the model cannot make.
        """
        if look.height % self.grid or look.width % self.grid:
            raise ChaiError(f"height and width must be multiples of {self.grid}, not {look.height} and {look.width}")
        if (look.num_frames - 1) % self.time:
            near = (look.num_frames - 1) // self.time * self.time + 1
            raise ChaiError(
                f"num_frames must be a multiple of {self.time} plus 1, not {look.num_frames}; "
                f"{near} and {near + self.time} are nearest"
            )
        cells = look.height // self.space, look.width // self.space
        return 1, self.channels, (look.num_frames - 1) // self.time + 1, *cells


class WanBackbone:
    """A `WanPipeline` taken apart: the same parts in the same order, with the loop left to `denoise.py`."""

    def __init__(self, record: ModelRecord, folder: Path, placement: Placement) -> None:
        self.record = record
        self.device = choose_device(placement.device)
        self.dtype = choose_dtype(placement.dtype, self.device)
        if placement.offload != "none" and self.device.type == "cpu":
            raise ChaiError(f"--offload {placement.offload} needs a GPU; leave it out on the CPU")
        self.offload = placement.offload
        for library in (diffusers_logging, transformers_logging):
            library.disable_progress_bar()
            library.set_verbosity_error()
        self.files = WanFiles.read(record, folder, placement)
        self.fingerprint = self.files.fingerprint
        self.latent_shape = self.files.latent_shape
        try:
            vae = AutoencoderKLWan.from_pretrained(folder / "vae", dtype=torch.float32, local_files_only=True)
            self.pipe = WanPipeline.from_pretrained(folder, vae=vae, dtype=self.dtype, local_files_only=True)
        except Exception as error:  # the loaders raise whatever the broken file makes them raise
            raise ChaiError(f"cannot load {record.name} from {folder}: {first_line(error)}") from None
        if placement.vae_tiling:
            self.pipe.vae.enable_tiling()
        self.add_loras(placement.lora)
        self.place(placement)

    def add_loras(self, loras: tuple[str, ...]) -> None:
        """Load adapter weights; `path:0.8` sets their strength."""
        strengths = {}
        for number, lora in enumerate(loras):
            match = re.fullmatch(r"(.+):(\d*\.?\d+)", lora)
            path, strength = match.groups() if match else (lora, "1")
            if not Path(path).exists() and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(?<!\.safetensors)", path):
                raise ChaiError(
                    f"cannot use --lora {lora}: there is no file or folder {path} (a strength goes behind a colon: path:0.8)"
                )
            try:
                self.pipe.load_lora_weights(path, adapter_name=f"lora{number}")
                strengths[f"lora{number}"] = float(strength)
                self.pipe.set_adapters(list(strengths), list(strengths.values()))
            except Exception as error:  # missing peft, missing file, foreign keys: all are one sentence to the user
                hint = "; LoRA needs pip install 'chai-cli[lora]'" if "PEFT" in str(error) else ""
                raise ChaiError(f"cannot use --lora {lora}: {first_line(error)}{hint}") from None

    def place(self, placement: Placement) -> None:
        if placement.attention_backend:
            try:
                for transformer in self.transformers():
                    transformer.set_attention_backend(placement.attention_backend)
            except Exception as error:  # unknown names and missing packages raise different kinds
                raise ChaiError(f"cannot use --attention-backend {placement.attention_backend}: {first_line(error)}") from None
        if self.offload == "model":
            self.pipe.enable_model_cpu_offload(device=self.device)
        elif self.offload == "group":
            self.pipe.enable_group_offload(self.device, num_blocks_per_group=1, use_stream=self.device.type == "cuda")
        else:
            self.pipe.to(self.device)
        if placement.compile:
            for transformer in self.transformers():
                transformer.compile_repeated_blocks()

    def transformers(self) -> list[Any]:
        return [t for t in (self.pipe.transformer, self.pipe.transformer_2) if t is not None]

    @torch.no_grad()
    def encode(self, prompt: str, look: Look) -> Text:
        encoder = self.pipe.text_encoder
        if self.offload == "none" and encoder.device != self.device:
            encoder.to(self.device)
        cond, uncond = self.pipe.encode_prompt(
            prompt,
            look.negative_prompt,
            do_classifier_free_guidance=look.guidance_scale > 1,
            max_sequence_length=self.record.max_sequence_length,
            device=self.device,
        )
        dtype = self.transformers()[0].dtype
        cut = len(self.pipe.tokenizer(prompt).input_ids) - self.record.max_sequence_length
        return Text(cond.to("cpu", dtype), None if uncond is None else uncond.to("cpu", dtype), max(0, cut))

    def release_text_encoder(self) -> None:
        if self.offload == "none" and self.device.type != "cpu" and weigh(self.pipe.text_encoder) > HEAVY:
            self.pipe.text_encoder.to("cpu")
            self.free_memory()

    def free_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

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

    def noise(self, look: Look) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(look.seed)
        return randn_tensor(self.latent_shape(look), generator=generator, device=self.device, dtype=torch.float32)

    @torch.no_grad()
    def velocity(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: Text, guidance_scale: float, context: dict[str, Any]
    ) -> tuple[torch.Tensor, int]:
        model = self.pipe.transformer
        boundary = self.pipe.config.boundary_ratio
        if boundary is not None and timestep < boundary * self.pipe.scheduler.config.num_train_timesteps:
            model = self.pipe.transformer_2
        times = timestep.expand(latents.shape[0])
        if self.pipe.config.expand_timesteps:  # Wan 2.2 5B: one time for each token
            cells = torch.ones_like(latents[:, 0, :, ::2, ::2]).flatten(1)
            times = cells * timestep
        inputs = latents.to(model.dtype)

        def forward(name: str, embeds: torch.Tensor) -> torch.Tensor:
            with model.cache_context(name, **context):
                out: torch.Tensor = model(
                    hidden_states=inputs,
                    timestep=times,
                    encoder_hidden_states=embeds.to(self.device),
                    return_dict=False,
                )[0]
            return out

        cond = forward("cond", text.cond)
        if guidance_scale <= 1 or text.uncond is None:
            return cond, 1
        uncond = forward("uncond", text.uncond)
        return uncond + guidance_scale * (cond - uncond), 2

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        vae = self.pipe.vae
        latents = latents.to(self.device, vae.dtype)
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
        std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents)
        video = vae.decode(latents / std + mean, return_dict=False)[0]
        frames = self.pipe.video_processor.postprocess_video(video, output_type="np")[0]
        return (np.asarray(frames) * 255).round().astype(np.uint8)
