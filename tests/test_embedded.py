"""The bundled model, as shipped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from typer.testing import Result

from chai_cli.backbones.base import Backbone, Placement, find_record, load, resolve
from chai_cli.embedded.captions import full_caption
from chai_cli.embedded.evaluate import WEIGHTS, accuracy, asked, sample
from chai_cli.embedded.judge import Judge
from chai_cli.embedded.paint import paint
from chai_cli.embedded.world import Scene, scenes
from chai_cli.prompts import Settings
from chai_cli.video import read_frames
from tests.conftest import rows_of

OPENSORA = WEIGHTS.parent / "opensora"


@pytest.mark.parametrize(("folder", "most"), [(WEIGHTS, 25e6), (OPENSORA, 12e6)])
def test_the_weights_are_small_and_safe(folder: Path, most: float) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) <= most
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


def test_the_model_loads_and_renders_without_chai(tmp_path: Path) -> None:
    code = f"""
import sys, torch
from diffusers import WanPipeline
pipe = WanPipeline.from_pretrained({str(WEIGHTS)!r}, dtype=torch.float32)
frames = pipe("a large red ball bounces on a snowy field", height=64, width=64, num_frames=17, num_inference_steps=2,
              guidance_scale=4.0, max_sequence_length=64).frames
print(frames.shape, "chai_cli" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert out.splitlines()[-1] == "(1, 17, 64, 64, 3) False"


def test_a_bundled_model_is_known_by_its_folder_too() -> None:
    assert find_record(str(WEIGHTS)) == find_record("embedded")
    assert find_record(str(OPENSORA)).name == "embedded-opensora"


def test_the_judge_reads_true_clips() -> None:
    shown: list[Scene] = [next(scenes(seed, held=True)) for seed in range(500, 564)]
    readings = Judge.load(WEIGHTS / "judge").read(np.stack([paint(scene) for scene in shown]))
    found = accuracy(reading.right(scene) for reading, scene in zip(readings, shown, strict=True))
    assert found["all"] >= 0.9, found


def test_open_clip_loads_the_bundled_clip_and_matches_words_to_frames() -> None:
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{WEIGHTS / 'clip'}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{WEIGHTS / 'clip'}")
    from PIL import Image

    shown = [next(scenes(seed, things=1)) for seed in range(600, 632)]
    with torch.no_grad():
        frames = torch.stack([preprocess(Image.fromarray(paint(scene)[8])) for scene in shown])  # type: ignore[operator]
        image = model.encode_image(frames, normalize=True)
        text = model.encode_text(tokenizer([full_caption(scene) for scene in shown]), normalize=True)
    assert ((image @ text.T).argmax(1) == torch.arange(32)).float().mean() >= 0.7


@pytest.mark.parametrize(
    ("model", "floors"),
    [
        ("embedded", {"background": 0.85, "colour": 0.7, "shape": 0.5, "motion": 0.6}),
        ("embedded-opensora", {"background": 0.85, "colour": 0.6, "shape": 0.35, "motion": 0.4}),
    ],
)
def test_fidelity_on_24_fixed_prompts(model: str, floors: dict[str, float]) -> None:
    """A floor well under what the model does (see embedded/README.md), well over chance."""
    backbone = load(find_record(model), Placement(device="cpu"))
    prompts = asked("single", 24)
    look = resolve(backbone.record, Settings(num_inference_steps=16), "unipc")
    clips = sample(backbone, [text for text, _, _ in prompts], list(range(24)), look)
    readings = Judge.load(WEIGHTS / "judge").read(clips)
    found = accuracy(reading.right(scene) for reading, (_, scene, _) in zip(readings, prompts, strict=True))
    assert all(found[name] >= floor for name, floor in floors.items()), found


@pytest.mark.parametrize("model", ["embedded", "embedded-opensora"])
def test_gen_on_a_bundled_model(model: str, tmp_path: Path) -> None:
    """Its own process: memory under 2 GB, a few seconds a clip, unknown words named once on stderr and in the row."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("a large red ball bounces on a snowy field\na Dragon flies over a red dragon\n")
    command = [sys.executable, "-m", "chai_cli", "gen", str(prompts), "--out", str(tmp_path / "out"), "--model", model]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    rows = rows_of(tmp_path / "out")
    assert max(row["peak_memory_mib"] for row in rows) < 2000
    assert [row["unknown_words"] for row in rows] == [[], ["dragon", "flies"]]
    assert process.stderr.count("dragon (prompt 2)") == 1
    assert read_frames(tmp_path / "out" / rows[0]["file"]).shape == (17, 256, 256, 3)
    clip = read_frames(tmp_path / "out" / rows[0]["file"]).reshape(17, 64, 4, 64, 4, 3).mean((2, 4)).round().astype(np.uint8)
    assert Judge.load(WEIGHTS / "judge").read(clip[None])[0].background == "snow"


def test_the_readme_samples_have_no_bad_lines(chai: Callable[..., Result], tmp_path: Path) -> None:
    for sample_file in sorted((Path(__file__).parents[1] / "samples").glob("prompts.*")):
        result = chai("gen", sample_file, "--out", tmp_path / "out", "--dry-run")
        assert result.exit_code == 0, result.output


def test_configs_hold_no_paths_of_the_training_machine() -> None:
    for path in (*WEIGHTS.rglob("*.json"), *OPENSORA.rglob("*.json")):
        assert "_name_or_path" not in json.loads(path.read_text()), path


@pytest.mark.parametrize("steps", [1, 2])
def test_few_steps_work(embedded: Backbone, steps: int) -> None:
    for scheduler in ("euler", "unipc"):
        look = resolve(embedded.record, Settings(num_inference_steps=steps), scheduler)
        assert sample(embedded, ["a red ball"], [0], look).shape == (1, 17, 64, 64, 3)
