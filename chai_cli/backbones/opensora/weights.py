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
    def from_pretrained(cls, folder: str | Path, *, dtype: torch.dtype | None = None) -> Self:
        """A model in evaluation mode.

        Args:
            folder: Holds `config.json` and one or several `.safetensors`.
            dtype: None for that of the files.

        Raises:
            ChaiError: files are missing, or are of another model.
        """
        root = Path(folder)
        return cls.filled(json.loads((root / "config.json").read_text("utf-8")), read_weights(root), str(root), dtype)

    @classmethod
    def filled(cls, config: dict[str, Any], weights: dict[str, Tensor], told: str, dtype: torch.dtype | None) -> Self:
        """A model of a configuration, in which words that are not this class's are passed over, with these weights."""
        known = inspect.signature(cls.__init__).parameters
        with torch.device("meta"):  # all tensors come from the files
            model: Any = cls(**{name: value for name, value in config.items() if name in known})
        missing, foreign = model.load_state_dict(weights, strict=False, assign=True)
        if missing:
            raise ChaiError(f"{told} lacks {len(missing)} tensors, such as {missing[0]}")
        if foreign:
            raise ChaiError(f"{told} has {foreign[0]}, which is of another model")
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
