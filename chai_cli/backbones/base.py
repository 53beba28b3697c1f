"""What a model family must offer, and the list of models that are known by name. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from chai_cli.errors import ChaiError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from chai_cli.prompts import Settings


class Incomplete(ChaiError):
    """Files of a model are missing or broken."""


SAMPLED = 65_536  # bytes read at the head and the tail of each weight file to tell one version from another


@dataclass(frozen=True)
class ModelRecord:
    """A model: where it is, what it likes. Sizes in pixels, memory in GiB for bf16 weights (fp32 for the embedded one).

    Attributes:
        parts: Hub ids of a model that is published in several places, by part; behind owner and name, a folder in it.
        aesthetic_score: What prompts are marked with, for a model that was trained on such marks.
        named_sizes: Whether it was trained on the sizes that its family has names for.
        fast_steps: Steps that corrected hits need, where that was measured.
    """

    name: str
    family: str
    source: str
    licence: str = "unknown"
    parameters: str = "?"
    height: int = 480
    width: int = 832
    num_frames: int = 81
    fps: int = 16
    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    flow_shift: float | None = None
    max_sequence_length: int = 512
    memory: float | None = None
    embedder: str = "ViT-B-32"
    fast_steps: int | None = None
    aesthetic_score: float | None = None
    named_sizes: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    unknown_words: Callable[[str], list[str]] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Placement:
    """Where and how a model runs. `None` lets chai choose: cuda in bfloat16, then mps, then the CPU in float32."""

    device: str | None = None
    dtype: str | None = None
    offload: str = "none"
    attention_backend: str | None = None
    compile: bool = False
    vae_tiling: bool = False
    lora: tuple[str, ...] = ()


@dataclass(frozen=True)
class Text:
    """A prompt as the transformer reads it: embeddings [1, L, D] on the CPU, and those of the negative prompt.

    Attributes:
        tokens_cut: Tokens at the end of the prompt that the text encoder has no room for.
    """

    cond: torch.Tensor
    uncond: torch.Tensor | None
    tokens_cut: int = 0


@dataclass(frozen=True)
class Look:
    """Settings with every choice made."""

    negative_prompt: str
    seed: int
    height: int
    width: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    scheduler: str
    aesthetic_score: float | None = None


class ModelFiles(Protocol):
    """What a model's files tell without loading it."""

    @property
    def fingerprint(self) -> str:
        """Tells models apart whose latents do not fit each other."""

    def latent_shape(self, look: Look) -> tuple[int, int, int, int, int]:
        """[1, C, T, H, W].

        Raises:
            ChaiError: a size the model cannot make.
        """


class Backbone(Protocol):
    """A loaded model. One instance serves any number of requests; nothing of one changes the next."""

    record: ModelRecord
    device: torch.device
    fingerprint: str

    def encode(self, prompt: str, look: Look) -> Text:
        """Run the text encoder."""

    def release_text_encoder(self) -> None:
        """Free the accelerator of the text encoder if it weighs much there; `encode` brings it back."""

    def free_memory(self) -> None:
        """Give back what a failed request left on the device."""

    def schedule(self, look: Look) -> Any:
        """A fresh diffusers scheduler with its timesteps set."""

    def transformers(self) -> list[Any]:
        """The models that denoise."""

    def latent_shape(self, look: Look) -> tuple[int, int, int, int, int]:
        """[1, C, T, H, W].

        Raises:
            ChaiError: a size the model cannot make.
        """

    def noise(self, look: Look) -> torch.Tensor:
        """Seeded noise [1, C, T, H, W] in float32, drawn on the CPU."""

    def velocity(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: Text, look: Look, context: dict[str, Any]
    ) -> tuple[torch.Tensor, int]:
        """The guided prediction of the model and the number of forwards it took."""

    def decode(self, latents: torch.Tensor, look: Look) -> np.ndarray:
        """Latents [1, C, T, H, W] to frames, uint8 [T', H', W', 3]."""


@dataclass(frozen=True)
class FamilyRecord:
    """What chai knows of a family of models; classes as `module:Name`, loaded when used.

    Attributes:
        pipeline: Class in a folder's `model_index.json`.
        backbone, files: See `Backbone`, `ModelFiles`.
        transformer: Class of its transformer.
        sites: Where that has its self-attention, see `attention.Sites`.
        presets: A module with sizes by name (`size_of`, `frames_of`), if it has such.
        likes: What a `ModelRecord` of a folder says where nothing else is known.
    """

    pipeline: str
    backbone: str
    files: str
    transformer: str
    sites: str
    presets: str | None = None
    likes: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def load(named: str) -> Any:
        module, _, name = named.partition(":")
        found = importlib.import_module(f"chai_cli.backbones.{module}")
        return getattr(found, name) if name else found


FAMILIES = {
    "wan": FamilyRecord(
        pipeline="WanPipeline",
        backbone="wan:WanBackbone",
        files="wan:WanFiles",
        transformer="WanTransformer3DModel",
        sites="wan_attention:WanSites",
    ),
    "opensora": FamilyRecord(
        pipeline="OpenSoraPipeline",
        backbone="opensora.backbone:OpenSoraBackbone",
        files="opensora.backbone:OpenSoraFiles",
        transformer="STDiT3",
        sites="opensora.attention:STDiT3Sites",
        presets="opensora.sizes",
        likes={
            "height": 240,
            "width": 426,
            "num_frames": 51,
            "fps": 24,
            "num_inference_steps": 30,
            "guidance_scale": 7.0,
            "max_sequence_length": 300,
            "aesthetic_score": 6.5,
            "named_sizes": True,
        },
    ),
}


def embedded_record() -> ModelRecord:
    from chai_cli.embedded import captions, world

    return ModelRecord(
        name="embedded",
        family="wan",
        source=str(Path(__file__).parents[1] / "embedded" / "weights"),
        licence="Apache-2.0",
        parameters="5 M",
        height=world.HEIGHT,
        width=world.WIDTH,
        num_frames=world.FRAMES,
        fps=world.FPS,
        num_inference_steps=30,
        guidance_scale=4.0,
        flow_shift=3.0,
        max_sequence_length=64,
        memory=0.1,
        fast_steps=4,
        embedder=str(Path(__file__).parents[1] / "embedded" / "weights" / "clip"),
        unknown_words=captions.unknown_words,
    )


def embedded_opensora_record() -> ModelRecord:
    """The small Open-Sora of the same world, with the embedded model's autoencoder and text encoder."""
    source = str(Path(__file__).parents[1] / "embedded" / "opensora")
    like = embedded_record()
    return replace(like, name="embedded-opensora", family="opensora", source=source, flow_shift=None)


RECORDS: dict[str, Callable[[], ModelRecord]] = {
    "embedded": embedded_record,
    "embedded-opensora": embedded_opensora_record,
    "wan2.1-t2v-1.3b": lambda: ModelRecord(
        name="wan2.1-t2v-1.3b",
        family="wan",
        source="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        licence="Apache-2.0",
        parameters="1.3 B",
        flow_shift=3.0,
        memory=16,
    ),
    "wan2.1-t2v-14b": lambda: ModelRecord(
        name="wan2.1-t2v-14b",
        family="wan",
        source="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        licence="Apache-2.0",
        parameters="14 B",
        height=720,
        width=1280,
        flow_shift=5.0,
        memory=48,
    ),
    "opensora-1.2": lambda: ModelRecord(
        name="opensora-1.2",
        family="opensora",
        source="hpcai-tech/OpenSora-STDiT-v3",
        licence="Apache-2.0",
        parameters="1.2 B",
        memory=14,
        **FAMILIES["opensora"].likes,
        parts={
            "transformer": "hpcai-tech/OpenSora-STDiT-v3",
            "vae": "hpcai-tech/OpenSora-VAE-v1.2",
            "vae_2d": "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers/vae",
            "text_encoder": "DeepFloyd/t5-v1_1-xxl",
        },
    ),
}


def find_record(model: str) -> ModelRecord:
    """The record of a model by chai's name, by folder, or by hub id (`owner/name`).

    Raises:
        ChaiError: nothing of that name, or a family chai cannot run.
    """
    if model in RECORDS:
        return RECORDS[model]()
    folder = Path(model).expanduser()
    if folder.is_dir():
        named = (make() for make in RECORDS.values())
        known = next((record for record in named if Path(record.source).is_dir() and folder.samefile(record.source)), None)
        return known or record_of_folder(model, folder)
    for make in RECORDS.values():
        if make().source == model:
            return make()
    if model.count("/") == 1 and not model.startswith((".", "~", "/")):
        return ModelRecord(name=model, family="wan", source=model)
    raise ChaiError(
        f"no model named {model!r}: give one of {', '.join(RECORDS)}, a folder with a model_index.json, or a hub id owner/name"
    )


def record_of_folder(model: str, folder: Path) -> ModelRecord:
    """A record for a pipeline saved to disk, with the size that its configuration makes natural."""
    index = read_json(folder / "model_index.json", f"{model} is not a diffusers pipeline: it has no readable model_index.json")
    pipeline = str(index.get("_class_name"))
    for name, family in FAMILIES.items():
        if family.pipeline == pipeline:
            return ModelRecord(name=model, family=name, source=str(folder), **family.likes)
    known = ", ".join(family.pipeline for family in FAMILIES.values())
    raise ChaiError(f"{model} is a {pipeline}, which chai cannot run yet; it runs {known}")


def read_json(path: Path, complaint: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        raise ChaiError(complaint) from None
    if not isinstance(found, dict):
        raise ChaiError(complaint)
    return found


def local_folder(record: ModelRecord) -> Path | None:
    """The folder with the model's files if they are on this disk already."""
    if record.parts:
        found = parts_on_disk(record)
        return assembled(record, found) if found else None
    folder = Path(record.source).expanduser()
    if folder.is_dir() or folder.is_absolute():
        return folder if folder.is_dir() else None
    return in_hub_cache(record.source, "", "model_index.json")


def on_disk(record: ModelRecord) -> bool:
    """Whether the model's files are on this disk already."""
    return bool(parts_on_disk(record)) if record.parts else local_folder(record) is not None


def parts_on_disk(record: ModelRecord) -> dict[str, Path]:
    """Where the parts of a model lie that is published in several places; nothing if one of them is missing."""
    found = {part: in_hub_cache(*hub_place(source), "config.json") for part, source in record.parts.items()}
    there = {part: folder for part, folder in found.items() if folder}
    return there if len(there) == len(found) else {}


def hub_place(source: str) -> tuple[str, str]:
    """`owner/name/folder` as hub id and folder in it."""
    owner, name, *inside = source.split("/")
    return f"{owner}/{name}", "/".join(inside)


def in_hub_cache(repository: str, inside: str, file: str) -> Path | None:
    """The folder of a repository on this disk in which a file lies."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(repository, f"{inside}/{file}".lstrip("/"), cache_dir=constants.HF_HUB_CACHE)
    return Path(found).parent if isinstance(found, str) else None


def assembled(record: ModelRecord, parts: Mapping[str, Path]) -> Path:
    """A folder whose `model_index.json` says where the parts of a model lie: to chai the same as a pipeline saved to disk."""
    from platformdirs import user_cache_path

    folder = user_cache_path("chai") / "models" / record.name
    index = {part: [None, None, str(there)] for part, there in parts.items()}
    text = json.dumps({"_class_name": FAMILIES[record.family].pipeline, **index}, indent=1)
    note, beside = folder / "model_index.json", folder / f"model_index.{os.getpid()}"
    try:
        if not note.exists() or note.read_text("utf-8") != text:
            folder.mkdir(parents=True, exist_ok=True)
            beside.write_text(text, "utf-8")
            beside.replace(note)
    except OSError as error:
        raise ChaiError(f"cannot write {note}: {error.strerror or error}") from None
    return folder


def part_of(folder: Path, index: dict[str, Any], name: str) -> Path:
    """The folder of a pipeline's part: under its name beside `model_index.json`, or where that says, behind library and class."""
    entry = index.get(name)
    if isinstance(entry, list) and len(entry) > 2 and isinstance(entry[2], str):
        return folder / entry[2]
    return folder / name


def identity(folder: Path) -> str:
    """Tells one version of a pipeline's files from another without reading them whole: names, sizes, heads and tails.

    Of `model_index.json` what it says counts, but not where parts lie.
    """
    index = folder / "model_index.json"
    told = read_json(index, f"{index} cannot be read")
    digest = hashlib.blake2b(
        json.dumps({k: v[:2] if isinstance(v, list) else v for k, v in told.items()}).encode(), digest_size=12
    )
    beside = {part.name for part in folder.iterdir() if (part / "config.json").exists()}
    parts = [(name, part_of(folder, told, name)) for name in sorted({*told, *beside})]
    files = [
        (f"{name}/{path.name}", path) for name, part in parts if part.is_dir() for path in part.iterdir() if path.is_file()
    ]
    for name, path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED))
            if size > SAMPLED:
                file.seek(max(SAMPLED, size - SAMPLED))
                digest.update(file.read(SAMPLED))
    return digest.hexdigest()


def known_identity(record: ModelRecord) -> str | None:
    """`identity` of the model's files, or None while they are not on this disk."""
    folder = local_folder(record)
    return identity(folder) if folder else None


def resolve(record: ModelRecord, settings: Settings, scheduler: str | None) -> Look:
    """Every choice a request leaves open, made by the model."""
    picked = {
        name: getattr(settings, name) if getattr(settings, name) is not None else getattr(record, name)
        for name in ("height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale", "aesthetic_score")
    }
    return Look(settings.negative_prompt, settings.seed, scheduler=scheduler or "default", **picked)


def unscored(record: ModelRecord, look: Look) -> str:
    """Why a request's aesthetic score says nothing to the model; empty if it does, or there is none."""
    wrong = look.aesthetic_score is not None and record.aesthetic_score is None
    return f"{record.name} has no aesthetic score; leave out aesthetic_score" if wrong else ""


def noise_levels(backbone: Backbone, look: Look, steps: int) -> list[float]:
    """Sigmas before each of `steps` steps with the look's solver, without the last 0."""
    scheduler = backbone.schedule(replace(look, num_inference_steps=steps))
    return [float(sigma) for sigma in scheduler.sigmas][:steps]


def load(record: ModelRecord, placement: Placement) -> Backbone:
    """Load a model, downloading it first if it is a hub id that is not on disk.

    Raises:
        ChaiError: files missing or broken, hub unreachable, or a placement this machine cannot do.
    """
    folder = local_folder(record)
    if folder is None:
        return opened(record, download(record), placement)
    try:
        return opened(record, folder, placement)
    except Incomplete:
        if Path(record.source).expanduser().is_dir():
            raise
        return opened(record, download(record), placement)  # an earlier download did not get to its end


def opened(record: ModelRecord, folder: Path, placement: Placement) -> Backbone:
    family = FAMILIES[record_of_folder(record.name, folder).family]
    made: Backbone = family.load(family.backbone)(record, folder, placement)
    return made


def read_files(record: ModelRecord, placement: Placement) -> ModelFiles | None:
    """What can be told of a model before it is loaded; None while it is not on this disk.

    Raises:
        ChaiError: files missing or broken, or a placement this machine cannot do.
    """
    folder = local_folder(record)
    if folder is None:
        return None
    family = FAMILIES[record_of_folder(record.name, folder).family]
    made: ModelFiles = family.load(family.files).read(record, folder, placement)
    return made


def download(record: ModelRecord) -> Path:
    from huggingface_hub import snapshot_download

    wanted, asked = ["*.json", "*.safetensors", "*.model", "*.txt"], record.source
    try:
        if not record.parts:
            return Path(snapshot_download(record.source, allow_patterns=wanted))
        folders = {}
        for part, source in record.parts.items():
            repository, inside = hub_place(source)
            asked = repository
            only = [f"{inside}/{pattern}".lstrip("/") for pattern in [*wanted, *(["*.bin"] if part == "text_encoder" else [])]]
            folders[part] = Path(snapshot_download(repository, allow_patterns=only)) / inside
        return assembled(record, folders)
    except ChaiError:
        raise
    except Exception as error:  # the hub client raises dozens of kinds; all mean the same here
        kind = type(error).__name__
        why = "the hub cannot be reached" if kind == "LocalEntryNotFoundError" else kind
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        what = "the connection" if record.name in RECORDS else "the name and the connection"
        raise ChaiError(f"cannot download {asked}: {why}{offline}. Check {what}, or give --model a folder") from None
