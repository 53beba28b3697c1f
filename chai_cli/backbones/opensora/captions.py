"""Captions as Open-Sora 1.2 was trained on them."""

from __future__ import annotations

from functools import cache
from typing import Any

SCORE = "aesthetic score:"


@cache
def cleaner() -> Any:
    """diffusers' PixArt pipeline, which cleans captions the way Open-Sora does; without its models."""
    from diffusers import PixArtAlphaPipeline

    return object.__new__(PixArtAlphaPipeline)


def prepared(prompt: str, aesthetic_score: float | None) -> str:
    """A prompt with its score (none or 0: without), cleaned twice, in lower case."""
    if aesthetic_score and SCORE not in prompt:
        prompt = f"{prompt} {SCORE} {aesthetic_score:.1f}."
    return cleaner()._text_preprocessing(prompt, clean_caption=True)[0]
