"""Rows and clips for the gallery's tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from chai_cli.report import Row
from chai_cli.video import write_mp4

REUSE = {
    "correction": {"fast_steps": 4, "lean": 1.4, "least": 8, "most": 64, "strength": 1.0, "guess": 0.8, "openings": 256},
    "chai": {
        "fast_steps": 8,
        "match": "index",
        "steps": [2, 3, 4],
        "blocks": [1],
        "mode": "replace",
        "sides": "both",
        "donors": 1,
    },
    "nirvana": {"fast_steps": 6, "source": "clean", "start_sigma": 0.9},
    "dense": {},
}
HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'> a ball",
    "</script><script>window.pwned = 3</script><!-- <script>",
    "{{ 7 * 7 }} ${7 * 7} \u2028\u2029 \x00\x1b[31m & &amp; \" ' ` javascript:alert(1)",
    "كرة حمراء تقفز على الثلج \u202e gnp.exe \u202d",
    "👩‍👩‍👧‍👦 🎈 " * 40,
    "long " * 2000,
    "\ud800 half a letter",
    "a" * 500,
)


def row(index: int = 1, prompt: str = "a red ball on a snowy field", **given: Any) -> dict[str, Any]:
    """A row as chai writes it: a miss of the correction, unless told otherwise."""
    method = given.get("method", "correction")
    file = given.get("file", f"{index:04d}-a-video.mp4")
    request = {
        "prompt": prompt,
        "negative_prompt": "",
        "seed": 0,
        "height": 64,
        "width": 64,
        "num_frames": 17,
        "fps": 8,
        "num_inference_steps": 30,
        "guidance_scale": 4.0,
        "scheduler": "default",
        "model": "embedded",
        "weights": "0d70b0dfa1d20aacdfe2eb82",
        "method": method,
        "reuse": REUSE[method],
        "dtype": None,
        "lora": [],
        "scale": 4,
        "metadata": True,
    }
    base = {
        "id": file.removesuffix(".mp4"),
        "status": "done",
        "file": file,
        "bytes": 4000,
        "reuse": "miss",
        "why": "no render of this model is in the cache yet",
        "seed": 0,
        "height": 64,
        "width": 64,
        "num_frames": 17,
        "fps": 8,
        "steps": 30,
        "model_calls": 60,
        "method": method,
        "model": "embedded",
        "seconds": {"text": 0.02, "retrieval": 0.03, "denoise": 5.1, "decode": 0.71, "write": 0.2, "store": 0.04, "total": 6.1},
        "peak_memory_mib": 1102.1,
        "request": request,
        "versions": {"chai-cli": "0.1.0", "torch": "2.14.1"},
    }
    return asdict(Row(index=index, prompt=prompt, **(base | given)))


def hit(index: int = 2, prompt: str = "a red ball in a forest", **given: Any) -> dict[str, Any]:
    """A hit of Cache Attention on `row()`."""
    base = {
        "method": "chai",
        "reuse": "hit",
        "why": "shares 'red ball'",
        "donor": "18ed18c80a33afba",
        "donor_prompt": "a red ball on a snowy field",
        "similarity": 0.64,
        "shared": [{"entity": "red ball", "donor_entity": "red ball", "similarity": 0.99}],
        "steps": 8,
        "model_calls": 16,
        "calls_saved": 44,
        "seconds_saved": 3.7,
        "seconds": {"text": 0.02, "retrieval": 0.05, "denoise": 1.4, "decode": 0.72, "write": 0.2, "store": 0.01, "total": 2.4},
    }
    return row(index, prompt, **(base | given))


def failure(index: int = 3, prompt: str = "a blue star", **given: Any) -> dict[str, Any]:
    base = {"status": "failed", "reuse": "none", "why": "out of memory at 64x64", "steps": 0, "model_calls": 0, "seconds": {}}
    return row(index, prompt, **(base | given))


def clip(path: Path, number: int = 1, frames: int = 9, fps: int = 8, size: int = 64) -> Path:
    """A square that moves over a ground of a colour of its own."""
    drawn = np.random.default_rng(number)
    shown = np.empty((frames, size, size, 3), np.uint8)
    shown[:] = drawn.integers(40, 220, 3)
    colour, y, side = drawn.integers(0, 255, 3), int(drawn.integers(0, size * 2 // 3)), size // 4
    for frame in range(frames):
        x = frame * (size - side) // max(1, frames - 1)
        shown[frame, y : y + side, x : x + side] = colour
    write_mp4(shown, path, fps, 256 // size, None)
    return path


def write_rows(folder: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
    return folder
