"""Latents as bytes: safetensors, so self-describing and never pickle, in a choice of number formats, with a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from store.errors import StoreError

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("bfloat16", "float16", "float32", "int8")
CHECK = 4  # bytes of the checksum in front


def pack(latents: Mapping[str, Tensor], numbers: str) -> bytes:
    """Latents by name to bytes.

    Args:
        latents: Each [1, C, T, H, W] (any shape works; axis 1 has the channels).
        numbers: One of FORMATS. `int8` keeps a float32 scale for each channel: 127 is the channel's largest value.
    """
    import torch
    from safetensors.torch import save

    stored: dict[str, Tensor] = {}
    for name, value in latents.items():
        value = value.detach().to("cpu", torch.float32)
        if numbers == "int8":
            axes = [axis for axis in range(value.ndim) if axis != 1]
            scale = value.abs().amax(axes, keepdim=True).clamp(min=1e-12) / 127
            stored[name] = (value / scale).round().to(torch.int8).contiguous()
            stored[f"{name}.scale"] = scale.contiguous()
        else:
            stored[name] = value.to(getattr(torch, numbers)).contiguous()
    return seal(save(stored))


def unpack(data: bytes | memoryview) -> dict[str, Tensor]:
    """The latents, float32.

    Raises:
        StoreError: the checksum is wrong.
    """
    import torch
    from safetensors.torch import load

    stored = load(unseal(data))
    return {
        name: value.to(torch.float32) * stored[f"{name}.scale"] if value.dtype == torch.int8 else value.to(torch.float32)
        for name, value in stored.items()
        if not name.endswith(".scale")
    }


def seal(body: bytes) -> bytes:
    """Bytes with their CRC-32 in front."""
    return zlib.crc32(body).to_bytes(CHECK, "big") + body


def unseal(data: bytes | memoryview) -> bytes:
    """What was sealed.

    Raises:
        StoreError: the bytes are not what was written.
    """
    body = bytes(data[CHECK:])
    if zlib.crc32(body).to_bytes(CHECK, "big") != bytes(data[:CHECK]):
        raise StoreError("an entry is damaged")
    return body
