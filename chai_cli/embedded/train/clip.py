"""A small CLIP of the world in open_clip's own folder format: frames and captions close to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from chai_cli.embedded.captions import caption, full_caption
from chai_cli.embedded.train.clips import TEST_SEED, TRAIN_SEED, clip_shards
from chai_cli.embedded.train.loop import Plan
from chai_cli.embedded.train.numbers import fast_products
from chai_cli.embedded.train.tokenizer import build_tokenizer
from chai_cli.embedded.train.vae import as_video

CONTEXT = 48
CONFIG: dict[str, Any] = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": 64, "layers": 4, "width": 128, "head_width": 32, "patch_size": 8},
    "text_cfg": {
        "context_length": CONTEXT,
        "vocab_size": 600,
        "width": 128,
        "heads": 4,
        "layers": 3,
        "pool_type": "eos",
        "eos_id": 1,
        "pad_id": 0,
        "hf_tokenizer_name": "chai-embedded",  # any name: open_clip then reads the tokenizer from the folder itself
    },
}
PREPROCESS = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic", "resize_mode": "squash"}


def write_folder(folder: Path, state: dict[str, Tensor]) -> None:
    """A folder that `open_clip.create_model_and_transforms("local-dir:" + folder)` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_cfg": CONFIG, "preprocess_cfg": PREPROCESS}
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "open_clip_model.safetensors")
    build_tokenizer().save_pretrained(folder)


class ClipTask:
    def __init__(self, plan: Plan, rank: int) -> None:
        clips = plan.run.parent / "clips"
        self.shards = clip_shards(clips, TRAIN_SEED, int(str(plan.extra["shards"])))
        self.test = clip_shards(clips, TEST_SEED, 1)[0]
        self.batch = int(str(plan.extra["batch"]))
        self.tokenizer = build_tokenizer()
        self.model = open_clip.CLIP(**CONFIG)

    def matrices(self) -> set[str]:
        return {n for n, p in self.model.named_parameters() if p.ndim == 2 and "resblocks" in n}

    def tokens(self, texts: list[str]) -> Tensor:
        return self.tokenizer(texts, padding="max_length", max_length=CONTEXT, truncation=True, return_tensors="pt").input_ids

    def loss(self, rng: torch.Generator, step: int) -> tuple[Tensor, dict[str, float]]:
        pick = np.random.default_rng(int(torch.randint(2**62, (1,), generator=rng)))
        frames, texts = [], []
        for _ in range(self.batch):
            shard, row = self.shards[pick.integers(len(self.shards))], int(pick.integers(500))
            frames.append(shard.clips[row, int(pick.integers(17))])
            texts.append(caption(shard.scenes[row], pick)[0])
        with fast_products():
            image, text, scale = self.model(as_video(np.stack(frames)[:, None])[:, :, 0], self.tokens(texts))
            logits = scale * image @ text.T
        truth = torch.arange(self.batch)
        loss = (F.cross_entropy(logits.float(), truth) + F.cross_entropy(logits.float().T, truth)) / 2
        return loss, {"scale": scale.item()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """How often a middle frame finds its own full caption among 256 (captions differ in motion too, frames do not)."""
        image = model.encode_image(as_video(np.array(self.test.clips[:256, 8:9]))[:, :, 0], normalize=True)  # type: ignore[operator]
        text = model.encode_text(self.tokens([full_caption(s) for s in self.test.scenes[:256]]), normalize=True)  # type: ignore[operator]
        return {"recall@1": float(((image @ text.T).argmax(1) == torch.arange(256)).float().mean())}

    def export(self, model: nn.Module, folder: Path) -> None:
        write_folder(folder / "clip", {name: value.half() for name, value in model.state_dict().items()})
