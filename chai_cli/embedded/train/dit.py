"""The video transformer: stock `WanTransformer3DModel` and `UMT5EncoderModel`, trained together on cached latents.

Rectified flow: x_sigma = (1 - sigma) x0 + sigma noise, velocity = noise - x0, sigma = 3u / (1 + 2u) with u uniform.
Three helps that leave no trace in the shipped model: latent channels weigh in the loss as far as pixels depend on them, cells
with objects weigh more, and heads on a middle block learn to say which object a cell shows (deep supervision, after REPA,
arXiv 2410.06940).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn

from chai_cli.embedded.captions import caption
from chai_cli.embedded.train.latents import LatentShard, latent_shards
from chai_cli.embedded.train.loop import Plan
from chai_cli.embedded.train.numbers import PRODUCTS, fast_products
from chai_cli.embedded.train.tokenizer import TEXT_DIM, build_text_encoder, build_tokenizer
from chai_cli.embedded.world import ATTRIBUTES, OBJECT_ATTRIBUTES

CONFIG: dict[str, Any] = {
    "patch_size": (1, 1, 1),
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "text_dim": TEXT_DIM,
    "freq_dim": 128,
    "ffn_dim": 640,
    "num_layers": 8,
    "rope_max_seq_len": 64,
}
SHIFT = 3.0
TEXT_LENGTH = 36  # tokens of the longest caption, its end token and one slot that stands for all padding
PADDED_LENGTHS = (64, 128, 226, 512)  # `max_sequence_length`s the model is at home with
EMPTY_CAPTIONS = 0.1
OBJECT_WEIGHT = 4.0
STILL_EVERY = 10  # after the first phase, one step in so many sees single frames
HEAD_BLOCK = 4
HEAD_WEIGHT = 0.05


class TrainProcessor:
    """`WanAttnProcessor` in plain matrix products (1.5 times its speed in bfloat16), with a mask for the text."""

    _attention_backend = None
    _parallel_config = None
    text_bias: Tensor | None = None

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        k = attn.norm_k(attn.to_k(source)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        v = attn.to_v(source).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        if rotary_emb is not None:
            cos, sin = (r.transpose(1, 2)[..., ::2].to(q.dtype) for r in rotary_emb)

            def rotate(x: Tensor) -> Tensor:
                a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
                return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

            q, k = rotate(q), rotate(k)
        q, k, v = (x.to(PRODUCTS) for x in (q * q.shape[-1] ** -0.5, k, v))
        scores = q @ k.transpose(-1, -2)
        if encoder_hidden_states is not None and TrainProcessor.text_bias is not None:
            scores = scores + TrainProcessor.text_bias
        out = scores.softmax(-1) @ v
        return attn.to_out[0](out.transpose(1, 2).flatten(2).to(hidden_states.dtype))


class TextToVideo(nn.Module):
    """Both models and the training heads, as one module."""

    def __init__(self, vocabulary: int, channels: int) -> None:
        super().__init__()
        self.text = build_text_encoder(vocabulary)
        self.transformer = WanTransformer3DModel(**CONFIG, in_channels=channels, out_channels=channels)
        nn.init.zeros_(self.transformer.proj_out.weight)
        nn.init.zeros_(self.transformer.proj_out.bias)
        self.heads = training_heads(CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"])

    def forward(self, x: Tensor, sigma: Tensor, ids: Tensor, padded: int) -> tuple[Tensor, Tensor]:
        """The velocity [B, C, T, H, W] and the middle block's tokens [B, T H W, D]."""
        mask = ids.gt(0)
        length = mask.sum(1)
        embeds = self.text(ids, mask.long()).last_hidden_state * mask[..., None]
        bias = torch.where(mask, 0.0, -1e4)
        bias[:, -1] = torch.log(padded - length.float())
        TrainProcessor.text_bias = bias[:, None, None].to(PRODUCTS)
        seen: list[Tensor] = []
        hook = self.transformer.blocks[HEAD_BLOCK - 1].register_forward_hook(lambda *call: seen.append(call[2]))
        velocity = self.transformer(x, sigma * 1000, embeds, return_dict=False)[0]
        hook.remove()
        return velocity, seen[0]

    def load(self, folder: Path) -> None:
        """Take over shipped weights."""
        self.transformer.load_state_dict(WanTransformer3DModel.from_pretrained(folder / "transformer").state_dict())
        self.text.load_state_dict(type(self.text).from_pretrained(folder / "text_encoder").state_dict())

    def quicken(self) -> None:
        """Attend in plain matrix products."""
        processor = TrainProcessor()
        for block in self.transformer.blocks:
            block.attn1.set_processor(processor)
            block.attn2.set_processor(processor)


def training_heads(width: int) -> nn.ModuleDict:
    """What says of each token whether it shows an object, and which."""
    sizes = {"cover": 2, **{name: len(values) for name, values in ATTRIBUTES.items()}}
    return nn.ModuleDict({name: nn.Linear(width, size) for name, size in sizes.items()})


def latent_scale(weights: Path) -> tuple[Tensor, Tensor]:
    config = json.loads((weights / "config.json").read_text())
    return torch.tensor(config["latents_mean"]), torch.tensor(config["latents_std"])


@torch.no_grad()
def channel_weights(weights: Path, video: Tensor) -> Tensor:
    """How much each latent channel matters to the eye, [C], mean 1: the root of the pixel error when it alone is disturbed.

    Args:
        weights: Folder of the autoencoder.
        video: A few scaled latents [B, C, T, H, W].
    """
    vae = AutoencoderKLWan.from_pretrained(weights, dtype=torch.float32)
    mean, std = (x.view(-1, 1, 1, 1) for x in latent_scale(weights))
    clean = vae.decode(video * std + mean).sample
    noise = 0.5 * torch.randn(video[:, 0].shape, generator=torch.Generator().manual_seed(0))
    errors = []
    for channel in range(video.shape[1]):
        disturbed = video.clone()
        disturbed[:, channel] += noise
        errors.append((vae.decode(disturbed * std + mean).sample - clean).square().mean())
    importance = torch.stack(errors).sqrt()
    return importance / importance.mean()


class DitTask:
    def __init__(self, plan: Plan, rank: int) -> None:
        vae = Path(str(plan.extra["vae"]))
        clips = plan.run.parent / "clips"
        self.vae = vae
        self.shards: list[LatentShard] = latent_shards(clips, plan.run / "latents", vae, int(str(plan.extra["shards"])))
        mean, std = latent_scale(vae)
        self.mean, self.std = mean.view(-1, 1, 1, 1), std.view(-1, 1, 1, 1)
        video = (torch.from_numpy(self.shards[0].video[:4]).float() - self.mean) / self.std
        self.channels = channel_weights(vae, video).view(1, -1, 1, 1, 1)
        self.tokenizer = build_tokenizer()
        self.batch = int(str(plan.extra["batch"]))
        self.still_steps = int(str(plan.extra["still_steps"]))
        self.plan = plan
        self.model = self.build()
        start = plan.extra.get("start")
        if start is not None:
            self.model.load(Path(str(start)))
        self.prepare()
        if plan.extra["compile"]:
            self.compile()

    def build(self) -> Any:
        return TextToVideo(len(self.tokenizer), len(self.mean))

    def prepare(self) -> None:
        """Make what will be trained as fast as it can be."""
        self.model.quicken()

    def compile(self) -> None:
        self.model.transformer.compile_repeated_blocks(dynamic=False)

    def matrices(self) -> set[str]:
        names = (n for n, p in self.model.named_parameters() if p.ndim == 2)
        return {n for n in names if n.startswith("transformer.blocks.")}

    def draw(self, rng: torch.Generator, stills: bool) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
        """A batch: scaled latents, caption ids, what each cell shows (-1 for nothing), and cover [B, 2, T, H, W]."""
        count = self.batch * 5 if stills else self.batch
        numpy_rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=rng)))
        latents, texts, covers = [], [], []
        labels: dict[str, list[list[int]]] = {name: [] for name in ATTRIBUTES}
        for _ in range(count):
            shard = self.shards[int(numpy_rng.integers(len(self.shards)))]
            row = int(numpy_rng.integers(len(shard.samples)))
            shown = shard.samples[row]
            if stills:
                still = int(numpy_rng.integers(shard.stills.shape[1]))
                latents.append(shard.stills[row, still][:, None])
                covers.append(shard.cover[row, :, still + (still > 0)][:, None])
            else:
                latents.append(shard.video[row])
                covers.append(shard.cover[row])
            empty = numpy_rng.random() < EMPTY_CAPTIONS
            texts.append("" if empty else caption(shown.scene(), numpy_rng, complete=numpy_rng.random() < 0.3)[0])
            labels["background"].append([ATTRIBUTES["background"].index(shown.background)])
            for name in OBJECT_ATTRIBUTES:
                values = [ATTRIBUTES[name].index(getattr(thing, name)) for thing in shown.things]
                labels[name].append((values * 2)[:2])
        x = (torch.from_numpy(np.stack(latents)).float() - self.mean) / self.std
        cover = torch.from_numpy(np.stack(covers)).float() / 255
        ids = self.tokenizer(
            texts, padding="max_length", max_length=TEXT_LENGTH, truncation=True, return_tensors="pt"
        ).input_ids
        return x, ids, {name: torch.tensor(values) for name, values in labels.items()}, cover

    def loss(self, rng: torch.Generator, step: int) -> tuple[Tensor, dict[str, float]]:
        stills = step < self.still_steps or step % STILL_EVERY == 0
        x, ids, labels, cover = self.draw(rng, stills)
        count = len(x)
        u = (torch.randperm(count, generator=rng) + torch.rand(count, generator=rng)) / count
        sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
        noise = torch.randn(x.shape, generator=rng)
        s = sigma.view(-1, 1, 1, 1, 1)
        padded = PADDED_LENGTHS[int(torch.randint(len(PADDED_LENGTHS), (1,), generator=rng))]
        noised = (1 - s) * x + s * noise
        with fast_products():
            velocity, tokens = self.model(noised, sigma, ids, padded)
            said = {name: head(tokens).float() for name, head in self.model.heads.items()}
        weight = self.channels * (1 + OBJECT_WEIGHT * cover.amax(1, keepdim=True))
        square = (velocity.float() - self.goal(noise - x, noised, sigma, ids, padded)).square()
        flow = (square * weight).mean() / weight.mean()
        flat = cover.flatten(2).transpose(1, 2)  # [B, cells, 2]
        clear = (1.2 - sigma).clamp(0, 1).view(-1, 1, 1)  # nearly pure noise says nothing about places
        heads = (F.binary_cross_entropy_with_logits(said["cover"], flat, reduction="none") * clear).mean()
        place = labels["background"].expand(-1, flat.shape[1])
        heads = heads + F.cross_entropy(said["background"].flatten(0, 1), place.flatten())
        inside, owner = flat.max(-1)
        for name in OBJECT_ATTRIBUTES:
            truth = labels[name].gather(1, owner)
            error = F.cross_entropy(said[name].flatten(0, 1), truth.flatten(), reduction="none")
            heads = heads + (error * inside.flatten()).sum() / inside.sum().clamp(min=1)
        kind = "still" if stills else "flow"
        return flow + HEAD_WEIGHT * heads, {kind: flow.detach().item(), "heads": heads.detach().item()}

    def goal(self, velocity: Tensor, noised: Tensor, sigma: Tensor, ids: Tensor, padded: int) -> Tensor:
        """What the model should say: the true velocity."""
        return velocity

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the whole pipeline in fp16."""
        transformer = WanTransformer3DModel(**CONFIG, in_channels=len(self.mean), out_channels=len(self.mean))
        transformer.load_state_dict(clean_state(model.transformer))  # type: ignore[arg-type]
        text = build_text_encoder(len(self.tokenizer))
        text.load_state_dict(clean_state(model.text))  # type: ignore[arg-type]
        pipeline = WanPipeline(
            tokenizer=self.tokenizer,
            text_encoder=text.half(),
            transformer=transformer.half(),
            vae=AutoencoderKLWan.from_pretrained(self.vae, torch_dtype=torch.float16),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT, num_train_timesteps=1000
            ),
        )
        pipeline.save_pretrained(folder)
        for part in ("vae", "transformer", "text_encoder", "scheduler"):
            forget_path(folder / part)


def forget_path(folder: Path) -> None:
    """Take the path a part was loaded from out of its configuration."""
    for path in folder.glob("*config.json"):
        config = json.loads(path.read_text())
        if config.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(config, indent=2) + "\n")


def clean_state(module: nn.Module) -> dict[str, Tensor]:
    """Weights by their plain names, without what compilation puts in front."""
    return {name.replace("_orig_mod.", ""): value for name, value in module.state_dict().items()}
