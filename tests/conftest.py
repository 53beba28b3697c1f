"""Models that the tests share: tiny random ones of the real classes, and the embedded one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from chai_cli.app import app
from chai_cli.backbones.base import Backbone, ModelRecord, Placement, find_record, load
from chai_cli.errors import ChaiError
from tests.contracts.families import FAMILIES

DENSE = ("--method", "dense")
SMALL = ("--height", "64", "--width", "64", "--num-frames", "9", "--steps", "2")


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the cache of whoever runs it, or the hub."""
    monkeypatch.setenv("CHAI_CACHE", str(tmp_path / "default-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Wan saved to disk as real weights are."""
    folder = tmp_path_factory.mktemp("models") / "tiny-wan"
    FAMILIES["wan"].make(folder)
    return folder


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRecord, Backbone]:
    """Each family as a tiny random model, loaded the way chai loads any folder."""
    folder = tmp_path_factory.mktemp("family") / request.param
    FAMILIES[request.param].make(folder)
    record = find_record(str(folder))
    return record, load(record, Placement(device="cpu"))


@pytest.fixture(scope="session")
def embedded() -> Backbone:
    return load(find_record("embedded"), Placement(device="cpu"))


@pytest.fixture
def chai() -> Callable[..., Result]:
    """Runs a command in this process. Errors for the user become exit code 2 and a line on stderr, as in `main`."""

    def run(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
        if isinstance(result.exception, ChaiError):
            result.exit_code = 2
            result.stderr_bytes = (result.stderr_bytes or b"") + f"chai: {result.exception}".encode()
        elif result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def gen(chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Result]]:
    """`chai gen` on the tiny model into `tmp_path/out`, dense unless told otherwise: a list of prompt lines, or a file."""

    def run(prompts: list[str] | Path, *options: str) -> Result:
        if isinstance(prompts, list):
            file = tmp_path / "prompts.txt"
            file.write_text("\n".join(prompts), "utf-8")
        else:
            file = prompts
        return chai("gen", file, "--out", tmp_path / "out", "--model", tiny_folder, *SMALL, *DENSE, *options)

    return run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "report.jsonl").read_text().splitlines()]


def videos_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.mp4"))
