"""What all families share that are a diffusers pipeline taken apart: loading, placing, LoRAs, guidance, noise."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.hooks import apply_group_offloading
from diffusers.utils import logging as diffusers_logging
from diffusers.utils.torch_utils import empty_device_cache, randn_tensor
from transformers.utils import logging as transformers_logging

from chai_cli.backbones.base import Incomplete, Look, ModelFiles, ModelRecord, Placement, Text, identity
from chai_cli.errors import ChaiError, first_line
from chai_cli.memory import is_out_of_memory, keep_freed

SCHEDULERS = {"euler": FlowMatchEulerDiscreteScheduler, "unipc": UniPCMultistepScheduler}
COMPILED = 64  # graphs of a block: sizes and lengths of prompts, each with and without a donor
COMPILED_OFFLOADED = 10_000  # with `--offload group` every block has graphs of its own
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


def fingerprint(record: ModelRecord, folder: Path, placement: Placement, *said: Any) -> str:
    """Tells models apart whose latents do not fit each other: weights, numbers, text length, LoRAs, and what else is `said`."""
    dtype = choose_dtype(placement.dtype, choose_device(placement.device))
    told = json.dumps([*said, str(dtype), record.max_sequence_length, placement.lora])
    return hashlib.blake2b((told + identity(folder)).encode(), digest_size=12).hexdigest()


class PipelineBackbone(ABC):
    """A pipeline taken apart: the same parts in the same order, with the loop left to `denoise.py`."""

    pipe: Any

    def __init__(self, record: ModelRecord, folder: Path, placement: Placement, files: ModelFiles) -> None:
        self.record = record
        self.device = choose_device(placement.device)
        self.dtype = choose_dtype(placement.dtype, self.device)
        if placement.offload != "none" and self.device.type == "cpu":
            raise ChaiError(f"--offload {placement.offload} needs a GPU; leave it out on the CPU")
        self.offload = placement.offload
        if self.device.type == "cpu":
            keep_freed()
        elif self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # streams are made on the current one
        for library in (diffusers_logging, transformers_logging):
            library.disable_progress_bar()
            library.set_verbosity_error()
        self.fingerprint = files.fingerprint
        self.latent_shape = files.latent_shape
        try:
            self.pipe = self.open(folder)
        except Exception as error:  # the loaders raise whatever the broken file makes them raise
            if is_out_of_memory(error):
                raise ChaiError(f"{record.name} does not fit into the memory of this machine: {first_line(error)}") from None
            kind = ChaiError if isinstance(error, ImportError) else Incomplete  # no download brings a package
            raise kind(f"cannot load {record.name} from {folder}: {first_line(error)}") from None
        if placement.vae_tiling:
            self.pipe.vae.enable_tiling()
        self.add_loras(placement.lora)
        try:
            self.place(placement)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            less = "a smaller --dtype" if self.offload == "group" else "--offload model or --offload group"
            raise ChaiError(f"{record.name} does not fit on {self.device}: try {less}") from None

    @abstractmethod
    def open(self, folder: Path) -> Any:
        """The pipeline, with its autoencoder in float32."""

    @abstractmethod
    def embed(self, prompt: str, look: Look) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Embeddings of a prompt and of what guidance leads away from [1, L, D], and the tokens that were cut off."""

    @abstractmethod
    def predict(
        self, model: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, look: Look
    ) -> torch.Tensor:
        """The velocity from data to noise, of one side of guidance."""

    @abstractmethod
    def frames(self, latents: torch.Tensor, look: Look) -> Iterable[torch.Tensor]:
        """Decoded frames [N, 3, H, W] from -1 to 1, some at a time."""

    def transformer_at(self, timestep: torch.Tensor) -> Any:
        """The transformer that denoises at this time."""
        return self.pipe.transformer

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
            # Not the pipeline's own method: that puts what it leaves out on the device whole, before anything else is done.
            for transformer in self.transformers():
                apply_group_offloading(transformer, self.device, num_blocks_per_group=1, use_stream=self.device.type == "cuda")
            text = {"num_blocks_per_group": 1, "block_modules": ["encoder"]}  # its blocks lie one deeper
            apply_group_offloading(self.pipe.text_encoder, self.device, **text)
            self.pipe.vae.to(self.device)  # small beside the others, and asked piece by piece
        else:
            self.pipe.to(self.device)
        if placement.compile:
            graphs = COMPILED_OFFLOADED if self.offload == "group" else COMPILED
            torch._dynamo.config.recompile_limit = graphs
            torch._dynamo.config.accumulated_recompile_limit = max(graphs, torch._dynamo.config.accumulated_recompile_limit)
            for transformer in self.transformers():
                transformer.compile_repeated_blocks()

    def transformers(self) -> list[Any]:
        return [self.pipe.transformer]

    @torch.no_grad()
    def encode(self, prompt: str, look: Look) -> Text:
        encoder = self.pipe.text_encoder
        if self.offload == "none" and encoder.device != self.device:
            try:
                encoder.to(self.device)
            except Exception:  # half of it is there: to the next prompt it would look as if all were
                encoder.to("cpu")
                raise
        cond, uncond, cut = self.embed(prompt, look)
        dtype = self.transformers()[0].dtype
        return Text(cond.to("cpu", dtype), None if uncond is None else uncond.to("cpu", dtype), max(0, cut))

    def release_text_encoder(self) -> None:
        if self.offload == "none" and self.device.type != "cpu" and weigh(self.pipe.text_encoder) > HEAVY:
            self.pipe.text_encoder.to("cpu")
            self.free_memory()

    def free_memory(self) -> None:
        self.unload()
        if hasattr(self.pipe.vae, "clear_cache"):  # a decode that failed leaves its features there
            self.pipe.vae.clear_cache()
        gc.collect()
        empty_device_cache(self.device.type)

    def unload(self) -> None:
        """With `--offload model`, take from the device what is there, half moved parts too."""
        for hook in getattr(self.pipe, "_all_hooks", ()):
            hook.offload()

    def noise(self, look: Look) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(look.seed)
        return randn_tensor(self.latent_shape(look), generator=generator, device=self.device, dtype=torch.float32)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, look: Look) -> np.ndarray:
        made = to_frames(self.frames(latents.to(self.device, self.pipe.vae.dtype), look))
        self.unload()
        return made

    @torch.no_grad()
    def velocity(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: Text, look: Look, context: dict[str, Any]
    ) -> tuple[torch.Tensor, int]:
        model = self.transformer_at(timestep)

        def forward(name: str, embeds: torch.Tensor) -> torch.Tensor:
            with model.cache_context(name, **context):
                return self.predict(model, latents, timestep, embeds.to(self.device), look).float()  # as the latents are

        cond = forward("cond", text.cond)
        if look.guidance_scale <= 1 or text.uncond is None:
            return cond, 1
        uncond = forward("uncond", text.uncond)
        return uncond + look.guidance_scale * (cond - uncond), 2


def wan_latent_frames(num_frames: int, time: int) -> int:
    """Latent frames of a video that an `AutoencoderKLWan` codes, `time` frames of it in one.

    Raises:
        ChaiError: a number of frames it cannot make.
    """
    if (num_frames - 1) % time:
        near = (num_frames - 1) // time * time + 1
        raise ChaiError(
            f"num_frames must be a multiple of {time} plus 1, not {num_frames}; {near} and {near + time} are nearest"
        )
    return (num_frames - 1) // time + 1


def decode_wan(vae: Any, latents: torch.Tensor) -> Iterable[torch.Tensor]:
    """Frames [1, 3, H, W] from normalised latents of an `AutoencoderKLWan`."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents)
    video: torch.Tensor = vae.decode(latents / std + mean, return_dict=False)[0]
    return video[0].transpose(0, 1).split(1)


def to_frames(parts: Iterable[torch.Tensor]) -> np.ndarray:
    """Frames [N, 3, H, W] from -1 to 1, some at a time, as uint8 [F, H, W, 3]: made bytes where they are, which takes least room."""
    made = [((part / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu() for part in parts]
    return torch.cat(made).numpy()
