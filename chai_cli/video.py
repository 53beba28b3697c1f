"""Frames into an mp4 that plays everywhere, and what chai wrote into one back out."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chai_cli.errors import ChaiError

if TYPE_CHECKING:
    import numpy as np

VISIBLE = 256  # pixels; smaller clips are enlarged so that a person can see them
CRF = 16
LARGE = 2**18  # pixels of a frame from which ffmpeg takes several threads


def enlargement(height: int, width: int) -> int:
    """The whole factor that brings the shorter side of a small clip to at least 256 pixels."""
    return max(1, -(-VISIBLE // min(height, width)))


def ffmpeg(*arguments: str) -> list[str]:
    import imageio_ffmpeg

    return [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", *arguments]


def ffmetadata(comment: str) -> str:
    """A comment in ffmpeg's metadata format, which knows no length limit (a command line does)."""
    return ";FFMETADATA1\ncomment=" + re.sub(r"([=;#\\\n])", r"\\\1", comment) + "\n"


def write_mp4(frames: np.ndarray, path: Path, fps: int, scale: int, comment: dict[str, Any] | None) -> None:
    """Write a clip: H.264, yuv420p, index first.

    The file appears whole or not at all once this returns, except that `path` may be left torn when the process is
    killed; callers write beside and rename.

    Args:
        frames: uint8 [T, H, W, 3], H and W even.
        path: Ends in `.mp4`.
        fps: Frames a second.
        scale: Whole factor of enlargement, nearest pixel.
        comment: Goes into the file's `comment` as JSON.

    Raises:
        ChaiError: ffmpeg failed (a full disk, most often).
    """
    frames = frames.repeat(scale, 1).repeat(scale, 2)
    height, width = frames.shape[1:3]
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "pipe:0"]
    notes: list[str] = []
    meta = path.with_suffix(".meta")
    if comment is not None:
        meta.write_text(ffmetadata(json.dumps(comment)), encoding="ascii")
        notes = ["-f", "ffmetadata", "-i", str(meta), "-map", "0:v", "-map_metadata", "1"]
    threads = "1" if height * width < LARGE else "4"  # never as many as the machine has: each number makes other bytes
    codec = ["-c:v", "libx264", "-preset", "medium", "-crf", str(CRF), "-pix_fmt", "yuv420p", "-threads", threads]
    tail = ["-fflags", "+bitexact", "-flags:v", "+bitexact", "-movflags", "+faststart", "-y", str(path)]
    try:
        process = subprocess.run(
            ffmpeg(*source, *notes, *codec, *tail), input=frames.tobytes(), capture_output=True, start_new_session=True
        )
    finally:
        meta.unlink(missing_ok=True)
    if process.returncode:
        said = process.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ChaiError(f"could not write {path.name}: {said[-1] if said else 'ffmpeg failed'}")


def read_comment(path: Path) -> dict[str, Any]:
    """What `write_mp4` put into the comment.

    Raises:
        ChaiError: not a video, or not one that chai wrote with metadata.
    """
    if not path.is_file():
        raise ChaiError(f"{path} is a folder; name one of its videos" if path.is_dir() else f"there is no file {path}")
    process = subprocess.run(ffmpeg("-i", str(path), "-f", "ffmetadata", "-"), capture_output=True)
    if process.returncode:
        raise ChaiError(f"{path} is not a video that can be read")
    text = re.sub(r"\\(.)", r"\1", process.stdout.decode("utf-8", "replace"), flags=re.DOTALL)
    for line in text.splitlines():
        if line.startswith("comment="):
            try:
                comment = json.loads(line.removeprefix("comment="))
            except ValueError:
                break
            if isinstance(comment, dict) and "prompt" in comment:
                return comment
    raise ChaiError(f"{path} carries no settings: it was not written by chai, or with --no-metadata")


def holds(path: Path, comment: dict[str, Any]) -> bool:
    """True if a file is a video with exactly this comment that decodes without a complaint."""
    try:
        if read_comment(path) != comment:
            return False
    except ChaiError:
        return False
    process = subprocess.run(ffmpeg("-i", str(path), "-f", "null", "-"), capture_output=True)
    return process.returncode == 0 and not process.stderr


def read_frames(path: Path) -> np.ndarray:
    """All frames of a video, uint8 [T, H, W, 3]."""
    import imageio_ffmpeg
    import numpy as np

    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])
