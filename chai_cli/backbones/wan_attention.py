"""Where Wan's self-attention is, and how a latent becomes its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from chai_cli.attention import Source


def modulation(conditioning: Any) -> Tensor:
    """Six modulation vectors of each sample [B, 6, D], or of each token [B, N, 6, D] (Wan 2.2 5B)."""
    projected: Tensor = conditioning[1]
    return projected.unflatten(projected.ndim - 1, (6, -1))


class WanSites:
    """`chai_cli.attention.Sites` for `WanTransformer3DModel`."""

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        return list(transformer.blocks)  # type: ignore[arg-type]

    def attention(self, block: nn.Module) -> Any:
        return block.attn1

    def conditioner(self, transformer: nn.Module) -> nn.Module:
        return transformer.condition_embedder  # type: ignore[return-value]

    def tokens(self, transformer: nn.Module, latents: Tensor, conditioning: Any) -> Tensor:
        embedded: Tensor = transformer.patch_embedding(latents)  # type: ignore[operator]
        return embedded.flatten(2).transpose(1, 2).contiguous()

    def through(self, transformer: nn.Module, block: nn.Module, tokens: Tensor, conditioning: Any, latents: Tensor) -> Tensor:
        rotary = transformer.rope(latents)  # type: ignore[operator]
        text = conditioning[2]
        if text.shape[0] != tokens.shape[0]:  # several donors of one request
            text = text.expand(tokens.shape[0], -1, -1)
        return block(tokens, text, modulation(conditioning), rotary)

    def processor(self, own: Any, source: Source) -> Any:
        return CacheProcessor(own, source)


def attention_input(source: Source) -> Tensor:
    """The donor's tokens normed and modulated as the block does with its own [B, N, D]."""
    block: Any = source.block
    tokens, vectors = source.tokens, modulation(source.conditioning).float()
    assert tokens is not None
    if vectors.ndim == 4:
        shift, scale = (block.scale_shift_table.unsqueeze(0) + vectors)[:, :, :2].unbind(2)
    else:
        shift, scale = (block.scale_shift_table + vectors)[:, :2].split(1, 1)
    return (block.norm1(tokens.float()) * (1 + scale) + shift).type_as(tokens)


class CacheProcessor(WanAttnProcessor):  # type: ignore[misc]
    """`WanAttnProcessor` whose keys and values come from a donor while there is one; the query stays."""

    def __init__(self, own: Any, source: Source) -> None:
        super().__init__()
        self.own = own
        self.source = source
        self._attention_backend = own._attention_backend
        self._parallel_config = own._parallel_config

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if self.source.tokens is None:
            return self.own(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        assert rotary_emb is not None
        query = heads(attn.norm_q(attn.to_q(hidden_states)), attn, rotary_emb)
        key, value = keys_and_values(attn, attention_input(self.source), rotary_emb)
        if key.shape[0] > query.shape[0]:  # several donors, one behind the other
            key, value = (x.flatten(0, 1).unsqueeze(0) for x in (key, value))
        if self.source.mode == "append":
            own_key, own_value = keys_and_values(attn, hidden_states, rotary_emb)
            key, value = torch.cat([own_key, key], 1), torch.cat([own_value, value], 1)
        out = dispatch_attention_fn(
            query, key, value, attn_mask=attention_mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(query)))


def keys_and_values(attn: WanAttention, states: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values [B, N, heads, width] of normed and modulated states [B, N, D]."""
    return heads(attn.norm_k(attn.to_k(states)), attn, rotary), heads(attn.to_v(states), attn)


def heads(states: Tensor, attn: WanAttention, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
    split = states.unflatten(2, (attn.heads, -1))
    return split if rotary is None else rotate(split, *rotary)


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions, pairs of neighbouring channels, in the library's own order of operations (bits must agree)."""
    a, b = states.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cosine[..., 0::2], sine[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(states)
