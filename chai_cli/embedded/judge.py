"""Says what a clip shows: a small trained classifier, so that fidelity to a prompt can be counted instead of guessed."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from chai_cli.embedded.world import ATTRIBUTES, OBJECT_ATTRIBUTES, Scene, Thing

WIDTH = 128
FRAMES, CELLS = 5, 4


@dataclass(frozen=True)
class Reading:
    """What the judge sees: the place, and one or two objects from left to right."""

    background: str
    things: tuple[Thing, ...]

    def right(self, scene: Scene) -> dict[str, bool]:
        """For each attribute, whether the clip shows what the scene says.

        With two objects an attribute counts as right when both have it right, in the pairing that serves the scene
        best. A clip with another number of objects than the scene has all object attributes wrong.
        """
        verdict = {"background": self.background == scene.background}
        if len(self.things) != len(scene.things):
            return verdict | dict.fromkeys(OBJECT_ATTRIBUTES, False)
        pairings = [
            {
                name: all(getattr(seen, name) == getattr(said, name) for seen, said in zip(order, scene.things, strict=True))
                for name in OBJECT_ATTRIBUTES
            }
            for order in itertools.permutations(self.things)
        ]
        return verdict | max(pairings, key=lambda pairing: sum(pairing.values()))


class Judge(nn.Module):
    """3-D convolutions to one token for 4 frames of 16x16 pixels, then attention with one query for each thing asked."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 32, (1, 4, 4), (1, 2, 2), (0, 1, 1)),
            nn.SiLU(),
            nn.Conv3d(32, 64, 3, 2, 1),
            nn.GroupNorm(8, 64),
            nn.SiLU(),
            nn.Conv3d(64, 96, 3, 2, 1),
            nn.GroupNorm(8, 96),
            nn.SiLU(),
            nn.Conv3d(96, WIDTH, 3, (1, 2, 2), 1),
        )
        self.place = nn.Parameter(torch.randn(FRAMES * CELLS * CELLS, WIDTH) * 0.02)
        self.asked = nn.Parameter(torch.randn(3, WIDTH) * 0.02)  # the scene, the object further left, the other one
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
        self.mixer = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        sizes = {"count": 2, **{name: len(values) for name, values in ATTRIBUTES.items()}}
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, size) for name, size in sizes.items()})

    def forward(self, clips: Tensor) -> dict[str, Tensor]:
        """Logits from clips in -1..1, [B, 3, 17, 64, 64]: `count` and `background` [B, N], the rest [B, 2, N]."""
        tokens = self.stem(clips).flatten(2).transpose(1, 2) + self.place
        asked = self.asked.expand(len(tokens), -1, -1)
        out = self.mixer(torch.cat([asked, tokens], 1))
        logits = {name: self.heads[name](out[:, 1:3]) for name in OBJECT_ATTRIBUTES}
        return logits | {name: self.heads[name](out[:, 0]) for name in ("count", "background")}

    @torch.no_grad()
    def read(self, clips: np.ndarray, batch: int = 32) -> list[Reading]:
        """What each clip shows, from uint8 [B, 17, 64, 64, 3]."""
        readings = []
        for start in range(0, len(clips), batch):
            part = torch.from_numpy(np.ascontiguousarray(clips[start : start + batch]))
            logits = self(part.permute(0, 4, 1, 2, 3).float() / 127.5 - 1)
            best: dict[str, Any] = {name: value.argmax(-1).tolist() for name, value in logits.items()}
            for row in range(len(part)):
                things = tuple(
                    Thing(*(ATTRIBUTES[name][best[name][row][slot]] for name in OBJECT_ATTRIBUTES))
                    for slot in range(best["count"][row] + 1)
                )
                readings.append(Reading(ATTRIBUTES["background"][best["background"][row]], things))
        return readings

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.half().contiguous() for name, value in self.state_dict().items()}, folder / "judge.safetensors")
        (folder / "config.json").write_text(json.dumps({"attributes": ATTRIBUTES}, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Judge:
        judge = cls()
        judge.load_state_dict({name: value.float() for name, value in load_file(folder / "judge.safetensors").items()})
        return judge.eval()
