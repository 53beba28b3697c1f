"""Training of the judge on painted clips, roughened so that it reads reconstructions and samples too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chai_cli.embedded.judge import Judge
from chai_cli.embedded.train.clips import TEST_SEED, TRAIN_SEED, Shard, clip_shards
from chai_cli.embedded.train.latents import sample
from chai_cli.embedded.train.loop import Plan
from chai_cli.embedded.train.numbers import fast_products
from chai_cli.embedded.train.vae import as_video
from chai_cli.embedded.world import ATTRIBUTES, OBJECT_ATTRIBUTES


def roughen(x: Tensor, rng: torch.Generator) -> Tensor:
    """Blur, noise, light and contrast, each clip its own: what codecs and samplers do to a clip."""
    count = len(x)

    def draw(low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(count, generator=rng)).view(-1, 1, 1, 1, 1)

    blurred = F.avg_pool3d(F.pad(x, (1, 1, 1, 1, 0, 0), mode="replicate"), (1, 3, 3), (1, 1, 1))
    weight = draw(-0.6, 0.9).clamp(min=0)
    x = x + weight * (blurred - x)
    coarse = torch.randn(count, 3, 5, 16, 16, generator=rng)
    noise = F.interpolate(coarse, size=x.shape[2:], mode="nearest") * draw(-0.06, 0.08).clamp(min=0)
    return (x * draw(0.85, 1.1) + draw(-0.08, 0.08) + noise).clamp(-1, 1)


class JudgeTask:
    def __init__(self, plan: Plan, rank: int) -> None:
        clips = plan.run.parent / "clips"
        self.shards: list[Shard] = clip_shards(clips, TRAIN_SEED, int(str(plan.extra["shards"])))
        self.test = clip_shards(clips, TEST_SEED, 2)
        self.batch = int(str(plan.extra["batch"]))
        self.model = Judge()

    def matrices(self) -> set[str]:
        named = self.model.named_parameters()
        return {n for n, p in named if p.ndim >= 2 and n.startswith(("stem", "mixer")) and not n.startswith("stem.0.")}

    def loss(self, rng: torch.Generator, step: int) -> tuple[Tensor, dict[str, float]]:
        pick = np.random.default_rng(int(torch.randint(2**62, (1,), generator=rng)))
        clips, shown = [], []
        for _ in range(self.batch):
            shard, row, mirrored = self.shards[pick.integers(len(self.shards))], int(pick.integers(500)), pick.random() < 0.5
            clip = shard.clips[row]
            clips.append(clip[:, :, ::-1] if mirrored else clip)
            shown.append(sample(shard.scenes[row], mirrored))
        with fast_products():
            logits = self.model(roughen(as_video(np.stack(clips)), rng))
        logits = {name: value.float() for name, value in logits.items()}
        places = torch.tensor([ATTRIBUTES["background"].index(s.background) for s in shown])
        counts = torch.tensor([len(s.things) - 1 for s in shown])
        loss = F.cross_entropy(logits["background"], places) + F.cross_entropy(logits["count"], counts)
        for name in OBJECT_ATTRIBUTES:
            truth = [[ATTRIBUTES[name].index(getattr(t, name)) for t in s.things] for s in shown]
            target = torch.tensor([([*values, -100])[:2] for values in truth])
            loss = loss + F.cross_entropy(logits[name].flatten(0, 1), target.flatten(), ignore_index=-100)
        return loss, {}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        figures: dict[str, list[bool]] = {}
        for shard in self.test:
            for reading, scene in zip(model.read(np.array(shard.clips)), shard.scenes, strict=True):  # type: ignore[operator]
                for name, right in reading.right(scene).items():
                    figures.setdefault(f"{name}_{len(scene.things)}", []).append(right)
        return {name: float(np.mean(values)) for name, values in sorted(figures.items())}

    def export(self, model: nn.Module, folder: Path) -> None:
        model.save(folder / "judge")  # type: ignore[operator]
