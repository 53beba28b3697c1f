"""Open-Sora 1.2 against numbers that the reference implementation (tag v1.2.0) gave for the same weights and inputs.

`reference/opensora.json` holds them: some values of each result, in float32 on a CPU. `seeded` makes the weights of both.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import Result

from chai_cli.backbones.base import Look, Placement, find_record, load, resolve
from chai_cli.backbones.opensora.backbone import OpenSoraBackbone, time_shift
from chai_cli.backbones.opensora.captions import prepared
from chai_cli.backbones.opensora.sizes import ASPECT_RATIOS, DURATIONS, SIZES, frames_of, size_of
from chai_cli.backbones.opensora.transformer import STDiT3
from chai_cli.backbones.opensora.vae import SDXL_VAE, OpenSoraVAE, latent_frames
from chai_cli.errors import ChaiError
from chai_cli.prompts import Settings

FOLDER = Path(__file__).parent / "reference"
KNOWN = json.loads((FOLDER / "opensora.json").read_text())
TOLERANCE = 1e-5  # relative to the largest value

SMALL_DIT: dict[str, Any] = {
    "hidden_size": 48,
    "depth": 2,
    "num_heads": 2,
    "caption_channels": 24,
    "model_max_length": 12,
}
SMALL_2D = {**SDXL_VAE, "block_out_channels": [8, 8, 16, 16], "layers_per_block": 1, "norm_num_groups": 4}
# latent frames, rows, columns; pixels; frames a second; batch; given frames
PASSES = [
    ((3, 6, 8), (48, 64), 24.0, 1, 0),
    ((5, 7, 53), (61, 424), 24.0, 2, 0),
    ((4, 30, 53), (240, 426), 8.0, 1, 2),
    ((6, 5, 4), (40, 37), 30.0, 2, 1),
    ((1, 9, 5), (75, 40), 120.0, 1, 0),
]
FRAMES = (1, 4, 17, 20, 34, 40, 51)


def seeded(model: nn.Module) -> None:
    """Weights that depend on nothing but their names and shapes."""
    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith(("rope.freqs", "scale", "shift")):
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            if tensor.ndim > 1:
                values *= (tensor[0].numel()) ** -0.5
            elif name.endswith("weight"):
                values = 1 + 0.1 * values
            else:
                values *= 0.1
            tensor.copy_(values)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def told(values: Tensor) -> dict[str, Any]:
    """A tensor as it is kept: its shape, 48 of its values spread over it, its root mean square."""
    flat = values.double().flatten()
    picked = torch.linspace(0, len(flat) - 1, min(48, len(flat))).long()
    return {"shape": list(values.shape), "values": flat[picked].tolist(), "rms": flat.square().mean().sqrt().item()}


def assert_equal(values: Tensor, known: dict[str, Any]) -> None:
    found = told(values)
    assert found["shape"] == known["shape"]
    largest = max(abs(value) for value in known["values"])
    differences = [abs(a - b) for a, b in zip(found["values"], known["values"], strict=True)]
    assert max(differences) <= TOLERANCE * largest
    assert abs(found["rms"] - known["rms"]) <= TOLERANCE * known["rms"]


def pass_inputs(index: int) -> dict[str, Any]:
    size, (height, width), fps, batch, given = PASSES[index]
    mask = torch.ones(batch, 12, dtype=torch.long)
    mask[:, 7:] = 0
    mask[1:, 5:] = 0
    moving = torch.ones(batch, size[0], dtype=torch.bool)
    moving[:, :given] = False
    return {
        "hidden_states": drawn(index, batch, 4, *size),
        "timestep": torch.tensor([944.3, 12.0][:batch]),
        "encoder_hidden_states": drawn(100 + index, batch, 12, 24),
        "encoder_attention_mask": mask,
        "frame_mask": moving if given else None,
        "fps": fps,
        "height": height,
        "width": width,
    }


@pytest.fixture(scope="module")
def transformer() -> STDiT3:
    model = STDiT3(**SMALL_DIT).eval()
    seeded(model)
    return model


@pytest.fixture(scope="module")
def vae() -> OpenSoraVAE:
    model = OpenSoraVAE(vae_2d=SMALL_2D, filters=(8, 16, 16, 32), blocks=2, groups=4).eval()
    seeded(model)
    return model


@pytest.mark.parametrize("index", range(len(PASSES)))
@torch.no_grad()
def test_transformer(transformer: STDiT3, index: int) -> None:
    """Odd widths, padding of text, given frames, frame rate and size."""
    assert_equal(transformer(**pass_inputs(index)).sample, KNOWN["transformer"][index])


@torch.no_grad()
def test_padding_of_text_does_not_matter(transformer: STDiT3) -> None:
    inputs = pass_inputs(0)
    cut = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][:, :7], "encoder_attention_mask": None}
    assert torch.allclose(transformer(**inputs).sample, transformer(**cut).sample, atol=1e-5)


@pytest.mark.parametrize("frames", FRAMES)
@torch.no_grad()
def test_autoencoder(vae: OpenSoraVAE, frames: int) -> None:
    """Pieces of 17 frames, what is left over, and a few frames at a time."""
    known = KNOWN["vae"][str(frames)]
    latents = vae.encode(drawn(frames, 1, 3, frames, 24, 40))
    assert latents.shape[2] == latent_frames(frames)
    assert_equal(latents, known["latents"])
    video = vae.decode(drawn(1000 + frames, *latents.shape), frames)
    assert video.shape[2] == frames
    assert_equal(video, known["video"])


def look_of(**settings: Any) -> Look:
    return resolve(find_record("opensora-1.2"), Settings(**settings), None)


@pytest.mark.parametrize("known", KNOWN["times"], ids=lambda known: "-".join(map(str, known["of"])))
def test_times(known: dict[str, Any]) -> None:
    height, width, frames, steps = known["of"]
    look = look_of(height=height, width=width, num_frames=frames, num_inference_steps=steps)
    scheduler = OpenSoraBackbone.schedule(Bare(), look)  # type: ignore[arg-type]
    assert scheduler.timesteps.tolist() == pytest.approx(known["timesteps"], rel=TOLERANCE)
    assert scheduler.sigmas[-1] == 0


class Bare:
    """As much of a backbone as a schedule needs."""

    device = torch.device("cpu")
    pipe = SimpleNamespace(transformer=SimpleNamespace(config=SimpleNamespace(input_sq_size=512)))


def test_less_than_one_piece_has_a_schedule_too() -> None:
    assert [time_shift(look_of(height=512, width=512, num_frames=frames), 512) for frames in (1, 9, 16)] == [1, 3**0.5, 2]


@torch.no_grad()
def test_sampling(transformer: STDiT3) -> None:
    """A whole run: guidance with no caption, the times of the size, Euler; the same noise, no mask of ones."""
    known = KNOWN["sampling"]
    look = look_of(height=72, width=61, num_frames=34, num_inference_steps=6, fps=24)
    latents, text = drawn(5, 1, 4, 10, 9, 7), drawn(6, 1, 9, 24)
    backbone = Bare()
    scheduler = OpenSoraBackbone.schedule(backbone, look)  # type: ignore[arg-type]
    for time in scheduler.timesteps:
        cond, uncond = (
            OpenSoraBackbone.predict(backbone, transformer, latents, time, side, look)  # type: ignore[arg-type]
            for side in (text, transformer.y_embedder.y_embedding[:9].unsqueeze(0))
        )
        velocity = uncond + look.guidance_scale * (cond - uncond)
        latents = scheduler.step(velocity, time, latents, return_dict=False)[0]
    assert_equal(latents, known)


def listed(model: nn.Module) -> list[str]:
    return sorted(f"{name} {'x'.join(map(str, tensor.shape))}" for name, tensor in model.state_dict().items())


def test_full_transformer_has_the_published_parameters() -> None:
    with torch.device("meta"):
        model = STDiT3()
    assert listed(model) == (FOLDER / "stdit3-xl-2.txt").read_text().splitlines()
    trained = sum(p.numel() for name, p in model.named_parameters() if name != "rope.freqs")
    assert round(trained / 1e9, 3) == KNOWN["parameters"]["STDiT3-XL/2"]


def test_full_autoencoder_has_the_published_parameters() -> None:
    with torch.device("meta"):
        model = OpenSoraVAE()
    assert listed(model) == (FOLDER / "opensora-vae-1.2.txt").read_text().splitlines()


@pytest.mark.parametrize("known", KNOWN["captions"], ids=range(len(KNOWN["captions"])))
def test_captions(known: dict[str, Any]) -> None:
    assert prepared(known["prompt"], known["aesthetic_score"]) == known["text"]


def test_sizes() -> None:
    for resolution, ratios in KNOWN["sizes"].items():
        assert {name: list(size_of(resolution, name)) for name in ASPECT_RATIOS} == ratios
    assert set(SIZES) == set(KNOWN["sizes"])
    assert {name: frames_of(name) for name in DURATIONS} == KNOWN["durations"]
    with pytest.raises(ChaiError, match="one of 144p, 240p, 360p, 480p, 720p, not '4k'"):
        size_of("4k", "16:9")
    with pytest.raises(ChaiError, match="width:height"):
        size_of("240p", "5:4")
    with pytest.raises(ChaiError, match="one of 2s, 4s, 8s, 16s, not '3s'"):
        frames_of("3s")


def as_published(cache: Path) -> None:
    """A small Open-Sora in the hub's cache, in the four places, files and configurations of the published one."""

    def snapshot(name: str, inside: str = "") -> Path:
        root = cache / f"models--{name.replace('/', '--')}"
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text("abc")
        folder = root / "snapshots" / "abc" / inside
        folder.mkdir(parents=True)
        return folder

    from transformers import T5Config, T5EncoderModel

    from chai_cli.embedded.train.tokenizer import build_tokenizer

    torch.manual_seed(0)
    words = build_tokenizer(500)
    text = snapshot("DeepFloyd/t5-v1_1-xxl")
    words.save_pretrained(text)
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
    encoder = T5EncoderModel(T5Config(vocab_size=len(words), **sizes))
    (text / "config.json").write_text(json.dumps({**encoder.config.to_dict(), "architectures": ["T5ForConditionalGeneration"]}))
    torch.save(encoder.state_dict(), text / "pytorch_model.bin")

    model = STDiT3(hidden_size=24, depth=2, num_heads=2, caption_channels=24, model_max_length=300)
    config = {key: model.config[key] for key in ("hidden_size", "depth", "num_heads", "caption_channels", "model_max_length")}
    config |= {"architectures": ["STDiT3"], "model_type": "STDiT3", "class_dropout_prob": 0.1, "freeze_y_embedder": True}
    config |= {"enable_flash_attn": True, "input_size": [None, None, None], "torch_dtype": "float32", "drop_path": 0.0}
    folder = snapshot("hpcai-tech/OpenSora-STDiT-v3")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})

    vae = OpenSoraVAE(vae_2d=SMALL_2D, filters=(8, 8, 8, 8), blocks=1, groups=4)
    temporal = {name: value for name, value in vae.state_dict().items() if not name.startswith("spatial_vae.")}
    spatial = {"type": "VideoAutoencoderKL", "from_pretrained": "elsewhere", "subfolder": "vae", "micro_batch_size": 4}
    config = {"model_type": "VideoAutoencoderPipeline", "vae_2d": spatial, "vae_temporal": {"type": "VAE_Temporal_SD"}}
    config |= {"micro_frame_size": 17, "shift": [-0.1], "scale": [3.85], "cal_loss": False}
    config |= {"filters": [8, 8, 8, 8], "blocks": 1, "groups": 4}  # only these are not published: they make it small
    folder = snapshot("hpcai-tech/OpenSora-VAE-v1.2")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(temporal, folder / "model.safetensors", metadata={"format": "pt"})
    vae.spatial_vae.module.save_pretrained(snapshot("PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers", "vae"))


def test_a_published_model_runs_from_the_four_places_it_lies_in(
    chai: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_published(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "user" / name)
    assert json.loads(chai("models", "--json").stdout.splitlines()[-1])["on_disk"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A Red Ball, on sand!\n")
    options = ("--model", "opensora-1.2", "--aspect-ratio", "1:1", "--resolution", "144p", "--num-frames", "20", "--steps", "2")
    made = chai("gen", prompts, "--out", tmp_path / "out", *options, "--method", "dense", "--json")
    (row,) = (json.loads(line) for line in made.stdout.splitlines())
    assert (row["status"], row["height"], row["width"], row["num_frames"]) == ("done", 192, 192, 20)
    command = chai("show", tmp_path / "out" / row["file"]).stdout
    assert "--model opensora-1.2" in command
    for option, sentence in (
        (("--resolution", "4k"), "the resolution is one of 144p"),
        (("--height", "64", "--resolution", "144p"), "give either --height and --width or --resolution"),
        (("--num-frames", "9", "--duration", "2s"), "give either --num-frames or --duration"),
        (("--lora", "a.safetensors"), "takes no --lora"),
    ):
        failed = chai("gen", prompts, "--out", tmp_path / "other", "--model", "opensora-1.2", *option)
        assert failed.exit_code == 2
        assert sentence in failed.stderr


def test_a_folder_of_published_parts_is_a_model(tmp_path: Path) -> None:
    as_published(tmp_path / "hub")
    folder = tmp_path / "mine"
    for part, source in find_record("opensora-1.2").parts.items():
        owner, name, *inside = source.split("/")
        shutil.copytree(tmp_path / "hub" / f"models--{owner}--{name}" / "snapshots" / "abc" / "/".join(inside), folder / part)
    (folder / "model_index.json").write_text('{"_class_name": "OpenSoraPipeline"}')
    record = find_record(str(folder))
    assert (record.family, record.height, record.guidance_scale) == ("opensora", 240, 7.0)
    first = load(record, Placement(device="cpu"))
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text().replace("0.1", "0.2"))
    assert load(record, Placement(device="cpu")).fingerprint != first.fingerprint


@pytest.mark.parametrize("model", ["embedded", "embedded-opensora"])
def test_sizes_by_name_are_for_models_that_have_them(chai: Callable[..., Result], tmp_path: Path, model: str) -> None:
    (tmp_path / "prompts.txt").write_text("a red ball\n")
    for option in (("--resolution", "144p"), ("--duration", "2s"), ("--aesthetic-score", "5")):
        failed = chai("gen", tmp_path / "prompts.txt", "--out", tmp_path / "out", "--model", model, *option)
        assert failed.exit_code == 2
        assert f"{model} has no {'aesthetic score' if 'score' in option[0] else 'sizes by name'}" in failed.stderr


def test_weights_of_another_model_are_one_sentence(tmp_path: Path) -> None:
    model = STDiT3(**SMALL_DIT)
    model.save_pretrained(tmp_path)
    assert torch.equal(STDiT3.from_pretrained(tmp_path).rope.freqs, model.rope.freqs)
    weights = model.state_dict()
    del weights["t_block.1.weight"]
    save_file(weights, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ChaiError, match="lacks 1 tensors, such as t_block"):
        STDiT3.from_pretrained(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ChaiError, match=r"holds no \.safetensors"):
        STDiT3.from_pretrained(tmp_path)
