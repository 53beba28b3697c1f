"""The gallery's page: what is in it, and that writing it costs nothing else."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shlex
import threading
import time
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chai_cli.commands.report import report
from chai_cli.commands.show import command
from chai_cli.errors import ChaiError
from chai_cli.gallery import Gallery, build
from chai_cli.gallery.page import card, digest, in_order, place, span, totals
from chai_cli.report import Row, gains
from chai_cli.video import write_mp4
from tests.gallery.rows import HOSTILE, REUSE, clip, failure, hit, row, write_rows


class Parsed(HTMLParser):
    """Tags, attributes and the texts of scripts and styles of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.source = path.read_text("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self.inside = f"{tag}#{found.get('id') or ''}" if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data

    @property
    def cards(self) -> list[dict[str, Any]]:
        return json.loads(self.texts["script#data"], parse_constant=pytest.fail)["cards"]


def shown(folder: Path) -> list[dict[str, Any]]:
    return Parsed(folder / "index.html").cards


def keys(folder: Path) -> list[str]:
    return [one["key"] for one in shown(folder)]


def test_the_last_row_of_a_file_is_shown_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    rows = [row(2, file="b.mp4"), row(1, "first", file="a.mp4"), row(3, file="c.mp4"), row(1, "second", file="a.mp4")]
    build(write_rows(tmp_path, [*rows, row(9, file="b.mp4")]))
    assert [(one["key"], one["index"]) for one in shown(tmp_path)] == [("a.mp4", 1), ("c.mp4", 3), ("b.mp4", 9)]
    assert shown(tmp_path)[0]["prompt"] == "second"


def test_a_failure_keeps_its_place_and_goes_once_it_is_mended(tmp_path: Path) -> None:
    bad = failure(2, '{"prompt":', file="", id="line-7", why="line 7: not JSON")
    build(write_rows(tmp_path, [row(1), failure(3), bad]))
    assert [(one["index"], one["kind"], one["video"]) for one in shown(tmp_path)] == [
        (1, "miss", False),
        (2, "failed", False),
        (3, "failed", False),
    ]
    build(write_rows(tmp_path, [row(1), failure(3), bad, hit(2), row(3)]))
    assert [one["kind"] for one in shown(tmp_path)] == ["miss", "hit", "miss"]


def test_a_skipped_row_leaves_what_is_known_of_its_video() -> None:
    cards: dict[str, Any] = {}
    for one in (
        hit(4, file="a.mp4"),
        row(7, file="a.mp4", status="skipped", reuse="none"),
        row(2, file="b.mp4", status="skipped"),
    ):
        place(cards, one)
    assert [(one["key"], one["index"], one["kind"]) for one in in_order(cards.values())] == [
        ("b.mp4", 2, "skipped"),
        ("a.mp4", 7, "hit"),
    ]


def test_totals_are_those_of_the_report() -> None:
    rows = [row(1), row(2, seconds={"total": 4.0}), hit(3), hit(4, seconds={"total": 1.0}), failure(5)]
    found = totals([card(one) for one in rows])  # type: ignore[misc]
    line = gains(Row(**one) for one in rows)
    assert line.startswith(f"{found['hits']} of {found['looked']} hits")
    assert f"{found['on_hits']:.1f}x on hits, {found['overall']:.1f}x overall" in line
    assert f"{found['calls_saved']} model calls and {found['seconds_saved']:.1f} s saved" in line
    assert (found["videos"], found["failed"]) == (4, 1)


def test_an_empty_report_is_an_empty_page(tmp_path: Path) -> None:
    assert build(write_rows(tmp_path, [])) == tmp_path / "index.html"
    assert shown(tmp_path) == []


def test_hostile_prompts_are_data_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "<b onclick=x>'\"&amp;"
    rows = [hit(i, words, donor_prompt=words, why=words, not_stored=words, model=words) for i, words in enumerate(HOSTILE)]
    parsed = Parsed(build(write_rows(folder, rows)))
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("script") == 2
    assert tags.count("style") == 1
    assert not {"img", "b"} & set(tags)
    assert not [name for _, found in parsed.tags for name in found if name.startswith("on") or name == "style"]
    assert parsed.texts["script#data"].isascii()
    assert not set("<>&") & set(parsed.texts["script#data"])
    assert [one["prompt"] for one in parsed.cards] == [words.replace("\ud800", "?") for words in HOSTILE]


def test_the_policy_lets_only_the_page_s_own_script_and_style_pass(tmp_path: Path) -> None:
    parsed = Parsed(build(write_rows(tmp_path, [row()])))
    policy = next(found["content"] for tag, found in parsed.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    told = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert told["default-src"] == "'none'"
    assert told["script-src"] == f"'{digest(parsed.texts['script#'])}'"
    assert told["style-src"] == f"'{digest(parsed.texts['style#'])}'"
    assert told["img-src"] == told["media-src"] == "'self'"


def test_torn_and_foreign_lines_are_left_out_or_shown_as_far_as_they_go(tmp_path: Path) -> None:
    odd: list[Any] = [
        {"file": "a.mp4"},
        {"file": "b.mp4", "seconds": None, "shared": [1, {}, {"entity": 3}], "request": [], "index": "x", "status": 5},
        {
            "file": "c.mp4",
            "seconds": {"total": "1", "denoise": math.nan},
            "request": {"prompt": 3, "num_inference_steps": 10**400},
        },
        {"file": "d.mp4", "index": math.inf, "seconds_saved": -math.inf, "reuse": "hit", "similarity": [], "seed": 2**70},
        {"file": "", "prompt": "no name at all"},
        [],
        7,
    ]
    with write_rows(tmp_path, [row(1), *odd]).joinpath("report.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"file": "z.mp4", "prom')
    build(tmp_path)
    assert keys(tmp_path) == ["0001-a-video.mp4", "a.mp4", "b.mp4", "c.mp4", "d.mp4"]
    assert ["seed", str(2**70)] in shown(tmp_path)[-1]["settings"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {"file": st.just("a.mp4")}, optional={one.name: anything for one in fields(Row) if one.name != "file"}
    )
)
def test_no_row_whatever_is_in_it_stops_the_page(tmp_path: Path, odd: dict[str, Any]) -> None:
    build(write_rows(tmp_path, [hit(1), odd]))
    assert len(shown(tmp_path)) == 2


@pytest.mark.parametrize("name", ["../a.mp4", "/etc/passwd", "a\\b.mp4", ".chai", "a\x00.mp4", "x" * 300, "\ud800.mp4"])
def test_only_files_of_the_folder_are_linked(tmp_path: Path, name: str) -> None:
    build(write_rows(tmp_path, [hit(1, file=name, id="one", donor=name)]))
    (one,) = shown(tmp_path)
    assert (one["file"], one["key"], one["donor"], one["video"]) == ("", "one", "", False)


def runs(one: dict[str, Any]) -> list[list[Any]]:
    found = card(one)
    assert found is not None
    return found["steps"]


def test_the_bar_of_steps_says_what_each_method_does() -> None:
    assert runs(row()) == [["plain", 30]]
    assert runs(hit()) == [["plain", 1], ["attended", 3], ["plain", 4], ["skipped", 22]]
    assert runs(hit(method="nirvana", steps=4)) == [["skipped", 2], ["plain", 4], ["skipped", 24]]
    places = [0, 4, 11, 20]
    told = [kind for kind, count in runs(hit(method="correction", steps=4)) for _ in range(count)]
    assert [step for step, kind in enumerate(told) if kind == "corrected"] == places
    assert len(told) == 30


def test_the_bar_of_steps_of_two_methods_counts_in_the_schedule_they_share() -> None:
    one = hit(steps=4)
    one["method"] = "nirvana+chai"
    one["request"]["reuse"] = {"first": REUSE["nirvana"], "second": REUSE["chai"]}
    assert runs(one) == [["skipped", 2], ["attended", 2], ["plain", 2], ["skipped", 24]]


def test_nothing_sampled_means_no_bar() -> None:
    assert runs(row(steps=0)) == []
    assert runs(failure()) == []


def test_the_command_is_that_of_chai_show() -> None:
    found, one = card(hit()), hit()
    assert found is not None
    assert found["command"] == command(one["request"])
    assert card({"file": "a.mp4", "request": {}})["command"] == ""  # type: ignore[index]


def test_a_command_that_would_press_keys_of_a_terminal_is_not_offered() -> None:
    one = hit()
    one["request"]["negative_prompt"] = "blurry\x03\necho pwned\n"
    assert card(one)["command"] == ""  # type: ignore[index]
    one["request"]["negative_prompt"] = "blurry\necho pwned\n"
    assert shlex.split(card(one)["command"])[-1]  # type: ignore[index]


def test_a_donor_that_is_a_video_of_the_folder_is_linked_and_others_have_their_picture(tmp_path: Path) -> None:
    rows = [row(1), hit(2), hit(3, donor="other", donor_prompt="unknown here"), hit(4, donor="none", donor_prompt="nor this")]
    write_rows(tmp_path, rows)
    clip(tmp_path / "0001-a-video.mp4")
    (tmp_path / "posters").mkdir()
    (tmp_path / "posters" / "donor-other.jpg").write_bytes(b"jpg")
    build(tmp_path)
    assert [(one["source"], one["picture"]) for one in shown(tmp_path)] == [
        ("", ""),
        ("0001-a-video.mp4", ""),
        ("", "donor-other.jpg"),
        ("", ""),
    ]


def test_a_poster_is_the_middle_frame_and_made_once(tmp_path: Path) -> None:
    from PIL import Image

    folder = write_rows(tmp_path, [row(1, file="a.mp4"), row(2, file="broken.mp4"), row(3, file="gone.mp4")])
    shades = np.zeros((9, 64, 64, 3), np.uint8) + np.arange(9, dtype=np.uint8)[:, None, None, None] * 28
    write_mp4(shades, folder / "a.mp4", 8, 4, None)
    (folder / "broken.mp4").write_bytes(b"no video")
    build(folder)
    poster = folder / "posters" / "a.jpg"
    assert os.listdir(folder / "posters") == ["a.jpg"]
    assert os.listdir(folder / ".chai") == []
    assert Image.open(poster).convert("L").getpixel((100, 100)) == pytest.approx(4 * 28, abs=6)
    assert [(one["video"], one["poster"]) for one in shown(folder)] == [(True, True), (True, False), (False, False)]
    made = poster.stat().st_mtime_ns
    build(folder)
    assert poster.stat().st_mtime_ns == made
    write_mp4(shades[::-1] // 2, folder / "a.mp4", 8, 4, None)
    os.utime(folder / "a.mp4", ns=(made + 1, made + 1))
    build(folder)
    assert Image.open(poster).convert("L").getpixel((100, 100)) == pytest.approx(2 * 28, abs=6)


def test_a_page_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_rows(tmp_path, [row(1)])
    before = build(folder).read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_rows(folder, [row(1), row(2)])
    monkeypatch.setattr("chai_cli.gallery.page.os.replace", full)
    with pytest.raises(ChaiError, match=r"cannot write .*index\.html: No space left"):
        build(folder)
    assert (folder / "index.html").read_bytes() == before
    assert os.listdir(folder / ".chai") == []


def test_a_reader_never_sees_half_a_page(tmp_path: Path) -> None:
    gallery = Gallery(tmp_path, pause=0.0)
    gallery.add(row(1))
    gallery.refresh()
    stop, seen = threading.Event(), set()

    def read() -> None:
        while not stop.is_set():
            seen.add((tmp_path / "index.html").read_text("utf-8").endswith("</html>"))

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(2, 30):
        gallery.add(row(index, "x" * 5000))
        time.sleep(0.01)
    gallery.close()
    stop.set()
    reader.join()
    assert seen == {True}
    assert len(shown(tmp_path)) == 29


def page_holds(folder: Path, words: str) -> bool:
    """Whether the page comes to hold these words within some seconds."""
    page, end = folder / "index.html", time.monotonic() + 20
    while not (page.exists() and words in page.read_text("utf-8")):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    written: list[float] = []
    replace = os.replace

    def counted(source: Path, target: Path) -> None:
        written.append(time.monotonic())
        replace(source, target)

    monkeypatch.setattr("chai_cli.gallery.page.os.replace", counted)
    return written


def test_a_page_is_written_at_most_once_a_second_and_the_last_row_is_there_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = count_writes(monkeypatch)
    gallery = Gallery(tmp_path)
    for index in range(60):
        gallery.add(row(index))
        time.sleep(0.025)
    end = time.monotonic() + 20
    while len(shown(tmp_path)) < 60:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert len(written) >= 2
    assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(written))
    gallery.close()


def test_a_run_shows_at_once_that_it_goes_on_and_how_far_it_is(tmp_path: Path) -> None:
    gallery = Gallery(tmp_path, 12, pause=0)
    gallery.open()
    assert page_holds(tmp_path, "still rendering")
    gallery.add(row(1))
    assert page_holds(tmp_path, "<dd>1 <small>of 12</small>")
    gallery.close()
    told = (tmp_path / "index.html").read_text()
    assert "still rendering" not in told
    assert "<dd>1</dd>" in told


def test_closing_writes_the_last_state_at_once(tmp_path: Path) -> None:
    gallery = Gallery(tmp_path, pause=60)
    for index in range(5):
        gallery.add(row(index))
    gallery.close()
    assert len(shown(tmp_path)) == 5
    gallery.add(row(9))
    time.sleep(0.1)
    assert len(shown(tmp_path)) == 5


def test_a_run_that_goes_on_shows_the_rows_of_the_earlier_one(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(1), row(2)])
    gallery = Gallery(tmp_path)
    clip(tmp_path / "0003-a-video.mp4")
    gallery.add(row(3))
    gallery.close()
    assert keys(tmp_path) == ["0001-a-video.mp4", "0002-a-video.mp4", "0003-a-video.mp4"]
    assert [one["poster"] for one in shown(tmp_path)] == [False, False, True]
    live = shown(tmp_path)
    write_rows(tmp_path, [row(1), row(2), row(3)])
    build(tmp_path)
    assert shown(tmp_path) == live


def test_a_folder_that_cannot_be_written_is_told_about_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "index.html").mkdir()
    gallery = Gallery(tmp_path)
    gallery.add(row(1))
    gallery.close()
    assert gallery.trouble.startswith(f"cannot write {tmp_path / 'index.html'}: ")
    (tmp_path / "index.html").rmdir()
    gallery.close()
    assert gallery.trouble == ""
    assert len(shown(tmp_path)) == 1


@pytest.mark.parametrize("odd", [None, [], "row", {"file": 3}])
def test_what_is_no_row_is_not_shown_and_raises_nothing(tmp_path: Path, odd: Any) -> None:
    gallery = Gallery(tmp_path)
    gallery.add(odd)
    gallery.add(row(1))
    gallery.close()
    assert keys(tmp_path) == ["0001-a-video.mp4"]


def test_a_run_that_came_to_nothing_leaves_no_page(tmp_path: Path) -> None:
    Gallery(tmp_path).close()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_gone_is_told_about(tmp_path: Path) -> None:
    gallery = Gallery(tmp_path / "gone")
    gallery.add(row(1))
    gallery.close()
    assert gallery.trouble.startswith("cannot write")


def test_somebody_else_s_page_stays(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>My own site</h1>")
    gallery = Gallery(tmp_path)
    gallery.add(row(1))
    gallery.close()
    assert "is not one that chai wrote; move it away" in gallery.trouble
    with pytest.raises(ChaiError, match="move it away"):
        build(write_rows(tmp_path, [row(1)]))
    assert (tmp_path / "index.html").read_text() == "<h1>My own site</h1>"


def test_the_command_prints_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(write_rows(tmp_path, [row(1)]))
    assert capsys.readouterr().out == f"{tmp_path / 'index.html'}\n"


def test_a_folder_without_a_report_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ChaiError, match=r"^there is no .*report\.jsonl; name a folder that chai gen wrote its videos to$"):
        report(tmp_path)
    assert not (tmp_path / "index.html").exists()


def test_times_are_said_as_people_say_them() -> None:
    assert [span(value) for value in (0.04, 599, 1800, 9000)] == ["0.0 s", "599.0 s", "30 min", "2.5 h"]
