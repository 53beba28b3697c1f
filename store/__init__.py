"""The latent cache: an LMDB folder of latents with an exact vector index. Knows nothing of models or of prompts' meaning."""

from store.errors import StoreError
from store.latents import Entry, LatentStore, namespace
from store.vector import Match, Vector

__all__ = ["Entry", "LatentStore", "Match", "StoreError", "Vector", "namespace"]
