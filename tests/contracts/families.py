"""One entry for each model family: a tiny random model of its real classes, and how others sample and decode with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chai_cli.backbones.base import Look


def tiny_wan(folder: Path) -> None:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    from chai_cli.embedded.train.tokenizer import TEXT_DIM, build_text_encoder, build_tokenizer

    torch.manual_seed(0)
    z = 8
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=z,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        latents_mean=[0.1] * z,
        latents_std=[1.5] * z,
    )
    tokenizer = build_tokenizer(500)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=z,
        out_channels=z,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
    )
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=build_text_encoder(len(tokenizer)),
        transformer=transformer,
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ).save_pretrained(folder)


def tiny_opensora(folder: Path) -> None:
    from chai_cli.backbones.opensora.backbone import OpenSoraPipeline
    from chai_cli.backbones.opensora.transformer import STDiT3
    from chai_cli.backbones.opensora.vae import SDXL_VAE, OpenSoraVAE
    from chai_cli.embedded.train.tokenizer import TEXT_DIM, build_text_encoder, build_tokenizer

    torch.manual_seed(0)
    spatial = {**SDXL_VAE, "block_out_channels": [8] * 4, "layers_per_block": 1, "norm_num_groups": 4}
    tokenizer = build_tokenizer(500)
    OpenSoraPipeline(
        transformer=STDiT3(hidden_size=24, depth=2, num_heads=2, caption_channels=TEXT_DIM, model_max_length=64),
        vae=OpenSoraVAE(vae_2d=spatial, filters=(8, 8, 8, 8), blocks=1, groups=4),
        text_encoder=build_text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
    ).save_pretrained(folder)


def wan_latents(backbone: Any, look: Look, prompt: str) -> Tensor:
    """By diffusers' own pipeline, with the same scheduler."""
    pipe = backbone.pipe
    own = pipe.scheduler
    pipe.scheduler = backbone.schedule(look)
    try:
        latents: Tensor = pipe(
            prompt,
            negative_prompt=look.negative_prompt,
            height=look.height,
            width=look.width,
            num_frames=look.num_frames,
            num_inference_steps=look.num_inference_steps,
            guidance_scale=look.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(look.seed),
            max_sequence_length=backbone.record.max_sequence_length,
            output_type="latent",
        ).frames
    finally:
        pipe.scheduler = own
    return latents


def wan_frames(backbone: Any, look: Look, latents: Tensor) -> np.ndarray:
    frames = backbone.pipe(
        "a red ball",
        latents=latents,
        height=look.height,
        width=look.width,
        num_frames=look.num_frames,
        num_inference_steps=1,
        guidance_scale=1.0,
        max_sequence_length=backbone.record.max_sequence_length,
        callback_on_step_end=lambda *call: {"latents": latents},
    ).frames[0]
    return (frames * 255).round().astype("uint8")


@torch.no_grad()
def opensora_latents(backbone: Any, look: Look, prompt: str) -> Tensor:
    """As Open-Sora's own script samples: both sides in one batch, padded text with a mask, the solver's steps."""
    pipe, length = backbone.pipe, 32
    score = f" aesthetic score: {look.aesthetic_score:.1f}."
    negative = look.negative_prompt.lower()

    def read(text: str) -> tuple[Tensor, Tensor]:
        found = pipe.tokenizer(text, padding="max_length", max_length=length, return_tensors="pt")
        return pipe.text_encoder(found.input_ids, found.attention_mask).last_hidden_state, found.attention_mask

    cond, mask = read((prompt + score).lower())
    uncond, other = read(negative) if negative else (pipe.transformer.y_embedder.y_embedding[:length][None], mask)
    scheduler, latents = backbone.schedule(look), backbone.noise(look)
    told = {"fps": float(look.fps), "height": look.height, "width": look.width}
    for time in scheduler.timesteps:
        both = pipe.transformer(
            torch.cat([latents, latents]), time.expand(2), torch.cat([cond, uncond]), torch.cat([mask, other]), **told
        ).sample.chunk(2, 1)[0]
        ahead, behind = both.chunk(2)
        toward = ahead if look.guidance_scale <= 1 else behind + look.guidance_scale * (ahead - behind)
        latents = scheduler.step(-toward, time, latents, return_dict=False)[0]
    return latents


@torch.no_grad()
def opensora_frames(backbone: Any, look: Look, latents: Tensor) -> np.ndarray:
    """Decoded by hand: denormalised, over time, then each frame by itself."""
    vae = backbone.pipe.vae
    frames = vae.temporal_vae.decode(latents * vae.scale + vae.shift, look.num_frames)[0].transpose(0, 1)
    images = torch.cat([vae.spatial_vae.module.decode(frame[None] / 0.18215).sample for frame in frames])
    return (images.clamp(-1, 1) / 2 + 0.5).mul(255).round().permute(0, 2, 3, 1).numpy().astype("uint8")


@dataclass(frozen=True)
class Family:
    """How a family is proven.

    Attributes:
        make: Saves a tiny random model of its real classes to a folder.
        latents, frames: Sampling and decoding by other code than chai's.
        exact: Whether these are the same to the bit.
        pipeline: Whether diffusers has a pipeline of it.
        variants: Graphs of its compiled blocks, whatever the step, the donor and the prompt.
    """

    make: Callable[[Path], None]
    latents: Callable[[Any, Look, str], Tensor]
    frames: Callable[[Any, Look, Tensor], np.ndarray]
    exact: bool
    pipeline: bool
    variants: int


FAMILIES: dict[str, Family] = {
    "wan": Family(tiny_wan, wan_latents, wan_frames, exact=True, pipeline=True, variants=2),
    "opensora": Family(tiny_opensora, opensora_latents, opensora_frames, exact=False, pipeline=False, variants=6),
}
