"""What a run writes beside its videos: the page, pictures of donors, the log; and what it runs at its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from chai_cli.backbones.base import find_record
from chai_cli.backbones.wan import WanBackbone
from chai_cli.errors import ChaiError
from tests.conftest import rows_of

Gen = Callable[..., Result]
RED, RELATED = "a red ball on a snowy field", "a red ball in a forest"


@pytest.fixture
def gen(chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> Gen:
    def run(prompts: list[str], *options: str, out: str = "out") -> Result:
        (tmp_path / "p.txt").write_text("\n".join(prompts))
        size = ("--height", "64", "--width", "64", "--num-frames", "9", "--steps", "4")
        reuse = ("--method", "chai:fast-steps=2,steps=2", "--cache", tmp_path / "cache")
        where = ("--model", tiny_folder, "--embedder", find_record("embedded").embedder, "--out", tmp_path / out)
        return chai("gen", tmp_path / "p.txt", *where, *size, *reuse, *options)

    return run


def cards(folder: Path) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', (folder / "index.html").read_text())
    assert found is not None
    cards: list[dict[str, Any]] = json.loads(found[1])["cards"]
    return cards


def test_a_run_leaves_a_page_with_every_video(gen: Gen, tmp_path: Path) -> None:
    result = gen([RED, RELATED])
    assert f"look at them in {tmp_path / 'out' / 'index.html'}" in result.output.replace("\n", " ")
    shown = cards(tmp_path / "out")
    assert [(one["prompt"], one["kind"], one["poster"]) for one in shown] == [(RED, "miss", True), (RELATED, "hit", True)]
    assert shown[1]["source"] == shown[0]["key"]
    gen([RED, RELATED, "a blue star"])
    assert [one["kind"] for one in cards(tmp_path / "out")] == ["miss", "hit", "miss"]


def test_a_donor_of_another_folder_has_its_picture_from_the_cache(gen: Gen, tmp_path: Path) -> None:
    gen([RED], out="first")
    gen([RELATED], out="second")
    (shown,) = cards(tmp_path / "second")
    assert shown["source"] == ""
    assert (tmp_path / "second" / "posters" / shown["picture"]).read_bytes()[:2] == b"\xff\xd8"


def test_without_a_gallery_there_is_none_until_it_is_asked_for(gen: Gen, chai: Callable[..., Result], tmp_path: Path) -> None:
    result = gen([RED], "--no-gallery")
    assert not (tmp_path / "out" / "index.html").exists()
    assert "index.html" not in result.output
    made = chai("report", tmp_path / "out")
    assert (made.exit_code, made.stdout.replace("\n", "")) == (0, str(tmp_path / "out" / "index.html"))
    assert [one["prompt"] for one in cards(tmp_path / "out")] == [RED]


def test_a_folder_without_a_report_is_one_sentence(chai: Callable[..., Result], tmp_path: Path) -> None:
    result = chai("report", tmp_path)
    assert result.exit_code == 2
    assert "name a folder that chai gen wrote its videos to" in result.stderr


def test_a_page_that_cannot_be_written_costs_no_video(gen: Gen, tmp_path: Path) -> None:
    (tmp_path / "out" / "index.html").mkdir(parents=True)
    result = gen([RED])
    assert result.exit_code == 0
    assert rows_of(tmp_path / "out")[0]["status"] == "done"
    assert "no gallery: cannot write" in result.output


def test_the_log_has_the_run_and_the_traceback_of_a_failure(gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("a tube burst")

    monkeypatch.setattr(WanBackbone, "decode", fail)
    assert gen([RED]).exit_code == 1
    log = (tmp_path / "out" / ".chai" / "run.log").read_text()
    assert "1 to render, 0 already there" in log
    assert "Traceback" in log
    assert "RuntimeError: a tube burst" in log
    assert "ended: 0 done, 0 skipped, 1 failed" in log


def test_notify_is_told_how_the_run_went(gen: Gen, tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    command = f'echo "$CHAI_RUN_EXIT $CHAI_RUN_DONE $CHAI_RUN_FAILED $CHAI_RUN_OUT" > {said}; exit 3'
    result = gen([RED], "--notify", command)
    assert said.read_text() == f"0 1 0 {tmp_path / 'out'}\n"
    assert result.exit_code == 0
    assert "the --notify command ended with exit code 3" in result.output


def test_notify_is_told_of_a_run_that_came_to_nothing(
    gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*given: object) -> None:
        raise ChaiError("the disk is full")

    monkeypatch.setattr("chai_cli.batch.Report.append", fail)
    result = gen([RED], "--notify", 'echo "ended with $CHAI_RUN_EXIT"', "--json")
    assert result.exit_code == 2
    told = capfd.readouterr()
    assert "ended with 2" in told.err
    assert "ended" not in told.out + result.stdout
