"""The page of a bench: what goes into it, and how it behaves in a real headless Chromium."""

from __future__ import annotations

import errno
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from chai_cli.bench import output
from chai_cli.bench.rows import row_of
from chai_cli.bench.run import Measurement, safe
from chai_cli.bench.summary import Table
from chai_cli.bench.workload import world
from chai_cli.embedded.world import ATTRIBUTES, Scene
from chai_cli.errors import ChaiError
from chai_cli.gallery.bench import bench_page, build_bench, known, write_bench
from tests.gallery.chromium import DESKTOP, PHONE, READY, Open, until
from tests.gallery.rows import HOSTILE, clip

COUNT = 24
SPECS = {  # seconds, share of clips that are right, share of hits
    "dense": (3.0, 0.9, 0.0),
    "correction:fast-steps=4": (0.8, 0.85, 0.75),
    "chai:fast-steps=2": (0.5, 0.1, 0.5),
    "first-block:threshold=0.1": (1.5, 0.9, 0.0),
    "dense:steps=2,scheduler=unipc": (0.5, 0.1, 0.0),
    "dense:steps=4,scheduler=unipc": (0.9, 0.5, 0.0),
    "dense:steps=8,scheduler=unipc": (1.3, 0.8, 0.0),
    "dense:steps=4,scheduler=euler": (0.9, 0.2, 0.0),
    "dense:scheduler=euler": (3.0, 0.8, 0.0),
}
Document = dict[str, Any]


def reading(scene: Scene, wrong: bool, rng: random.Random) -> dict[str, Any]:
    """What a judge reads of a scene; another colour than its own if that is to be wrong."""
    things = [{name: getattr(thing, name) for name in ("shape", "colour", "size", "motion")} for thing in scene.things]
    if wrong:
        things[0]["colour"] = rng.choice([one for one in ATTRIBUTES["colour"] if one != things[0]["colour"]])
    return {"background": scene.background, "things": things}


def bench(judged: bool = True, count: int = COUNT) -> Document:
    """A `bench.json` of made-up measurements: two rows that reuse, one that never worked, an in-request cache, plain rows."""
    return cast(Document, json.loads(json.dumps(made_up(judged, count), default=str)))


def made_up(judged: bool = True, count: int = COUNT) -> Document:
    rng = random.Random(0)
    work = world(count, "hits", 4)
    rows = [row_of(spec) for spec in (*SPECS, "nirvana:fast-steps=6")]
    made = {}
    for spec, (seconds, right, hits) in SPECS.items():
        for case, asked in enumerate(work.cases):
            hit = case < hits * count
            assert asked.scene is not None
            seen = {"clip_t": 0.7 + right / 10, "psnr": 20.0, "ssim": 0.8, "flicker": 1.0}
            seen["reading"] = reading(asked.scene, rng.random() > right, rng) if judged else None  # type: ignore[assignment]
            took = 3.0 if not hit and hits else seconds + case / 1000
            made[spec, case] = Measurement(
                spec, case, hit=hit, donors=[0] if hit else [], steps=4, calls=8, seconds={"denoise": took}, seen=seen
            )
    broken = Measurement(rows[-1].label, 0, error="this model has no such step")
    table = Table(work, rows, {**made, (broken.row, 0): broken}, {"correction:fast-steps=4": 102400.0}, "unipc")
    backbone = cast(Any, SimpleNamespace(device=torch.device("cpu"), record=SimpleNamespace(name="embedded")))
    return output.document(table, table.summaries(), backbone, {"workload": work.identity()})


@pytest.fixture(scope="module")
def document() -> Document:
    return bench()


def copied(document: Document) -> Document:
    return cast(Document, json.loads(json.dumps(document)))


def data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return cast(dict[str, Any], json.loads(found[1]))


def test_the_page_has_every_row_with_its_kind_and_figures(document: Document, tmp_path: Path) -> None:
    found = data(write_bench(tmp_path, document).read_text("utf-8"))
    rows = {row["label"]: row for row in found["rows"]}
    assert list(rows) == [*SPECS, "nirvana:fast-steps=6"]
    assert [row["kind"] for row in rows.values()].count("reuse") == 3
    assert rows["first-block:threshold=0.1"]["kind"] == "peer"
    assert rows["nirvana:fast-steps=6"]["why"] == "not run: this model has no such step"
    assert rows["dense"]["solver"] == "unipc"
    correction = next(row for row in document["rows"] if row["label"] == "correction:fast-steps=4")
    shown = rows["correction:fast-steps=4"]["shown"]
    assert shown["fidelity"] == correction["hits"]["fidelity"]
    assert shown["to_frontier"] == [correction["hits"]["to_frontier"][name] for name in ("mean", "low", "high")]
    assert rows["correction:fast-steps=4"]["kib"] == 100
    assert found["frontiers"]["shown"] == [
        [one["seconds"], pytest.approx(sum(one["scores"]) / COUNT)] for one in document["frontier"]
    ]


def test_the_dictionary_and_its_file_give_the_same_page(document: Document, tmp_path: Path) -> None:
    assert data(bench_page(tmp_path, made_up())) == data(bench_page(tmp_path, document))


def test_over_all_requests_seconds_are_the_mean(document: Document) -> None:
    row = next(row for row in known(document)["rows"] if row["label"] == "correction:fast-steps=4")
    every = next(one for one in document["rows"] if one["label"] == row["label"])["all"]
    assert row["points"]["all"][:2] == pytest.approx([every["seconds"], every["fidelity"]])
    assert row["points"]["shown"][0] < row["points"]["all"][0]


def test_an_outcome_a_request_says_what_was_lost_against_dense(document: Document) -> None:
    rows = {row["label"]: row for row in known(document)["rows"]}
    scores = document["scores"]
    letters = {(1, 1): "r", (1, 0): "g", (0, 0): "w", (0, 1): "l"}
    for label in SPECS:
        expected = [letters[int(ours), int(theirs)] for ours, theirs in zip(scores[label], scores["dense"], strict=True)]
        assert rows[label]["outcomes"] == "".join(expected)


def test_with_the_wrong_attributes_in_the_document_an_outcome_tells_of_each(document: Document) -> None:
    made = copied(document)
    made["wrong"] = {label: [[] for _ in range(COUNT)] for label in SPECS}
    made["wrong"]["dense:steps=2,scheduler=unipc"][3] = ["size"]
    made["scores"] = {label: [1.0] * COUNT for label in SPECS}
    found = known(made)
    assert found["exact"]
    rows = {row["label"]: row for row in found["rows"]}
    assert rows["dense:steps=2,scheduler=unipc"]["outcomes"] == "rrrl" + "r" * (COUNT - 4)


def test_the_header_tells_of_the_best_row_and_warns(document: Document, tmp_path: Path) -> None:
    made = {**document, "warnings": ["3 requests are left out", "<b>do not trust</b>"]}
    text = bench_page(tmp_path, made)
    assert "Best row that reuses: <bdi>correction:fast-steps=4</bdi>" in text
    assert "It lies above the best that plain sampling gives" in text
    assert '<li dir="auto">3 requests are left out</li>' in text
    assert "&lt;b&gt;do not trust&lt;/b&gt;" in text
    assert "a trained judge reads" in text


def test_without_a_judge_the_score_is_clip_t_and_there_is_no_map(tmp_path: Path) -> None:
    text = bench_page(tmp_path, bench(judged=False))
    assert "The score is CLIP-T" in text
    assert not any(row["outcomes"] for row in data(text)["rows"])


def test_hostile_words_stay_words(document: Document, tmp_path: Path) -> None:
    made = copied(document)
    for i, words in enumerate(HOSTILE):
        made["requests"][i]["prompt"] = words
        made["warnings"].append(words)
    made["model"] = made["workload"] = HOSTILE[1]
    for row in made["rows"]:
        row["label"] = row["error"] = HOSTILE[0]
    folder = tmp_path / "<img src=x onerror='window.pwned = 9'>"
    folder.mkdir()
    text = write_bench(folder, made).read_text("utf-8")
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text
    assert data(text)["prompts"][0] == HOSTILE[0]
    assert "Content-Security-Policy" in text
    assert "style=" not in text.partition("<body")[2].partition("<script")[0]


@pytest.mark.parametrize(
    "gone", ["versions", "machine", "model", "asked", "score", "workload", "warnings", "options", "frontier", "measurements"]
)
def test_a_document_that_lacks_something_gives_a_page(document: Document, tmp_path: Path, gone: str) -> None:
    made = {key: value for key, value in document.items() if key != gone}
    assert len(data(bench_page(tmp_path, made))["rows"]) == len(SPECS) + 1


@pytest.mark.parametrize("value", [None, "words", 3, [], {}, [None, 3, "x", []], {"dense": 3}, float("nan")])
def test_odd_values_anywhere_give_a_page(document: Document, tmp_path: Path, value: Any) -> None:
    for key in document:
        data(bench_page(tmp_path, {**document, key: value}))
    for part in ("rows", "measurements", "requests", "frontier"):
        for key in document[part][1]:
            made = copied(document)
            made[part][1][key] = value
            data(bench_page(tmp_path, made))
    for key in document["rows"][1]["hits"]:
        made = copied(document)
        made["rows"][1]["hits"][key] = value
        data(bench_page(tmp_path, made))


def test_build_reads_the_folder_and_says_in_one_sentence_what_is_amiss(document: Document, tmp_path: Path) -> None:
    with pytest.raises(ChaiError, match=r"cannot read .*bench\.json"):
        build_bench(tmp_path)
    (tmp_path / "bench.json").write_text('{"format": 0}')
    with pytest.raises(ChaiError, match=r"is not a bench\.json of this version"):
        build_bench(tmp_path)
    (tmp_path / "bench.json").write_text(json.dumps(document))
    assert build_bench(tmp_path) == tmp_path / "index.html"
    with pytest.raises(ChaiError, match="cannot write"):
        write_bench(tmp_path / "gone", document)


def test_a_page_is_replaced_whole_or_stays(document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write_bench(tmp_path, document).read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ChaiError, match=r"cannot write .*index\.html: No space left"):
        write_bench(tmp_path, {**document, "model": "other"})
    assert (tmp_path / "index.html").read_bytes() == before
    assert os.listdir(tmp_path / ".chai") == []


def test_somebody_else_s_page_stays(document: Document, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>My own site</h1>")
    with pytest.raises(ChaiError, match="is not one that chai wrote; move it away"):
        write_bench(tmp_path, document)
    assert (tmp_path / "index.html").read_text() == "<h1>My own site</h1>"


def many(document: Document, rows: int, count: int) -> Document:
    """A bench of more rows and requests, from a small one."""
    made = copied(document)
    labels = [f"chai:fast-steps=4,blocks={i}" for i in range(rows)]
    labels[0] = "dense"
    kinds = {row["label"]: row for row in document["rows"]}
    measured = {one["case"]: one for one in document["measurements"] if one["row"] == "correction:fast-steps=4"}
    rng = random.Random(1)
    made["rows"] = [{**kinds["correction:fast-steps=4" if i else "dense"], "label": label} for i, label in enumerate(labels)]
    made["requests"] = [document["requests"][i % COUNT] for i in range(count)]
    made["options"] = {
        label: document["options"]["correction:fast-steps=4" if i else "dense"] for i, label in enumerate(labels)
    }
    made["scores"] = {label: [float(rng.random() < 0.8) for _ in range(count)] for label in labels}
    made["measurements"] = [
        {**measured[case % COUNT], "row": label, "case": case, "why": f"shares 'ball {case}'"}
        for label in labels
        for case in range(count)
    ]
    for i, row in enumerate(made["rows"]):
        for part in filter(None, (row["hits"], row["all"])):
            part["seconds"], part["fidelity"] = 0.5 + i / 20, 0.5 + (i * 7 % rows) / rows / 2
    return made


# In the browser


@pytest.fixture(scope="module")
def folder(document: Document, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bench with a warning, and clips of two rows."""
    folder = tmp_path_factory.mktemp("bench") / "my bench"
    folder.mkdir()
    for label in ("dense", "correction:fast-steps=4"):
        for case in (0, 1, 2):
            (folder / "videos" / safe(label)).mkdir(parents=True, exist_ok=True)
            clip(folder / "videos" / safe(label) / f"{case:04d}.mp4", case)
    write_bench(folder, {**document, "warnings": ["dense:steps=2: 3 of 24 requests were timed in another run than dense"]})
    return folder


def labels(page: Any) -> list[str]:
    return cast(list[str], page.locator("#table tbody th").all_text_contents())


def column(page: Any, name: str) -> list[str]:
    place = page.locator("#table thead th").all_text_contents().index(name)
    return cast(
        list[str],
        page.evaluate(
            "(at) => [...document.querySelectorAll('#table tbody tr')].map((one) => one.cells[at]?.firstChild.textContent ?? '')",
            place,
        ),
    )


def test_the_table_sorts_by_click_and_by_key(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    assert labels(page) == [*SPECS, "nirvana:fast-steps=6"]
    button = page.locator("#table thead").get_by_role("button", name="seconds")
    button.click()
    head = page.locator("#table thead th", has_text="seconds")
    assert head.get_attribute("aria-sort") == "descending"
    found = [float(value) for value in column(page, "seconds")[:-1]]
    assert found == sorted(found, reverse=True)
    assert labels(page)[-1] == "nirvana:fast-steps=6"  # without figures it stands last, whatever the order
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    found = [float(value) for value in column(page, "seconds")[:-1]]
    assert found == sorted(found)
    assert labels(page)[-1] == "nirvana:fast-steps=6"
    page.locator("#table thead").get_by_role("button", name="row", exact=True).click()
    assert labels(page) == sorted(labels(page))
    assert head.get_attribute("aria-sort") is None


def test_a_row_that_was_not_run_says_why(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    assert page.locator("#table td.why").all_text_contents() == ["not run: this model has no such step"]


def test_gains_and_losses_beyond_chance_are_shaded(page_of: Open, folder: Path, document: Document) -> None:
    page = page_of(folder)
    told = {"gain": 0, "loss": 0}
    for row in document["rows"]:
        figures = (row["all"] if row["hit_rate"] is None else row["hits"]) or {}
        for name in ("to_dense", "to_control", "to_frontier"):
            if found := figures.get(name):
                told["gain"] += found["low"] > 0
                told["loss"] += found["high"] < 0
    assert told["gain"]
    assert told["loss"]
    for kind, count in told.items():
        assert page.locator(f"#table td.{kind}").count() == count


def test_the_filter_shows_one_kind_of_rows(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    for name, count in (("Reuse 3", 3), ("Peers 1", 1), ("Plain 6", 6), ("All 10", 10)):
        page.get_by_label(name).check(force=True)
        assert len(labels(page)) == count
        worked = sum(label in SPECS for label in labels(page))
        assert page.locator(".lane").count() == worked
    assert page.locator("#count").text_content() == "10 rows"
    page.get_by_label("Peers 1").check(force=True)
    assert page.locator("#count").text_content() == "1 of 10 rows"


def test_a_point_tells_of_its_row_when_pointed_at_and_by_key(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    assert page.locator("#chart .mark").count() == len(SPECS)
    assert page.locator("#chart .mark.reuse .bar").count() == 2
    mark = page.locator("#chart .mark.peer")
    mark.hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert tip.locator("b").text_content() == "first-block:threshold=0.1"
    page.locator("h1").hover()
    assert not tip.is_visible()
    page.locator("#chart .mark[tabindex='0']").focus()
    first = tip.locator("b").text_content()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(first)
    page.keyboard.press("ArrowRight")
    assert tip.locator("b").text_content() != first
    assert page.locator("#chart .mark[tabindex='0']").count() == 1
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.keyboard.press("End")
    label = tip.locator("b").text_content()
    page.get_by_label("Peers 1").check(force=True)
    page.locator("#chart .mark[tabindex='0']").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.querySelector('th').textContent") == label
    assert len(labels(page)) == 10


def test_names_in_the_chart_do_not_lie_on_each_other(page_of: Open, folder: Path) -> None:
    for size in (DESKTOP, PHONE):
        page = page_of(folder, viewport=size)
        boxes = page.evaluate(
            "[...document.querySelectorAll('.names text')].map((one) => one.getBoundingClientRect().toJSON())"
        )
        assert len(boxes) >= 4
        for i, one in enumerate(boxes):
            for other in boxes[i + 1 :]:
                apart = one["right"] <= other["left"] or other["right"] <= one["left"]
                assert (
                    apart or one["bottom"] <= other["top"] + 5 or other["bottom"] <= one["top"] + 5
                )  # a line has room to spare


def test_the_chart_is_of_all_requests_or_of_hits(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    mark = page.locator("#chart .mark[aria-label^='correction']")
    every = mark.get_attribute("aria-label")
    page.locator("#view").get_by_label("Hits").check(force=True)
    hits = mark.get_attribute("aria-label")
    assert float(re.search(r"([\d.]+) s", hits)[1]) < float(re.search(r"([\d.]+) s", every)[1])


def test_the_map_and_its_dialog_by_key(page_of: Open, folder: Path, document: Document) -> None:
    page = page_of(folder)
    assert page.locator(".lane").count() == len(SPECS)
    page.locator("#heat").focus()
    readout = page.locator("#readout")
    assert document["requests"][0]["prompt"] in readout.text_content()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "correction:fast-steps=4" in readout.text_content()
    assert readout.locator("b").text_content().startswith("Request 2: ")
    page.keyboard.press("Enter")
    detail = page.get_by_role("dialog", name="Request 2")
    assert document["requests"][1]["prompt"] in detail.inner_text()
    assert detail.locator(".read tbody th").all_text_contents() == list(ATTRIBUTES)
    assert [one.get_attribute("src") for one in detail.locator("video").all()] == [
        "./videos/correction_fast-steps%3D4/0001.mp4",
        "./videos/dense/0001.mp4",
    ]
    until(page, "[...document.querySelectorAll('#detail video')].every((one) => one.videoWidth === 256)")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    detail = page.get_by_role("dialog", name="Request 4")
    assert detail.locator("video").count() == 0
    assert "There is no clip of it" in detail.inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#detail").is_visible()
    assert page.evaluate("document.activeElement.id") == "heat"
    assert readout.locator("b").text_content().startswith("Request 4: ")


def test_a_click_on_a_cell_shows_its_request(page_of: Open, folder: Path) -> None:
    page = page_of(folder)
    page.locator("#heat").scroll_into_view_if_needed()
    box = page.locator(".lane .track").nth(2).bounding_box()
    page.mouse.click(box["x"] + box["width"] * 5.5 / COUNT, box["y"] + 10)
    assert page.locator("#detail-title").text_content() == "Request 6"
    page.mouse.click(5, 5)
    page.get_by_label("Order").select_option("lost")
    assert page.locator("#readout b").text_content().startswith("Request 6: ")  # the cursor stays with it
    page.locator("#heat").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    lost = int(re.search(r"Rows that lose here\s+(\d+) of 9", page.locator("#detail").inner_text())[1])
    page.get_by_label("Next request").click()
    assert lost >= int(re.search(r"Rows that lose here\s+(\d+) of 9", page.locator("#detail").inner_text())[1])


def test_the_dialog_marks_what_is_wrong_where_the_document_says_so(page_of: Open, document: Document, tmp_path: Path) -> None:
    wrong: dict[str, list[list[str]]] = {label: [[] for _ in range(COUNT)] for label in SPECS}
    wrong["correction:fast-steps=4"][0] = ["colour", "motion"]
    write_bench(tmp_path, {**document, "wrong": wrong})
    page = page_of(tmp_path)
    page.locator("#heat").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#detail .loss").count() == 2
    assert page.locator("#detail-badge").text_content() == "lost"


def test_hostile_words_run_nothing_and_stay_in_their_place(page_of: Open, document: Document, tmp_path: Path) -> None:
    made = copied(document)
    for i, words in enumerate(HOSTILE):
        made["requests"][i]["prompt"] = words
    names = dict(zip([row["label"] for row in made["rows"]][1:], HOSTILE, strict=False))
    for row in made["rows"]:
        row["label"] = names.get(row["label"], row["label"])
    for one in made["measurements"]:
        one["row"] = names.get(one["row"], one["row"])
        one["why"] = HOSTILE[0]
    for part in ("scores", "options"):
        made[part] = {names.get(label, label): value for label, value in made[part].items()}
    made["warnings"] = list(HOSTILE)
    folder = tmp_path / "<img src=x onerror='window.pwned = 9'>"
    folder.mkdir()
    write_bench(folder, made)
    for size in (DESKTOP, PHONE):
        page = page_of(folder, viewport=size)
        assert page.locator("img, video, main script").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.locator("#heat").focus()
        for i in range(len(HOSTILE)):
            page.keyboard.press("Enter")
            assert page.locator("#detail-title").text_content() == f"Request {i + 1}"
            assert page.locator("#detail img, #detail script").count() == 0
            assert (
                page.evaluate("document.getElementById('detail').scrollWidth - document.getElementById('detail').clientWidth")
                <= 0
            )
            page.keyboard.press("Escape")
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowDown")


@pytest.mark.parametrize("judged", [True, False], ids=["judge", "clip"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_shut_out_and_it_can_be_looked_at(
    page_of: Open, folder: Path, tmp_path: Path, scheme: str, size: Any, judged: bool
) -> None:
    """axe-core finds nothing in the page and in the dialog; pictures of both are in the test's folder."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed").Axe()
    if not judged:
        folder = tmp_path / "clips"
        folder.mkdir()
        write_bench(folder, bench(judged=False))
    page = page_of(folder, color_scheme=scheme, viewport=size)
    for name in ("page", "dialog")[: 1 + judged]:
        if name == "page":
            page.locator("summary").click()
            page.locator("#chart .mark.reuse").first.focus()
        else:
            page.locator("#heat").focus()
            page.keyboard.press("ArrowDown")
            page.keyboard.press("Enter")
        found = axe.run(page).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == [], json.dumps(found)[:2000]
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.screenshot(path=tmp_path / f"{name}.png", full_page=name == "page")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_nothing_moves_for_those_who_want_that(page_of: Open, folder: Path) -> None:
    page = page_of(folder, reduced_motion="reduce")
    page.locator("#heat").focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    assert page.evaluate("[...document.querySelectorAll('#detail video')].map((one) => one.paused)") == [True]


@pytest.mark.parametrize(("rows", "count"), [(30, 300), (40, 1000)])
def test_a_large_bench_is_ready_soon(page_of: Open, document: Document, tmp_path: Path, rows: int, count: int) -> None:
    page_file = write_bench(tmp_path, many(document, rows, count))
    page = page_of(tmp_path)
    taken = [page.evaluate("performance.getEntriesByName('ready')[0].startTime")]
    for _ in range(2):
        page.reload()
        until(page, READY)
        taken.append(page.evaluate("performance.getEntriesByName('ready')[0].startTime"))
    moved = page.evaluate(
        """async () => {
            const heat = document.getElementById('heat'), began = performance.now();
            heat.focus();
            heat.dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}));
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            return performance.now() - began;
        }"""
    )
    print(f"{page_file.stat().st_size / 1e6:.2f} MB, ready after {min(taken):.0f} ms, a key takes {moved:.0f} ms")
    assert page.locator("#readout b").text_content().startswith(f"Request {count}: ")
    assert min(taken) < 2000
    assert moved < 500


def test_a_bench_that_has_nothing_yet_says_so(page_of: Open, document: Document, tmp_path: Path) -> None:
    made = {**document, "requests": [], "frontier": [], "scores": {}, "measurements": []}
    made["rows"] = [
        {"label": row["label"], "hit_rate": None, "hits": None, "all": None, "error": "not measured yet"}
        for row in document["rows"]
    ]
    write_bench(tmp_path, made)
    page = page_of(tmp_path)
    assert page.locator("#table td.why").all_text_contents() == ["not run: not measured yet"] * 10
    assert not page.locator("#speed").is_visible()
    assert not page.locator("#requests").is_visible()
