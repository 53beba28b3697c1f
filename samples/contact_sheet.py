"""A picture of a folder of videos, some frames of each in a row: python samples/contact_sheet.py videos sheet.png"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from chai_cli.video import read_frames

FRAMES, SIDE, GAP, CAPTION, COLUMNS = 5, 96, 4, 16, 2


def sheet(folder: Path) -> Image.Image:
    rows = [json.loads(line) for line in (folder / "report.jsonl").read_text().splitlines()]
    prompts = {row["file"]: row["prompt"] for row in rows if row["status"] == "done"}
    files = sorted(path for path in folder.glob("*.mp4"))
    height = SIDE + CAPTION + GAP
    wide = FRAMES * (SIDE + 2) + 2 * GAP
    picture = Image.new("RGB", (COLUMNS * wide, -(-len(files) // COLUMNS) * height), "white")
    draw = ImageDraw.Draw(picture)
    for i, path in enumerate(files):
        left, top = (i % COLUMNS) * wide + GAP, (i // COLUMNS) * height
        draw.text((left, top + 2), prompts.get(path.name, path.stem), fill="black")
        frames = read_frames(path)
        for j, t in enumerate(np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)):
            tile = Image.fromarray(frames[t]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            picture.paste(tile, (left + j * (SIDE + 2), top + CAPTION))
    return picture


if __name__ == "__main__":
    sheet(Path(sys.argv[1])).save(sys.argv[2])
