"""Where STDiT3's spatial self-attention is, and how a latent becomes its input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from chai_cli.attention import Source
from chai_cli.backbones.opensora.transformer import Attention, Condition, STDiT3AttnProcessor, modulated


class STDiT3Sites:
    """`chai_cli.attention.Sites` for `STDiT3`: its spatial blocks; a frame reads the same frame of the donor."""

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        return list(transformer.spatial_blocks)  # type: ignore[arg-type]

    def attention(self, block: nn.Module) -> Any:
        return block.attn

    def conditioner(self, transformer: nn.Module) -> nn.Module:
        return transformer.conditioning  # type: ignore[return-value]

    def tokens(self, transformer: nn.Module, latents: Tensor, conditioning: Condition) -> Tensor:
        return transformer.tokens(latents, conditioning)  # type: ignore[operator]

    def through(self, transformer: Any, block: nn.Module, tokens: Tensor, conditioning: Condition, latents: Tensor) -> Tensor:
        several = replace(conditioning, text=conditioning.text.expand(tokens.shape[0], -1, -1))
        behind = transformer.temporal_blocks[list(transformer.spatial_blocks).index(block)]
        return transformer.run((block, behind), tokens, several, transformer.rope(conditioning.frames))

    def processor(self, own: Any, source: Source) -> Any:
        return CacheProcessor(own, source)


class CacheProcessor(STDiT3AttnProcessor):
    """`STDiT3AttnProcessor` whose keys and values come from a donor while there is one; the query stays."""

    def __init__(self, own: Any, source: Source) -> None:
        self.own = own
        self.source = source
        self._attention_backend = own._attention_backend
        self._parallel_config = own._parallel_config

    def __call__(self, attn: Attention, hidden_states: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if self.source.tokens is None:
            return self.own(attn, hidden_states, rotary)
        query, key, value = attn.split(attn.qkv(hidden_states)).chunk(3, 2)
        _, donor_key, donor_value = attn.split(attn.qkv(self.donor_frames(hidden_states))).chunk(3, 2)
        if self.source.mode == "append":
            key, value = torch.cat([key, donor_key], 1), torch.cat([value, donor_value], 1)
        else:
            key, value = donor_key, donor_value
        return attn.mixed(attn.q_norm(query), attn.k_norm(key), value, self)

    def donor_frames(self, hidden_states: Tensor) -> Tensor:
        """The donor's frames, normed and modulated as the block does with its own [B T, S, D].

        Several donors of one request stand side by side in each frame [T, K S, D].
        """
        block: Any = self.source.block
        tokens, condition = self.source.tokens, self.source.conditioning
        assert tokens is not None
        shift, scale = condition.modulation(block.scale_shift_table)[:2]
        states = modulated(block.norm1(tokens), shift, scale, condition).unflatten(1, (condition.frames, -1))
        if states.shape[0] * condition.frames > hidden_states.shape[0]:
            return states.transpose(0, 1).flatten(1, 2)
        return states.flatten(0, 1)
