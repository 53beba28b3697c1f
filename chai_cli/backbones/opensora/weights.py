"""Loading of weights as they were published, or as `save_pretrained` wrote them: the names in both are the same."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from chai_cli.errors import ChaiError


class Published:
    """A diffusers model whose `from_pretrained` also takes the file names and configurations of transformers."""

    @classmethod
    def published(cls, config: dict[str, Any]) -> dict[str, Any]:
        """A configuration as it was published, in this class's words."""
        return config

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, dtype: torch.dtype | None = None, spatial: Path | None = None) -> Self:
        """A model in evaluation mode.

        Args:
            folder: Holds `config.json` and one or several `.safetensors`.
            dtype: None for that of the files.
            spatial: Folder of a 2-D autoencoder, for an autoencoder whose own files lack it.

        Raises:
            ChaiError: files are missing, or are of another model.
        """
        root = Path(folder)
        known = inspect.signature(cls.__init__).parameters
        config = cls.published(json.loads((root / "config.json").read_text("utf-8")))
        model: Any = cls(**{name: value for name, value in config.items() if name in known})
        weights = read_weights(root)
        if spatial is not None and not any(name.startswith("spatial_vae.") for name in weights):
            weights |= {f"spatial_vae.module.{name}": value for name, value in read_weights(spatial).items()}
        missing, foreign = model.load_state_dict(weights, strict=False, assign=True)
        if missing or foreign:
            said = (
                f"lacks {len(missing)} tensors, such as {missing[0]}"
                if missing
                else f"has {foreign[0]}, which is of another model"
            )
            raise ChaiError(f"{root} {said}")
        return model.to(dtype).eval() if dtype else model.eval()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's `.safetensors`.

    Raises:
        ChaiError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ChaiError(f"{folder} holds no .safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}
