"""The gallery's page in a real headless Chromium, opened from the disk as people do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chai_cli.gallery import Gallery, build
from chai_cli.gallery import page as pages
from tests.gallery.chromium import CHROMIUM, DESKTOP, PHONE, READY, Open, until
from tests.gallery.rows import HOSTILE, clip, failure, hit, row, write_rows

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM} (apt-get install chromium)")

FOCUSED = "document.activeElement.querySelector('.number')?.textContent"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three misses, six hits on the first of them, a failure and a plain one; clips for all that did not fail."""
    folder = tmp_path_factory.mktemp("gallery") / "my clips"
    rows = [row(1), row(2, "a blue star in space"), row(3, "a green ring, a green ring")]
    rows += [
        hit(i, f"a red ball in a forest, take {i}", similarity=i / 10, seconds={"denoise": 9.5 - i, "total": 10 - i})
        for i in range(4, 10)
    ]
    rows += [failure(10), row(11, "a plain purple heart", method="dense", reuse="none", why="")]
    write_rows(folder, rows)
    for one in rows:
        if one["status"] == "done":
            clip(folder / one["file"], one["index"])
    build(folder)
    return folder


def numbers(page: Any) -> list[int]:
    return [int(text) for text in page.locator(".card .number").all_text_contents()]


def test_every_video_has_a_card_with_a_poster_and_its_outcome(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    assert page.title() == "my clips – chai"
    assert numbers(page) == list(range(1, 12))
    assert page.locator(".card .badge").all_text_contents() == ["miss"] * 3 + ["hit"] * 6 + ["failed", "plain"]
    until(page, "[...document.querySelectorAll('.card img')].slice(0, 4).every((one) => one.naturalWidth === 256)")
    assert page.locator(".figures dd").all_text_contents() == ["10", "6 of 9, 67 %", "2.1×", "1.6×", "22.2 s", "1"]
    assert page.locator("#plot path").count() == 3
    assert page.locator("video").count() == 0


def test_search_filter_and_sort(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    page.get_by_label("Search prompts").fill("RED  forest")
    sync_api.expect(page.locator("#count")).to_have_text("6 of 11 shown")
    assert numbers(page) == [4, 5, 6, 7, 8, 9]
    page.get_by_label("Sort").select_option("alike")
    sync_api.expect(page.locator(".card .number").first).to_have_text("9")
    page.get_by_label("Sort").select_option("time")
    sync_api.expect(page.locator(".card .number").first).to_have_text("4")
    page.get_by_label("Misses 3").check(force=True)
    sync_api.expect(page.locator("#count")).to_have_text("0 of 11 shown")
    page.get_by_role("button", name="Show all").click()
    sync_api.expect(page.locator("#count")).to_have_text("11 shown")
    page.get_by_label("Failed 1").check(force=True)
    sync_api.expect(page.locator("#count")).to_have_text("1 of 11 shown")
    assert numbers(page) == [10]


def test_the_whole_page_by_keyboard(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    reached = []
    for _ in range(4):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.name || document.activeElement.className")
        )
    assert reached == ["search", "filter", "sort", "card"]
    assert page.evaluate(FOCUSED) == "1"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key, number in [
        ("ArrowRight", "2"),
        ("ArrowDown", "6"),
        ("ArrowDown", "10"),
        ("ArrowDown", "11"),
        ("ArrowUp", "7"),
        ("ArrowLeft", "6"),
        ("Home", "1"),
        ("ArrowLeft", "1"),
        ("End", "11"),
    ]:
        page.keyboard.press(key)
        assert page.evaluate(FOCUSED) == number, key
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 11")
    page.keyboard.press("ArrowLeft")
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 10")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 9")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#detail")).not_to_be_visible()
    assert page.evaluate(FOCUSED) == "9"
    assert page.evaluate("location.hash") == ""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.grid')") is None


def test_a_click_shows_all_about_a_hit(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    page.locator(".card").nth(4).click()
    detail = page.get_by_role("dialog", name="Video 5")
    assert detail.locator(".said mark").all_text_contents() == ["red ball"]
    assert detail.locator(".words mark").all_text_contents() == ["red ball"]
    assert "shares 'red ball'" in detail.inner_text()
    assert detail.get_by_role("img", name="3 read the donor, 5 plain, 22 left out").locator("i").count() == 30
    assert detail.get_by_role("heading", name="Time: 5.00 s, 3.70 s saved").count() == 1
    assert detail.locator("a", has_text="Open mp4").get_attribute("href") == "./0005-a-video.mp4"
    assert page.evaluate("location.hash") == "#v=0005-a-video.mp4"
    detail.get_by_role("link", name="Open the donor").click()
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 1")
    assert page.get_by_label("Previous video").get_attribute("aria-disabled") == "true"
    page.go_back()
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 5")
    page.get_by_label("Next video").click()
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 6")
    page.mouse.click(5, 5)
    sync_api.expect(page.locator("#detail")).not_to_be_visible()


def test_a_link_opens_its_video_and_one_to_nothing_does_no_harm(page_of: Open, folder: Path) -> None:
    page = page_of(folder, "#v=0010-a-video.mp4")
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 10")
    assert "out of memory at 64x64" in page.locator("#detail").inner_text()
    assert page.locator("#detail video").count() == 0
    for fragment in ("#v=gone.mp4", "#v=%E0%A4%A", "#<b>"):
        page.evaluate("(to) => (location.hash = to)", fragment)
        sync_api.expect(page.locator("#detail")).not_to_be_visible()


def test_previous_and_next_go_through_what_is_shown(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    page.get_by_label("Sort").select_option("alike")
    page.get_by_label("Hits 6").check(force=True)
    sync_api.expect(page.locator("#count")).to_have_text("6 of 11 shown")
    page.locator(".card").first.click()
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 9")
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 8")


def test_the_command_is_copied(page_of: Open, folder: Path) -> None:
    page = page_of(folder, "#v=0005-a-video.mp4", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy this command").click()
    sync_api.expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#detail pre").text_content()
    assert "chai gen - --out repeated" in page.locator("#detail pre").text_content()


def test_a_clip_plays_to_its_end(page_of: Open, folder: Path) -> None:
    page = page_of(folder, "#v=0001-a-video.mp4")
    ended = page.evaluate(
        """() => new Promise((done) => {
            const video = document.querySelector('#detail video');
            video.loop = false;
            video.addEventListener('ended', () => done([video.muted, video.videoWidth, video.currentTime]));
        })"""
    )
    assert ended == [True, 256, pytest.approx(9 / 8, abs=0.05)]


def test_a_card_plays_while_it_is_pointed_at_and_on_screen(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    clips = page.locator(".grid video")
    page.locator(".card").nth(1).hover()
    until(page, "document.querySelector('.grid video')?.currentTime > 0.1")
    assert page.evaluate("(({loop, muted}) => [loop, muted])(document.querySelector('.grid video'))") == [True, True]
    page.locator(".card").nth(2).hover()
    until(page, "document.querySelectorAll('.card')[2].querySelector('video')?.currentTime > 0.1")
    assert clips.count() == 1
    page.locator("h1").hover()
    sync_api.expect(clips).to_have_count(0)
    page.locator(".card").first.focus()
    sync_api.expect(clips).to_have_count(1)
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    sync_api.expect(clips).to_have_count(0)


def test_nothing_moves_for_those_who_want_that(page_of: Open, folder: Path) -> None:
    page = page_of(folder, reduced_motion="reduce")
    page.locator(".card").nth(1).hover()
    page.wait_for_timeout(400)
    assert page.locator("video").count() == 0
    page.locator(".card").nth(1).click()
    page.wait_for_timeout(300)
    assert page.evaluate("document.querySelector('#detail video').paused")
    page.keyboard.press(" ")
    until(page, "document.querySelector('#detail video').currentTime > 0.1")
    page.get_by_role("button", name="Pause").click()
    assert page.evaluate("document.querySelector('#detail video').paused")


def test_a_video_that_cannot_be_read_is_said_to_be(page_of: Open, tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "broken", [row(1), row(2)])
    (folder / "0001-a-video.mp4").write_bytes(b"no video")
    build(folder)
    page = page_of(folder, "#v=0001-a-video.mp4")
    sync_api.expect(page.locator("#detail .notes")).to_have_text("It cannot be played here.")
    sync_api.expect(page.locator("#detail .stage")).to_have_text("no picture")
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.locator("#detail .stage")).to_have_text("the file is gone")


def test_hostile_prompts_run_nothing_and_stay_in_their_place(page_of: Open, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror='window.pwned = 9'>"
    rows = [
        hit(
            i,
            words,
            donor_prompt=words,
            why=words,
            not_stored=words,
            shared=[{"entity": words[:60], "donor_entity": "ball", "similarity": 0.5}],
        )
        for i, words in enumerate(HOSTILE)
    ]
    write_rows(folder, rows)
    build(folder)
    for size in (DESKTOP, PHONE):
        page = page_of(folder, viewport=size)
        assert page.locator("img, video, main script, b").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert max(page.evaluate("[...document.querySelectorAll('.card')].map((one) => one.scrollHeight)")) < 420
        page.locator(".card").first.click()
        for i, words in enumerate(HOSTILE):
            sync_api.expect(page.locator("#detail-title")).to_have_text(f"Video {i}")
            assert page.locator(".said").text_content() == words.replace("\ud800", "?")
            assert (
                page.evaluate("document.getElementById('detail').scrollWidth - document.getElementById('detail').clientWidth")
                <= 0
            )
            page.get_by_label("Next video").focus()
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Escape")
        page.get_by_label("Search prompts").fill("<script>")
        sync_api.expect(page.locator("#count")).to_have_text("2 of 8 shown")


def test_what_gets_into_the_page_is_kept_from_running(browser: Any, folder: Path) -> None:
    page = browser.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(folder.as_uri() + "/index.html")
    page.evaluate(
        """() => {
            document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.pwned = 1"><p style="color: red" onclick="">');
            document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.pwned = 2'}));
            document.body.append(Object.assign(document.createElement('img'), {src: 'https://example.org/x.png'}));
        }"""
    )
    page.wait_for_timeout(300)
    assert page.evaluate("window.pwned ?? null") is None
    assert page.evaluate("getComputedStyle(document.querySelector('p[style]')).color") != "rgb(255, 0, 0)"
    for kind in ("inline event handler", "inline style", "inline script", "'https://example.org/x.png'"):
        assert any(kind in one for one in refused), (kind, refused)
    page.close()


def test_an_arabic_prompt_is_set_from_the_right(page_of: Open, tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "rtl", [row(1, HOSTILE[3]), row(2)])
    build(folder)
    page = page_of(folder)
    assert page.evaluate("[...document.querySelectorAll('.card .prompt')].map((one) => getComputedStyle(one).direction)") == [
        "rtl",
        "ltr",
    ]


def test_two_thousand_rows_are_ready_within_a_second_and_search_at_once(page_of: Open, folder: Path, tmp_path: Path) -> None:
    many = tmp_path / "many"
    write_rows(many, [hit(i, f"a red ball number {i} in a forest", seed=i) for i in range(1, 2001)])
    for i in range(1, 2001):
        (many / f"{i:04d}-a-video.mp4").symlink_to(folder / "0001-a-video.mp4")
    shutil.copytree(folder / "posters", many / "posters")
    for i in range(1, 2001):
        shutil.copy(folder / "posters" / "0001-a-video.jpg", many / "posters" / f"{i:04d}-a-video.jpg")
    build(many)
    page = page_of(many)
    ready = min([page.evaluate("performance.getEntriesByName('ready')[0].startTime"), *(again(page) for _ in range(2))])
    print(f"ready after {ready:.0f} ms")
    assert ready < 1000
    assert page.locator(".card").count() == 60
    took = page.evaluate(
        """async () => {
            const search = document.getElementById('search'), began = performance.now();
            search.value = 'number 1999';
            search.dispatchEvent(new Event('input'));
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            return performance.now() - began;
        }"""
    )
    print(f"search after {took:.0f} ms")
    assert numbers(page) == [1999]
    assert took < 300
    page.get_by_label("Search prompts").fill("")
    sync_api.expect(page.locator("#count")).to_have_text("2000 shown")
    page.locator(".card").first.focus()
    page.keyboard.press("End")
    assert page.evaluate(FOCUSED) == "2000"
    page.wait_for_timeout(300)
    assert page.evaluate("document.activeElement.getBoundingClientRect().bottom <= innerHeight")


def again(page: Any) -> float:
    page.reload()
    until(page, READY)
    return page.evaluate("performance.getEntriesByName('ready')[0].startTime")


def test_scrolling_makes_the_next_cards(page_of: Open, tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "some", [row(i) for i in range(1, 200)])
    build(folder)
    page = page_of(folder)
    assert page.locator(".card").count() == 60
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    until(page, "document.querySelectorAll('.card').length >= 120")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_shut_out_and_it_can_be_looked_at(
    page_of: Open, folder: Path, tmp_path: Path, scheme: str, size: Any
) -> None:
    """axe-core finds nothing in the grid and in the dialog; pictures of both are in the test's folder."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed").Axe()
    page = page_of(folder, color_scheme=scheme, viewport=size)
    for name, opened in (("grid", None), ("hit", 5), ("failed", 10), ("plain", 11)):
        if opened:
            page.evaluate("(to) => (location.hash = to)", f"#v={opened:04d}-a-video.mp4")
            sync_api.expect(page.locator("#detail-title")).to_have_text(f"Video {opened}")
        found = axe.run(page).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == [], json.dumps(found)[:2000]
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.screenshot(path=tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gallery]:
    """The gallery of a run that goes on, with a page of some rows that looks for more after so many seconds."""

    def begun(seconds: float, *rows: dict[str, Any]) -> Gallery:
        monkeypatch.setattr(pages, "AGAIN", seconds)
        (tmp_path / "night").mkdir()
        gallery = Gallery(tmp_path / "night", pause=0.05)
        for one in rows:
            gallery.add(one)
        gallery.refresh()
        return gallery

    return begun


def test_an_open_page_follows_the_run_and_keeps_its_place(page_of: Open, night: Callable[..., Gallery]) -> None:
    gallery = night(1.0, *(row(i, f"a red ball, take {i}") for i in range(1, 81)))
    page = page_of(gallery.folder)
    box = page.get_by_label("still rendering")
    box.uncheck()  # nothing moves until all is prepared
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed").Axe()
    assert axe.run(page).response["violations"] == []
    page.get_by_label("Search prompts").fill("red")
    page.get_by_label("Sort").select_option("time")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # sorted by then
    page.evaluate("document.querySelector('.card[data-place=\"2\"]').focus()")
    page.evaluate("document.querySelectorAll('.card')[40].scrollIntoView({block: 'start'})")
    page.wait_for_timeout(300)
    top = "(words) => [...document.querySelectorAll('.card')].find((one) => one.textContent.includes(words)).getBoundingClientRect().top"
    before = page.evaluate(top, "take 41")
    gallery.add(row(81, "a red star", seconds={"denoise": 99, "total": 99}))
    gallery.refresh()
    page.evaluate("document.getElementById('follow').checked = true")
    sync_api.expect(page.locator("#count")).to_have_text("81 shown", timeout=30_000)
    page.evaluate("document.getElementById('follow').checked = false")
    until(page, READY)
    assert page.locator(".card .number").first.text_content() == "81"  # the slowest stands first, and moves all others
    assert page.evaluate(FOCUSED) == "3"
    assert page.evaluate(top, "take 41") == pytest.approx(before, abs=40)
    assert page.get_by_label("Search prompts").input_value() == "red"
    assert page.get_by_label("Sort").input_value() == "time"
    gallery.add(row(82, "a red heart"))
    gallery.refresh()
    page.wait_for_timeout(2500)
    assert page.locator("#count").text_content() == "81 shown"
    again(page)
    assert page.locator("#count").text_content() == "82 shown"
    assert not box.is_checked()
    page.evaluate("document.getElementById('follow').checked = true")
    gallery.close()
    sync_api.expect(box).to_have_count(0, timeout=30_000)
    assert page.locator("#count").text_content() == "82 shown"


def test_nothing_is_read_anew_while_a_video_is_looked_at(page_of: Open, night: Callable[..., Gallery]) -> None:
    gallery = night(1.0, row(1))
    page = page_of(gallery.folder, "#v=0001-a-video.mp4")
    gallery.add(row(2))
    gallery.refresh()
    page.wait_for_timeout(2500)
    sync_api.expect(page.locator("#detail-title")).to_have_text("Video 1")
    assert page.locator("#count").text_content() == "1 shown"
    page.keyboard.press("Escape")
    gallery.close()
    sync_api.expect(page.get_by_label("still rendering")).to_have_count(0, timeout=30_000)
    assert page.locator("#count").text_content() == "2 shown"


def test_a_page_that_a_killed_run_left_looks_more_and_more_seldom(page_of: Open, night: Callable[..., Gallery]) -> None:
    page = page_of(night(0.3, row(1)).folder)
    loads: list[str] = []
    page.on("load", lambda _: loads.append(page.url))
    page.wait_for_timeout(7000)
    assert 2 <= len(loads) <= 5  # after 0.3, 0.6, 1.2, 2.4 seconds, not twenty times
    page.evaluate("document.getElementById('follow').checked = false")
    sync_api.expect(page.locator("#news")).to_contain_text("nothing new since")


def test_without_anything_to_show_it_says_so(page_of: Open, tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "empty", [])
    build(folder)
    page = page_of(folder)
    sync_api.expect(page.locator("#none")).to_be_visible()
    assert page.locator(".figures dd").all_text_contents() == ["0", "0"]
