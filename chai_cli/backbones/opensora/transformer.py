"""STDiT3, the transformer of Open-Sora 1.2, under the parameter names of its published weights.

Blocks come in pairs: a spatial one, in which the places of one frame see each other, then a temporal one, in which one place sees
itself in all frames. Both read the text and are modulated by time and frame rate (as PixArt's are).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin, AttentionModuleMixin
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from chai_cli.backbones.opensora.weights import Published

FREQUENCIES = 256  # width of the sinusoids that time and frame rate come in


@dataclass
class Condition:
    """What every block is told besides its tokens.

    Attributes:
        time: Embedded time and frame rate [B, D], and what the blocks take of it [B, 6, D].
        still: The same at time 0, for frames that are given; None where none are.
        moving: [B, T], False for frames that are given; None where none are.
        text: [B, L, D].
        mask: [B, 1, 1, L], False for padding; None where there is none.
        position: What is added to the tokens of each frame [1, S, D].
        frames: T, latent frames.
    """

    time: tuple[Tensor, Tensor]
    still: tuple[Tensor, Tensor] | None
    moving: Tensor | None
    text: Tensor
    mask: Tensor | None
    position: Tensor
    frames: int

    def modulation(self, table: Tensor) -> tuple[Tensor, ...]:
        """As many vectors as the table [n, D] has rows: [B, 1, D] each, or [B, T, 1, D] where some frames are given."""
        if self.still is None or self.moving is None:
            return vectors(table, self.time)
        choose = self.moving[:, :, None, None]
        pairs = zip(vectors(table, self.time), vectors(table, self.still), strict=True)
        return tuple(torch.where(choose, moving.unsqueeze(1), still.unsqueeze(1)) for moving, still in pairs)

    def framed(self, states: Tensor, vector: Tensor) -> Tensor:
        """Tokens [B, T S, D] in a shape that a vector of `modulation` goes with."""
        return states if vector.ndim == 3 else states.unflatten(1, (self.frames, -1))


def vectors(table: Tensor, time: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Vectors of modulation [B, 1, D], one for each row of a block's table or of the final layer's."""
    taken = time[1] if table.shape[0] == 6 else time[0].unsqueeze(1)
    return (table + taken).chunk(table.shape[0], 1)


class Conditioning(nn.Module):
    """Has no weights: the place where a run of the model knows its condition, before the first block."""

    def forward(self, condition: Condition) -> Condition:
        return condition


class RMSNorm(nn.Module):
    """Root mean square norm over a head, in float32 (LLaMA's order of casts)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(states.dtype)


class Rotary(nn.Module):
    """Rotary positions over frames, neighbouring channels in pairs.

    The frequencies are a parameter because the published file has them.
    """

    def __init__(self, width: int, theta: float = 10000.0) -> None:
        super().__init__()
        self.freqs = nn.Parameter(theta ** -(torch.arange(0, width, 2).float() / width), requires_grad=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [L, D / 2], float32."""
        angles = torch.outer(torch.arange(length, device=self.freqs.device).float(), self.freqs.float())
        return angles.cos(), angles.sin()


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """[B, L, heads, D] turned by their positions."""
    a, b = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cosine[:, None], sine[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(states.dtype)


class STDiT3AttnProcessor:
    """Attention of tokens among themselves [B, L, D], with rotary positions where given."""

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(self, attn: Attention, hidden_states: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        query, key, value = attn.split(attn.qkv(hidden_states)).chunk(3, 2)
        query, key = attn.q_norm(query), attn.k_norm(key)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        return attn.mixed(query, key, value, self)


class Attention(nn.Module, AttentionModuleMixin):  # type: ignore[misc]
    """Self-attention with one projection for query, key and value, and a norm for each head."""

    processor: Any
    _default_processor_cls = STDiT3AttnProcessor
    _available_processors: tuple[type, ...] = (STDiT3AttnProcessor,)

    def __init__(self, width: int, heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm: nn.Module = RMSNorm(width // heads) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(width // heads) if qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)
        self.processor = STDiT3AttnProcessor()

    def forward(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return self.processor(self, hidden_states, rotary)

    def split(self, states: Tensor) -> Tensor:
        """[B, L, n D] as [B, L, n heads, D / heads]."""
        return states.unflatten(2, (-1, self.qkv.in_features // self.num_heads))

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, processor: Any) -> Tensor:
        out = dispatch_attention_fn(
            query, key, value, backend=processor._attention_backend, parallel_config=processor._parallel_config
        )
        return self.proj(out.flatten(2).type_as(query))


class CrossAttention(nn.Module):
    """Tokens read the text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_linear = nn.Linear(width, width)
        self.kv_linear = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, hidden_states: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        query = self.q_linear(hidden_states).unflatten(2, (self.num_heads, -1))
        key, value = self.kv_linear(text).unflatten(2, (2 * self.num_heads, -1)).chunk(2, 2)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, wide: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(wide, hidden)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, states: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(states)))


class STDiT3Block(nn.Module):
    """Self-attention within frames or (`temporal`) across them, attention to the text, and an MLP."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, qk_norm: bool, temporal: bool = False) -> None:
        super().__init__()
        self.temporal = temporal
        self.norm1 = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.attn = Attention(width, heads, qk_norm)
        self.cross_attn = CrossAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.mlp = Mlp(width, int(width * mlp_ratio), width)
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)

    def forward(self, hidden_states: Tensor, condition: Condition, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Tokens [B, T S, D] after the block."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = condition.modulation(self.scale_shift_table)
        mixed = self.attend(modulated(self.norm1(hidden_states), shift, scale, condition), condition.frames, rotary)
        hidden_states = hidden_states + gated(mixed, gate, condition)
        hidden_states = hidden_states + self.cross_attn(hidden_states, condition.text, condition.mask)
        mixed = self.mlp(modulated(self.norm2(hidden_states), mlp_shift, mlp_scale, condition))
        return hidden_states + gated(mixed, mlp_gate, condition)

    def attend(self, states: Tensor, frames: int, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Self-attention of tokens [B, T S, D]: of one frame, or of one place."""
        batch = states.shape[0]
        grid = states.unflatten(1, (frames, -1))
        if self.temporal:
            mixed = self.attn(grid.transpose(1, 2).flatten(0, 1), rotary)
            return mixed.unflatten(0, (batch, -1)).transpose(1, 2).flatten(1, 2)
        return self.attn(grid.flatten(0, 1)).unflatten(0, (batch, -1)).flatten(1, 2)


def modulated(states: Tensor, shift: Tensor, scale: Tensor, condition: Condition) -> Tensor:
    return (condition.framed(states, scale) * (1 + scale) + shift).view_as(states)


def gated(states: Tensor, gate: Tensor, condition: Condition) -> Tensor:
    return (gate * condition.framed(states, gate)).view_as(states)


def positions(rows: int, columns: int, scale: float, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of each place of a frame [1, rows columns, D]: of its column, then of its row.

    Counted so that a frame of any shape spans the square root of its number of places, over `scale`. Frequencies are rounded to
    `dtype`, as in the published model, angles are not.
    """
    base = round((rows * columns) ** 0.5)
    frequencies = 10000 ** -(torch.arange(0, width // 2, 2, device=device).float() / (width // 2))
    frequencies = frequencies.to(dtype).float()

    def waves(count: int) -> Tensor:
        angles = torch.outer(torch.arange(count, device=device) / scale * (base / count), frequencies)
        return torch.cat([angles.sin(), angles.cos()], -1)

    across, down = waves(columns)[None].expand(rows, -1, -1), waves(rows)[:, None].expand(-1, columns, -1)
    return torch.cat([across, down], -1).flatten(0, 1).unsqueeze(0).to(dtype)


class PatchEmbed(nn.Module):
    """Latents [B, C, T, H, W] to tokens [B, T S, D]; what a patch lacks at the far edges is zero."""

    def __init__(self, patch: tuple[int, int, int], channels: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv3d(channels, width, patch, patch)

    def forward(self, latents: Tensor) -> Tensor:
        lack = [(0, -size % step) for size, step in zip(latents.shape[2:], self.patch, strict=True)]
        padded = F.pad(latents, [n for pair in reversed(lack) for n in pair])
        return self.proj(padded).flatten(2).transpose(1, 2)


class ScalarEmbedder(nn.Module):
    """A number, as sinusoids, through an MLP: a vector [B, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, number: Tensor) -> Tensor:
        waves = get_timestep_embedding(number, FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        return self.mlp(waves.to(self.mlp[0].weight.dtype))


class CaptionEmbedder(nn.Module):
    """The text encoder's embeddings [B, L, C] to tokens [B, L, D]; keeps the embedding of no caption."""

    y_embedding: Tensor

    def __init__(self, channels: int, width: int, length: int) -> None:
        super().__init__()
        self.y_proj = Mlp(channels, width, width)
        self.register_buffer("y_embedding", torch.randn(length, channels) / channels**0.5)

    def forward(self, caption: Tensor) -> Tensor:
        return self.y_proj(caption)


class FinalLayer(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, out)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)

    def forward(self, hidden_states: Tensor, condition: Condition) -> Tensor:
        shift, scale = vectors(self.scale_shift_table, condition.time)
        states = self.norm_final(hidden_states) * (1 + scale) + shift
        if condition.still is not None and condition.moving is not None:
            shift, scale = vectors(self.scale_shift_table, condition.still)
            # the published model was trained with given frames normed and modulated a second time
            still = self.norm_final(states) * (1 + scale) + shift
            states = torch.where(
                condition.moving.repeat_interleave(states.shape[1] // condition.frames, 1)[..., None], states, still
            )
        return self.linear(states)


class STDiT3(Published, ModelMixin, ConfigMixin, CacheMixin, AttentionMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Open-Sora 1.2's transformer.

    Args:
        input_sq_size: Pixels of a side at which positions are counted as they are.
        pred_sigma: Whether there are twice as many channels out as in; the second half is not used.
        caption_channels: Width of the text embeddings.
        model_max_length: Tokens that no caption has.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["STDiT3Block"]  # noqa: RUF012
    _repeated_blocks = ["STDiT3Block"]  # noqa: RUF012
    _skip_layerwise_casting_patterns = ["x_embedder", "t_embedder", "fps_embedder", "norm"]  # noqa: RUF012

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        input_sq_size: int = 512,
        in_channels: int = 4,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        pred_sigma: bool = True,
        caption_channels: int = 4096,
        model_max_length: int = 300,
        qk_norm: bool = True,
    ) -> None:
        super().__init__()
        width, patch = hidden_size, (patch_size[0], patch_size[1], patch_size[2])
        self.out_channels = in_channels * (2 if pred_sigma else 1)
        self.rope = Rotary(width // num_heads)
        self.x_embedder = PatchEmbed(patch, in_channels, width)
        self.t_embedder = ScalarEmbedder(width)
        self.fps_embedder = ScalarEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(caption_channels, width, model_max_length)
        self.conditioning = Conditioning()
        for name, temporal in (("spatial_blocks", False), ("temporal_blocks", True)):
            blocks = [STDiT3Block(width, num_heads, mlp_ratio, qk_norm, temporal) for _ in range(depth)]
            setattr(self, name, nn.ModuleList(blocks))
        self.final_layer = FinalLayer(width, patch[0] * patch[1] * patch[2] * self.out_channels)
        self.gradient_checkpointing = False

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        frame_mask: Tensor | None = None,
        fps: Tensor | float = 24.0,
        height: float | None = None,
        width: float | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """The velocity from noise to data, and as many channels again that nobody uses.

        Args:
            hidden_states: Latents [B, C, T, H, W].
            timestep: [B], 1000 for noise and 0 for data.
            encoder_hidden_states: Text embeddings [B, L, C].
            encoder_attention_mask: [B, L], 0 for padding.
            frame_mask: [B, T], False for frames that are given, not to be denoised.
            fps: Frames a second, one number or [B].
            height, width: Of the video, in pixels (default: eight times those of the latents).

        Returns:
            [B, 2 C, T, H, W], float32.
        """
        dtype, size, patch = self.x_embedder.proj.weight.dtype, hidden_states.shape[2:], self.config.patch_size
        frames, rows, columns = (-(-n // step) for n, step in zip(size, patch, strict=True))
        pixels = (height or size[1] * 8) * (width or size[2] * 8)
        times = timestep.to(dtype).expand(hidden_states.shape[0])
        rate = self.fps_embedder(torch.as_tensor(fps, device=times.device).to(dtype).expand_as(times))

        def embedded(time: Tensor) -> tuple[Tensor, Tensor]:
            together = self.t_embedder(time) + rate
            return together, self.t_block(together).unflatten(1, (6, -1))

        condition = self.conditioning(
            Condition(
                time=embedded(times),
                still=None if frame_mask is None else embedded(torch.zeros_like(times)),
                moving=frame_mask,
                text=self.y_embedder(encoder_hidden_states.to(dtype)),
                mask=None if encoder_attention_mask is None else encoder_attention_mask.bool()[:, None, None],
                position=self.position(rows, columns, pixels, times.device, dtype),
                frames=frames,
            )
        )
        states, rotary = self.tokens(hidden_states.to(dtype), condition), self.rope(frames)
        for pair in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            states = self.run(pair, states, condition, rotary)
        out = self.final_layer(states, condition)
        out = out.unflatten(2, (*patch, self.out_channels)).unflatten(1, (frames, rows, columns))
        out = out.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        out = out[:, :, : size[0], : size[1], : size[2]].float()
        return Transformer2DModelOutput(sample=out) if return_dict else (out,)

    def position(self, rows: int, columns: int, pixels: float, device: torch.device, dtype: torch.dtype) -> Tensor:
        scale = pixels**0.5 / self.config.input_sq_size
        return positions(rows, columns, scale, self.config.hidden_size, device, dtype)

    def tokens(self, latents: Tensor, condition: Condition) -> Tensor:
        """Latents as they enter the first block [B, T S, D]."""
        found: Tensor = self.x_embedder(latents).unflatten(1, (condition.frames, -1)) + condition.position
        return found.flatten(1, 2)

    def run(self, pair: tuple[Any, Any], states: Tensor, condition: Condition, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Tokens after a spatial block and the temporal one behind it."""
        for block, turn in zip(pair, (None, rotary), strict=True):
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                states = self._gradient_checkpointing_func(block, states, condition, turn)
            else:
                states = block(states, condition, turn)
        return states
