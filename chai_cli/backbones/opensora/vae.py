"""The autoencoder of Open-Sora 1.2: diffusers' `AutoencoderKL` for each frame, then a causal one over time.

Parameter names are those of the published weights. Videos are coded in pieces of 17 frames, each 5 latent frames.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from chai_cli.backbones.opensora.weights import Published, read_weights

SPATIAL_SCALE = 0.18215
# The published 2-D autoencoder: PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers, folder `vae`.
SDXL_VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
    "sample_size": 512,
    "scaling_factor": 0.13025,
}


class CausalConv3d(nn.Module):
    """Each frame sees itself and earlier ones; zeros before the first and around the edges."""

    def __init__(self, wide: int, out: int, kernel: int, stride: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.pad = (kernel // 2,) * 4 + (kernel - stride, 0)
        self.conv = nn.Conv3d(wide, out, kernel, (stride, 1, 1), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.pad))


class ResBlock(nn.Module):
    def __init__(self, wide: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, wide)
        self.conv1 = CausalConv3d(wide, out, 3, bias=False)
        self.norm2 = nn.GroupNorm(groups, out)
        self.conv2 = CausalConv3d(out, out, 3, bias=False)
        if wide != out:
            self.conv3 = CausalConv3d(wide, out, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return (self.conv3(x) if hasattr(self, "conv3") else x) + y


@dataclass(frozen=True)
class Shape:
    """Of the temporal autoencoder: channels of what it codes, filters of each level, where time is halved."""

    channels: int
    filters: tuple[int, ...]
    halved: tuple[bool, ...]
    blocks: int
    groups: int

    def stack(self, wide: int, out: int) -> nn.ModuleList:
        return nn.ModuleList(ResBlock(wide if i == 0 else out, out, self.groups) for i in range(self.blocks))


class Encoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        filters = shape.filters
        self.conv_in = CausalConv3d(shape.channels, filters[0], 3, bias=False)
        self.block_res_blocks, self.conv_blocks = nn.ModuleList(), nn.ModuleList()
        for level, out in enumerate(filters):
            self.block_res_blocks.append(shape.stack(filters[max(0, level - 1)], out))
            if level < len(filters) - 1:
                self.conv_blocks.append(CausalConv3d(out, out, 3, stride=2) if shape.halved[level] else nn.Identity())
        self.res_blocks = shape.stack(filters[-1], filters[-1])
        self.norm1 = nn.GroupNorm(shape.groups, filters[-1])
        self.conv2 = CausalConv3d(filters[-1], 2 * shape.channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for blocks, down in zip(self.block_res_blocks, [*self.conv_blocks, nn.Identity()], strict=True):
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
            x = down(x)
        for block in self.res_blocks:
            x = block(x)
        return self.conv2(F.silu(self.norm1(x)))


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        filters = shape.filters
        self.conv1 = CausalConv3d(shape.channels, filters[-1], 3)
        self.res_blocks = shape.stack(filters[-1], filters[-1])
        self.block_res_blocks = nn.ModuleList(
            shape.stack(filters[min(level + 1, len(filters) - 1)], out) for level, out in enumerate(filters)
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(out, 2 * out, 3) if shape.halved[level] else nn.Identity() for level, out in enumerate(filters[1:])
        )
        self.norm1 = nn.GroupNorm(shape.groups, filters[0])
        self.conv_out = CausalConv3d(filters[0], shape.channels, 3)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv1(z)
        for block in self.res_blocks:
            x = block(x)
        for level in reversed(range(len(self.block_res_blocks))):
            for block in self.block_res_blocks[level]:  # type: ignore[attr-defined]
                x = block(x)
            if level > 0 and isinstance(up := self.conv_blocks[level - 1], CausalConv3d):
                x = up(x).unflatten(1, (-1, 2)).permute(0, 1, 3, 2, 4, 5).flatten(2, 3)  # two frames out of twice the channels
        return self.conv_out(F.silu(self.norm1(x)))


class TemporalVae(nn.Module):
    """Frames of 2-D latents [B, C, F, H, W] to latents [B, C, ceil(F / 4), H, W] and back."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.factor = 2 ** sum(shape.halved)
        self.encoder = Encoder(shape)
        self.quant_conv = CausalConv3d(2 * shape.channels, 2 * shape.channels, 1)
        self.post_quant_conv = CausalConv3d(shape.channels, shape.channels, 1)
        self.decoder = Decoder(shape)

    def encode(self, frames: Tensor) -> DiagonalGaussianDistribution:
        lack = -frames.shape[2] % self.factor
        return DiagonalGaussianDistribution(self.quant_conv(self.encoder(F.pad(frames, (0, 0, 0, 0, lack, 0)))))

    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        return self.decoder(self.post_quant_conv(latents))[:, :, -num_frames % self.factor :]


class FrameVae(nn.Module):
    """A 2-D autoencoder over the frames of a video, a few at a time."""

    def __init__(self, module: AutoencoderKL, batch: int | None) -> None:
        super().__init__()
        self.module = module
        self.batch = batch

    def encode(self, video: Tensor, generator: torch.Generator | None) -> Tensor:
        coded = [self.module.encode(part).latent_dist for part in self.parts(video)]
        frames = [one.sample(generator) if generator else one.mode() for one in coded]
        return torch.cat(frames).mul(SPATIAL_SCALE).unflatten(0, (video.shape[0], -1)).transpose(1, 2)

    def frames(self, latents: Tensor) -> Iterator[Tensor]:
        """Decoded frames [N, 3, H, W], a few at a time, of one video after the other."""
        return (self.module.decode(part / SPATIAL_SCALE).sample for part in self.parts(latents))

    def parts(self, video: Tensor) -> Sequence[Tensor]:
        frames = video.transpose(1, 2).flatten(0, 1)
        return frames.split(self.batch or len(frames))


class OpenSoraVAE(Published, ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Videos [B, 3, F, H, W] to latents [B, C, T, H / 8, W / 8] and back.

    T is 5 for each 17 frames, and a quarter, rounded up, for what is left.

    Args:
        vae_2d: Configuration of the `AutoencoderKL`.
        micro_frame_size: Frames that are coded as one piece; None for all.
        micro_batch_size: Frames that the 2-D autoencoder takes at once; None for all.
        latents_mean, latents_std: By channel.
        filters, blocks, groups, halved: Of the temporal autoencoder.
    """

    scale: Tensor
    shift: Tensor

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        vae_2d: dict[str, Any] | None = None,
        micro_frame_size: int | None = 17,
        micro_batch_size: int | None = 4,
        latents_mean: Sequence[float] = (-0.10, 0.34, 0.27, 0.98),
        latents_std: Sequence[float] = (3.85, 2.32, 2.33, 3.06),
        filters: Sequence[int] = (128, 256, 256, 512),
        blocks: int = 4,
        groups: int = 32,
        halved: Sequence[bool] = (False, True, True),
    ) -> None:
        super().__init__()
        module = AutoencoderKL.from_config(vae_2d or SDXL_VAE)
        self.spatial_vae = FrameVae(module, micro_batch_size)
        shape = Shape(module.config.latent_channels, tuple(filters), tuple(halved), blocks, groups)
        self.temporal_vae = TemporalVae(shape)
        self.register_buffer("scale", torch.tensor(latents_std).view(1, -1, 1, 1, 1))
        self.register_buffer("shift", torch.tensor(latents_mean).view(1, -1, 1, 1, 1))

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, dtype: torch.dtype | None = None, vae_2d: str | Path | None = None) -> Self:
        """A model in evaluation mode; of the published one the 2-D autoencoder may lie in another folder.

        Raises:
            ChaiError: files are missing, or are of another model.
        """
        root = Path(folder)
        config, weights = json.loads((root / "config.json").read_text("utf-8")), read_weights(root)
        spatial = config.get("vae_2d") or {}
        if "block_out_channels" not in spatial:  # published: says where it lies and how many frames it takes at once
            config = {**config, "vae_2d": None, "micro_batch_size": spatial.get("micro_batch_size", 4)}
            if vae_2d is not None:
                config["vae_2d"] = json.loads((Path(vae_2d) / "config.json").read_text("utf-8"))
        if vae_2d is not None and not any(name.startswith("spatial_vae.") for name in weights):
            weights |= {f"spatial_vae.module.{name}": value for name, value in read_weights(Path(vae_2d)).items()}
        return cls.filled(config, weights, str(root), dtype)

    @apply_forward_hook  # type: ignore[untyped-decorator]
    def encode(self, video: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Normalised latents: drawn with `generator`, or the most likely without."""
        frames = self.spatial_vae.encode(video, generator)
        coded = [self.temporal_vae.encode(part) for part in frames.split(self.config.micro_frame_size or frames.shape[2], 2)]
        latents = torch.cat([one.sample(generator) if generator else one.mode() for one in coded], 2)
        return (latents - self.shift) / self.scale

    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        """A video from normalised latents.

        Args:
            num_frames: Of the video; latents of up to four numbers of frames have the same shape.
        """
        frames = torch.cat(list(self.frames(latents, num_frames)))
        return frames.unflatten(0, (latents.shape[0], -1)).transpose(1, 2)

    @apply_forward_hook  # type: ignore[untyped-decorator]
    def frames(self, latents: Tensor, num_frames: int) -> Iterator[Tensor]:
        """The same, a few frames [N, 3, H, W] at a time."""
        latents = latents * self.scale.to(latents.dtype) + self.shift.to(latents.dtype)
        piece = self.config.micro_frame_size or num_frames
        parts, frames = latents.split(latent_frames(piece, None, self.temporal_vae.factor), 2), []
        for part in parts:
            frames.append(self.temporal_vae.decode(part, min(piece, num_frames)))
            num_frames -= piece
        return self.spatial_vae.frames(torch.cat(frames, 2))

    def enable_tiling(self) -> None:
        """Decode frames in tiles: less memory, slower."""
        self.spatial_vae.module.enable_tiling()


def latent_frames(num_frames: int, piece: int | None = 17, factor: int = 4) -> int:
    """Latent frames of a video: each piece is coded by itself."""
    whole, rest = divmod(num_frames, piece or num_frames)
    return whole * -(-(piece or num_frames) // factor) + -(-rest // factor)
