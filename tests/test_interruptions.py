"""Runs that are killed or interrupted leave nothing half done, and go on where they stopped."""

from __future__ import annotations

import multiprocessing
import random
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import chai_cli.backbones.wan  # noqa: F401 (loaded here, so that forks need not)
from chai_cli.backbones.base import find_record
from chai_cli.report import read_rows
from chai_cli.video import read_frames
from store.care import verify
from tests.conftest import DENSE, SMALL, videos_of

PROMPTS = [f"prompt number {i}" for i in range(12)]
KILLS = 20


def start(tiny_folder: Path, prompts: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "chai_cli",
        "gen",
        str(prompts),
        "--out",
        str(out),
        "--model",
        str(tiny_folder),
        *SMALL,
        *DENSE,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def write_prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


def wait_for_first_video(process: subprocess.Popen[bytes], out: Path, seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not videos_of(out) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.02)


def test_killed_runs_leave_no_torn_video_and_resume_to_the_same_files(tiny_folder: Path, tmp_path: Path) -> None:
    """20 kills at random moments after the model is loaded: children that load once and are killed while they render."""
    prompts = write_prompts(tmp_path)
    whole = tmp_path / "whole"
    began = time.monotonic()
    child = fork_gen(tiny_folder, prompts, whole)
    child.join(240)
    life = time.monotonic() - began
    expected = {name: (whole / name).read_bytes() for name in videos_of(whole)}
    assert len(expected) == len(PROMPTS)
    chance = random.Random(0)
    rendered = []
    for kill in range(KILLS):
        out = tmp_path / f"killed{kill}"
        child = fork_gen(tiny_folder, prompts, out)
        time.sleep(chance.uniform(0.1, 1.0) * life)
        child.kill()
        child.join()
        for name in videos_of(out):
            assert (out / name).read_bytes() == expected[name]
        finished = [row["file"] for row in read_rows(out / "report.jsonl")]
        assert set(finished) <= set(videos_of(out))
        rendered.append(len(finished))
    assert max(rendered) > 0, "every run was killed before its first video"
    assert min(rendered) < len(PROMPTS), "no run was killed while it rendered"
    last = tmp_path / f"killed{KILLS - 1}"
    assert start(tiny_folder, prompts, last).wait(240) == 0
    assert {name: (last / name).read_bytes() for name in videos_of(last)} == expected
    assert sorted(path.name for path in (last / ".chai").iterdir()) in (["run.log"], ["lock", "run.log"])


def fork_gen(tiny_folder: Path, prompts: Path, out: Path, *options: str) -> BaseProcess:
    """A run in a fork of this process, which has the libraries loaded already: most of its life is rendering."""
    child = multiprocessing.get_context("fork").Process(target=run_gen, args=(tiny_folder, prompts, out, *options))
    child.start()
    return child


def run_gen(tiny_folder: Path, prompts: Path, out: Path, *options: str) -> None:
    import torch

    from chai_cli.app import app

    torch.set_num_threads(1)
    app(["gen", str(prompts), "--out", str(out), "--model", str(tiny_folder), "--quiet", *SMALL, *(options or DENSE)])


@pytest.mark.parametrize("method", ["chai:steps=1,fast-steps=1", "correction:fast-steps=1,least=2"])
def test_killed_runs_leave_a_whole_cache_and_the_next_run_goes_on(tiny_folder: Path, tmp_path: Path, method: str) -> None:
    prompts, out = write_prompts(tmp_path), tmp_path / "out"
    cache = (
        "--cache",
        str(tmp_path / "cache"),
        "--embedder",
        find_record("embedded").embedder,
        "--method",
        method,
    )
    began = time.monotonic()
    fork_gen(tiny_folder, prompts, tmp_path / "whole", *cache).join(240)
    life = time.monotonic() - began
    chance = random.Random(1)
    for _ in range(5):
        child = fork_gen(tiny_folder, prompts, out, *cache, "--overwrite")
        time.sleep(chance.uniform(0.2, 1.0) * life)
        child.kill()
        child.join()
        findings = verify(tmp_path / "cache")
        assert findings.sound
        assert findings.entries > 0
        assert all(len(read_frames(out / name)) == 9 for name in videos_of(out))
    child = fork_gen(tiny_folder, prompts, out, *cache)
    child.join(240)
    assert child.exitcode == 0
    assert len(videos_of(out)) == len(PROMPTS)


def test_ctrl_c_keeps_the_rows_and_exits_with_130(tiny_folder: Path, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path), tmp_path / "out"
    process = start(tiny_folder, prompts, out)
    wait_for_first_video(process, out)
    process.send_signal(signal.SIGINT)
    _stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr.decode()
    assert b"Traceback" not in stderr
    assert b"run the same command again to go on" in stderr
    rows = [row["file"] for row in read_rows(out / "report.jsonl")]
    assert 1 <= len(rows) < len(PROMPTS)
    assert rows == videos_of(out)
    assert not list((out / ".chai").glob("*.part*"))
    again = start(tiny_folder, prompts, out)
    assert again.wait(240) == 0
    assert len(videos_of(out)) == len(PROMPTS)
    assert all(len(read_frames(out / name)) == 9 for name in videos_of(out)[:3])


def test_sigterm_is_an_interruption_too(tiny_folder: Path, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path), tmp_path / "out"
    process = start(tiny_folder, prompts, out)
    wait_for_first_video(process, out)
    process.terminate()
    assert process.wait(60) == 130
    assert [row["file"] for row in read_rows(out / "report.jsonl")] == videos_of(out)
