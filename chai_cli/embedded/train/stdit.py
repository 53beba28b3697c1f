"""A small Open-Sora on the same latents: `STDiT3` trained with the embedded model's own text encoder, which stays as it is.

Everything but the transformer is `dit.py`'s: data, noise levels, weights of the loss, training heads.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import UMT5EncoderModel

from chai_cli.backbones.opensora.backbone import IMAGE_FPS
from chai_cli.backbones.opensora.transformer import STDiT3
from chai_cli.embedded import world
from chai_cli.embedded.train import dit
from chai_cli.embedded.train.dit import DitTask, clean_state, forget_path, training_heads
from chai_cli.embedded.train.numbers import fast_products
from chai_cli.embedded.train.tokenizer import TEXT_DIM

CONFIG: dict[str, Any] = {
    "input_sq_size": world.HEIGHT,
    "patch_size": (1, 1, 1),
    "hidden_size": 192,
    "depth": 6,
    "num_heads": 6,
    "mlp_ratio": 2.0,
    "pred_sigma": False,
    "caption_channels": TEXT_DIM,
    "model_max_length": 64,
}
WEIGHTS = Path(__file__).parents[1] / "weights"
HEAD_PAIR = 3


class TextToVideo(nn.Module):
    """The transformer and the training heads, as one module; the text encoder is not trained."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.transformer = STDiT3(**CONFIG, in_channels=channels)
        for zero in (self.transformer.final_layer.linear, *(b.attn.proj for b in self.transformer.temporal_blocks)):
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)
        self.heads = training_heads(CONFIG["hidden_size"])
        text = UMT5EncoderModel.from_pretrained(WEIGHTS / "text_encoder", dtype=torch.float32).eval().requires_grad_(False)
        object.__setattr__(self, "text", text)  # no part of what is trained or saved

    def forward(self, x: Tensor, sigma: Tensor, ids: Tensor, padded: int) -> tuple[Tensor, Tensor]:
        """The velocity from data to noise [B, C, T, H, W] and the middle tokens [B, T H W, D].

        A caption that is only its end stands for none, in as many tokens as captions commonly have.
        """
        mask = ids.gt(0)
        with torch.no_grad():
            embeds = self.text(ids, mask.long()).last_hidden_state  # type: ignore[operator]
        empty = mask.sum(1) <= 1
        nothing = self.transformer.y_embedder.y_embedding[: ids.shape[1]]
        embeds = torch.where(empty[:, None, None], nothing, embeds)
        common = torch.arange(ids.shape[1]) < mask.sum(1).max()
        mask = torch.where(empty[:, None], common, mask)
        seen: list[Tensor] = []
        hook = self.transformer.temporal_blocks[HEAD_PAIR - 1].register_forward_hook(lambda *call: seen.append(call[2]))
        fps = float(world.FPS if x.shape[2] > 1 else IMAGE_FPS)
        size = {"height": world.HEIGHT, "width": world.WIDTH, "fps": fps}
        with sdpa_kernel(SDPBackend.MATH):  # on a CPU twice as fast backwards as the fused one
            velocity = self.transformer(x, sigma * 1000, embeds, mask, return_dict=False, **size)[0]
        hook.remove()
        return -velocity, seen[0]

    def load(self, folder: Path) -> None:
        """Take over trained weights."""
        self.transformer.load_state_dict(STDiT3.from_pretrained(folder / "transformer").state_dict())


class StditTask(DitTask):
    """With a teacher the goal is what the embedded Wan says, which varies less than the truth and is learned in fewer steps."""

    teacher: dit.TextToVideo | None = None

    def build(self) -> TextToVideo:
        return TextToVideo(len(self.mean))

    def prepare(self) -> None:
        if self.plan.extra["teacher"]:
            self.teacher = dit.TextToVideo(len(self.tokenizer), len(self.mean)).eval().requires_grad_(False)
            self.teacher.load(WEIGHTS)
            self.teacher.quicken()
            if self.plan.extra["compile"]:
                self.teacher.transformer.compile_repeated_blocks(dynamic=False)

    def compile(self) -> None:
        """Part by part: of whole blocks the gradients came out as no numbers in bfloat16 (torch 2.14)."""
        for block in (*self.model.transformer.spatial_blocks, *self.model.transformer.temporal_blocks):
            for part in (block.attn, block.cross_attn, block.mlp):
                part.compile(dynamic=False)

    @torch.no_grad()
    def goal(self, velocity: Tensor, noised: Tensor, sigma: Tensor, ids: Tensor, padded: int) -> Tensor:
        if self.teacher is None:
            return velocity
        with fast_products():
            return self.teacher(noised, sigma, ids, padded)[0].float()

    def matrices(self) -> set[str]:
        names = (n for n, p in self.model.named_parameters() if p.ndim == 2 and not n.endswith("scale_shift_table"))
        return {n for n in names if "_blocks." in n}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the transformer in fp16, and an index that takes all else from the embedded model."""
        transformer = STDiT3(**CONFIG, in_channels=len(self.mean))
        transformer.load_state_dict(clean_state(model.transformer))  # type: ignore[arg-type]
        transformer.half().save_pretrained(folder / "transformer")
        forget_path(folder / "transformer")
        others = {
            "vae": ["diffusers", "AutoencoderKLWan"],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        }
        index: dict[str, Any] = {"_class_name": "OpenSoraPipeline", "transformer": ["chai_cli", "STDiT3"]}
        index |= {name: [*kind, os.path.relpath(WEIGHTS / name, folder)] for name, kind in others.items()}
        (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
