"""One entry for each model family: a function that saves a tiny random model of its real classes to a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch


def tiny_wan(folder: Path) -> None:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    from chai_cli.embedded.train.tokenizer import TEXT_DIM, build_text_encoder, build_tokenizer

    torch.manual_seed(0)
    z = 8
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=z,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        latents_mean=[0.1] * z,
        latents_std=[1.5] * z,
    )
    tokenizer = build_tokenizer(500)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=z,
        out_channels=z,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
    )
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=build_text_encoder(len(tokenizer)),
        transformer=transformer,
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ).save_pretrained(folder)


FAMILIES: dict[str, Callable[[Path], None]] = {"wan": tiny_wan}
