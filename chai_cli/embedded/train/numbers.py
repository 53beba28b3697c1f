"""The number format of matrix products in training: bfloat16 where the CPU multiplies it, four times as fast; else float32."""

from __future__ import annotations

import torch

PRODUCTS = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else torch.float32


def fast_products() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=torch.bfloat16 == PRODUCTS)
