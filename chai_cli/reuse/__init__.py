"""Methods: what happens around each step of a render. One file and one entry here for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chai_cli.reuse.base import Reuse


def chai(**options: Any) -> Reuse:
    from chai_cli.reuse.cache_attention import CacheAttentionOptions

    return CacheAttentionOptions(**options)


# What makes a method's options; None for one that reuses nothing.
METHODS: dict[str, Callable[..., Reuse] | None] = {"chai": chai, "dense": None}
