"""Rows of a report into `index.html`, with a small poster of each video in `posters/`.

Rows may be torn, old or of something else, and prompts are whatever people write: everything that goes into the page is brought to a
known form here (`card`), and leaves as JSON that the page's script reads and sets as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chai_cli.errors import ChaiError, first_line
from chai_cli.report import read_rows

HERE = Path(__file__).parent
PAGE, POSTERS, SCRATCH = "index.html", "posters", ".chai"
PAUSE = 1.0  # seconds between two writes, at least
SHARE = 0.05  # of the time that writing may take
AGAIN = 15.0  # seconds after which an open page looks for new videos, while they are being made
POSTER_WIDTH = 480  # pixels, at most
PARTS = ("text", "retrieval", "denoise", "decode", "write", "store")  # of a row's seconds, in the order in which they happen
MOST_STEPS = 500  # that a bar shows
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal into which a command is pasted takes for a key
MARK = '<meta name="generator" content="chai">'  # tells a page of ours, which may be replaced, from one of somebody else

Card = dict[str, Any]


class Gallery:
    """The page of one folder while a run goes on. It never costs a video: what goes wrong is told in `trouble`.

    Posters and pages are made in a thread of its own. `trouble` is empty again once a later write goes well.

    Args:
        folder: Where videos and `report.jsonl` are; rows of earlier runs are shown too.
        planned: Videos that the run is to make, or has made.
        pause: Seconds between two writes, at least.
    """

    def __init__(self, folder: Path, planned: int = 0, pause: float = PAUSE) -> None:
        self.folder = Path(folder)
        self.planned = planned
        self.pause = pause
        self.trouble = ""
        self.cards: dict[str, Card] = {}
        self.fresh: list[str] = []  # files that may need a poster
        self.due = 0.0
        self.stale = False  # the page lacks a row
        self.opened = self.closed = False
        self.timer: threading.Timer | None = None
        self.lock = threading.Lock()  # over all of these
        self.writing = threading.Lock()
        try:
            for row in read_rows(self.folder / "report.jsonl"):
                place(self.cards, row)
        except Exception as error:
            self.trouble = f"earlier rows are not in the gallery: {first_line(error)}"

    def open(self) -> None:
        """Show at once that a run goes on, with what earlier ones left."""
        with self.lock:
            self.opened = self.stale = True
            self.schedule()

    def add(self, row: Mapping[str, Any]) -> None:
        """Show a row, at once or as soon as the last write is `pause` seconds ago."""
        try:
            with self.lock:
                made = place(self.cards, row)
                if made and made["kind"] not in ("failed", "skipped"):
                    self.fresh.append(made["file"])
                self.stale = True
                if self.timer is None:
                    self.schedule()
        except Exception as error:
            self.trouble = f"a row is not in the gallery: {first_line(error)}"

    def close(self) -> None:
        """Write the last state, if there is anything to show. Rows that come later are not shown."""
        with self.lock:
            self.closed = True
            if self.timer:
                self.timer.cancel()
        if self.cards or self.opened:
            self.refresh()

    def schedule(self) -> None:
        """Write as soon as that may be; the lock is held."""
        self.timer = None
        if self.stale and not self.closed:
            self.timer = threading.Timer(max(0.0, self.due - time.monotonic()), self.refresh)
            self.timer.daemon = True
            self.timer.start()

    def refresh(self) -> None:
        with self.writing:
            with self.lock:
                self.stale = False
                fresh, self.fresh = self.fresh, []
                going_on = not self.closed
                cards = [dict(one) for one in self.cards.values()]
            for file in fresh:
                make_poster(self.folder, file)
            began = time.monotonic()
            try:
                write(self.folder, cards, self.planned if going_on else None)
                self.trouble = ""
            except OSError as error:
                self.trouble = f"cannot write {self.folder / PAGE}: {error.strerror or error}"
            except ChaiError as error:
                self.trouble = str(error)
            except Exception as error:
                self.trouble = f"cannot write {self.folder / PAGE}: {first_line(error)}"
            now = time.monotonic()
            with self.lock:
                self.due = now + max(self.pause, (now - began) / SHARE)
                self.schedule()


def build(folder: Path) -> Path:
    """Make the page of a folder again from its `report.jsonl`, and the posters that are missing.

    Returns:
        The page.

    Raises:
        ChaiError: there is no report, or the page cannot be written.
    """
    report = Path(folder) / "report.jsonl"
    if not report.is_file():
        raise ChaiError(f"there is no {report}; name a folder that chai gen wrote its videos to")
    cards: dict[str, Card] = {}
    try:
        for row in read_rows(report):
            place(cards, row)
        for one in cards.values():
            if one["kind"] != "failed":
                make_poster(folder, one["file"])
        return write(folder, cards.values())
    except RecursionError:
        raise ChaiError(f"{report} has a line that is no row of a report; take it out") from None
    except OSError as error:
        raise ChaiError(f"cannot write {Path(folder) / PAGE}: {error.strerror or error}") from None


def place(cards: dict[str, Card], row: Mapping[str, Any]) -> Card | None:
    """Put a row where it belongs: in place of an earlier one of the same file. None for what is no row at all.

    A skipped row tells nothing but its place where an earlier row of the video is known.
    """
    made = card(row)
    if made is None:
        return None
    known = cards.pop(made["key"], None)  # the latest stand last
    if made["kind"] == "skipped" and known and known["kind"] != "failed":
        made = {**known, "index": made["index"]}
    cards[made["key"]] = made
    return made


def card(row: Mapping[str, Any]) -> Card | None:
    """What the page shows of a row, with every value of the kind that the script expects; None if there is nothing to show."""
    if not isinstance(row, Mapping):
        return None
    request = row.get("request")
    request = request if isinstance(request, dict) else {}
    file = safe_name(row.get("file"))
    key = file or plain(row.get("id"))
    prompt = plain(row.get("prompt")) or plain(request.get("prompt"))
    if not key or not (file or prompt or plain(row.get("why"))):
        return None
    kind = kind_of(row)
    seconds = row.get("seconds")
    seconds = {part: number(value) for part, value in seconds.items()} if isinstance(seconds, dict) else {}
    index = number(row.get("index"))
    donor = safe_name(row.get("donor"))
    total = max(0.0, seconds.get("total") or 0.0)
    saved = (number(row.get("seconds_saved")) or 0.0) if kind == "hit" else 0.0
    return {
        "key": key,
        "file": file,
        "index": int(index) if index is not None else None,
        "prompt": prompt,
        "kind": kind,
        "why": why(row, kind),
        "seconds": [[part, seconds[part]] for part in PARTS if (seconds.get(part) or 0) > 0],
        "total": total,
        "saved": saved,
        "calls_saved": whole(row.get("calls_saved")) if kind == "hit" else 0,
        "unstored": plain(row.get("not_stored")),
        "similarity": number(row.get("similarity")) if kind == "hit" and donor else None,
        "donor": donor,
        "donor_prompt": plain(row.get("donor_prompt")),
        "shared": shared(row.get("shared")),
        "ratio": ratio(row),
        "steps": steps(row, request, kind),
        "settings": settings(row, request),
        "notes": notes(row),
        "command": repeat(request),
    }


def plain(value: Any) -> str:
    """A text that any file can hold; empty for what is none."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: Any) -> int:
    return int(number(value) or 0)


def safe_name(value: Any) -> str:
    """The name of something in the folder itself; empty for paths and for what no file is named."""
    name = value if isinstance(value, str) else ""
    fits = name and plain(name) == name and len(name) < 256 and not name.startswith(".") and name.isprintable()
    return name if fits and not set("/\\") & set(name) else ""


def kind_of(row: Mapping[str, Any]) -> str:
    if row.get("status") in ("failed", "skipped"):
        return str(row["status"])
    return str(row["reuse"]) if row.get("reuse") in ("hit", "miss") else "plain"


def why(row: Mapping[str, Any], kind: str) -> str:
    """The reason in words."""
    usual = {"hit": "reused an earlier render", "miss": "rendered in full", "plain": "rendered in full"}
    return plain(row.get("why")) or usual.get(kind, "")


def shared(value: Any) -> list[list[Any]]:
    """Entities of the prompt, of the donor, and how alike they are."""
    pairs = [pair for pair in value if isinstance(pair, dict)] if isinstance(value, list) else []
    made = [[plain(pair.get("entity")), plain(pair.get("donor_entity")), number(pair.get("similarity"))] for pair in pairs]
    return [pair for pair in made if pair[0]]


def ratio(row: Mapping[str, Any]) -> float | None:
    """Width over height."""
    width, height = number(row.get("width")) or 0.0, number(row.get("height")) or 0.0
    return round(width / height, 4) if width > 0 and height > 0 else None


def steps(row: Mapping[str, Any], request: Mapping[str, Any], kind: str) -> list[list[Any]]:
    """What became of each step of a full render, as runs of [kind, how many].

    `skipped` steps were left out, `attended` ones read the donor, `corrected` ones had their error taken away, others are `plain`.
    """
    ran, full = whole(row.get("steps")), whole(request.get("num_inference_steps"))
    full = max(full, ran)
    if not 0 < ran <= full <= MOST_STEPS:
        return []
    reuse = request.get("reuse")
    made = hit_steps(plain(row.get("method")), reuse if isinstance(reuse, dict) else {}, ran, full) if kind == "hit" else []
    made = made or ["plain"] * ran
    made += ["skipped"] * (full - len(made))
    runs: list[list[Any]] = []
    for one in made:
        if runs and runs[-1][0] == one:
            runs[-1][1] += 1
        else:
            runs.append([one, 1])
    return runs


def hit_steps(method: str, reuse: Mapping[str, Any], ran: int, full: int) -> list[str]:
    """The steps of a hit. Cache Attention runs a schedule of its own, NIRVANA the end of one, a correction some of the full one."""
    if method == "correction":
        places = leaps(reuse, full)
        if len(places) != ran:
            return ["corrected"] * ran
        return ["corrected" if step in places else "skipped" for step in range(full)]
    first, second = (reuse.get("first"), reuse.get("second")) if "first" in reuse else (reuse, reuse)
    first, second = (one if isinstance(one, dict) else {} for one in (first, second))
    before = 0
    if "nirvana" in method:
        before = max(0, min(whole(first.get("fast_steps")) or full, full) - ran)
    read = second.get("steps") if "chai" in method else []
    read = read if isinstance(read, list) else []
    return ["skipped"] * before + ["attended" if before + step + 1 in read else "plain" for step in range(ran)]


def leaps(reuse: Mapping[str, Any], full: int) -> tuple[int, ...]:
    from chai_cli.reuse.correction import CorrectionOptions

    try:
        return CorrectionOptions(**reuse).leaps(full)
    except Exception:  # options of another version
        return ()


def settings(row: Mapping[str, Any], request: Mapping[str, Any]) -> list[list[str]]:
    """Names and values in the order in which people ask for them."""
    width, height = whole(row.get("width")), whole(row.get("height"))
    frames, fps = whole(row.get("num_frames")), whole(row.get("fps"))
    length = f"{frames} at {fps} a second ({frames / fps:.1f}\N{NO-BREAK SPACE}s)" if frames and fps else ""
    memory = number(row.get("peak_memory_mib"))
    scheduler, dtype = plain(request.get("scheduler")), plain(request.get("dtype"))
    ran, full = whole(row.get("steps")), whole(request.get("num_inference_steps"))
    told = {
        "seed": said(row.get("seed")),
        "size": f"{width} × {height}" if width and height else "",
        "frames": length,
        "steps": f"{ran} of {full}" if ran and full else said(full or ran or None),
        "model calls": said(row.get("model_calls") or None),
        "guidance": said(request.get("guidance_scale")),
        "scheduler": "" if scheduler == "default" else scheduler,
        "negative prompt": plain(request.get("negative_prompt")),
        "model": plain(row.get("model")),
        "method": method_of(row, request),
        "dtype": dtype,
        "lora": ", ".join(map(plain, request["lora"])) if isinstance(request.get("lora"), list) else "",
        "peak memory": f"{memory:,.0f} MiB" if memory else "",
        "versions": ", ".join(f"{plain(k)} {plain(v)}" for k, v in (as_dict(row.get("versions"))).items()),
    }
    return [[name, value] for name, value in told.items() if value]


def as_dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def said(value: Any) -> str:
    """A number as it stands in the row: seeds may be longer than the script's numbers."""
    return f"{value:g}" if isinstance(value, float) else str(value) if number(value) is not None else ""


def method_of(row: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    from chai_cli.commands.show import spec

    try:
        return plain(spec(plain(row.get("method")), as_dict(request.get("reuse"))))
    except Exception:
        return plain(row.get("method"))


def notes(row: Mapping[str, Any]) -> list[str]:
    made = []
    words = row.get("unknown_words")
    if isinstance(words, list) and words:
        made.append(f"The model does not know: {', '.join(plain(word) for word in words)}")
    if whole(row.get("tokens_cut")) > 0:
        made.append(f"{whole(row['tokens_cut'])} tokens at the end of the prompt did not reach the model")
    return made


def repeat(request: dict[str, Any]) -> str:
    """The command that renders a request again; empty if the row does not say enough, or would type control characters."""
    from chai_cli.commands.show import command

    try:
        line = plain(command(request)) if isinstance(request["prompt"], str) else ""
    except Exception:
        return ""
    return "" if CONTROLS.search(line) else line


def totals(cards: Iterable[Card]) -> dict[str, Any]:
    """Figures of the header; those of reuse are of the videos that were looked up, as in `report.gains`."""
    cards = list(cards)
    hits = [one for one in cards if one["kind"] == "hit"]
    looked = [one for one in cards if one["kind"] in ("hit", "miss")]
    took, saved = sum(one["total"] for one in hits), sum(one["saved"] for one in hits)
    rest = sum(one["total"] for one in looked) - took
    failed = sum(one["kind"] == "failed" for one in cards)
    return {
        "videos": len(cards) - failed,
        "failed": failed,
        "hits": len(hits),
        "looked": len(looked),
        "hit_rate": len(hits) / len(looked) if looked else None,
        "on_hits": (took + saved) / took if took else None,
        "overall": (took + saved + rest) / (took + rest) if took else None,
        "calls_saved": sum(one["calls_saved"] for one in hits),
        "seconds_saved": saved,
        "seconds": sum(one["total"] for one in cards),
    }


def write(folder: Path, cards: Iterable[Card], planned: int | None = None) -> Path:
    """Write the page of some cards, see `put`; one of a run that goes on, with so many planned, looks for news by itself."""
    return put(folder, page(folder, in_order(cards), planned))


def put(folder: Path, text: str) -> Path:
    """Write a page, whole or not at all.

    Raises:
        OSError: it cannot be written.
        ChaiError: the folder has a page that chai did not write.
    """
    target = folder / PAGE
    if target.is_file():
        with target.open("rb") as file:
            if MARK.encode() not in file.read(1024):
                raise ChaiError(f"{target} is not one that chai wrote; move it away")
    scratch = folder / SCRATCH
    scratch.mkdir(exist_ok=True)
    part = scratch / f"index.{os.getpid()}.part.html"
    try:
        part.write_bytes(text.encode("utf-8", "replace"))
        os.replace(part, target)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return target


def in_order(cards: Iterable[Card]) -> list[Card]:
    """By number in the file of prompts, those without one last; bad lines that a later row has the number of are left out."""
    cards = list(cards)
    last = {one["index"]: one for one in cards}
    shown = [one for one in cards if one["file"] or last[one["index"]] is one]
    return sorted(shown, key=lambda one: (one["index"] is None, one["index"] or 0, one["key"]))


def page(folder: Path, cards: list[Card], planned: int | None = None) -> str:
    """The page as text. Adds to each card what lies in the folder: its video, its poster, its donor's video and picture.

    Args:
        planned: Videos of a run that goes on; None for a page of what is there.
    """
    videos, posters = listed(folder), listed(folder / POSTERS)
    sources: dict[str, Card] = {}
    for one in cards:
        one["video"] = one["kind"] != "failed" and one["file"] in videos
        one["poster"] = one["video"] and poster_name(one["file"]) in posters
        known = sources.get(one["prompt"])
        if one["video"] and (known is None or (known["kind"] == "hit" and one["kind"] != "hit")):
            sources[one["prompt"]] = one
    for one in cards:
        source = sources.get(one["donor_prompt"]) if one["donor_prompt"] else None
        one["source"] = source["key"] if source and source is not one else ""
        picture = f"donor-{one['donor']}.jpg"
        one["picture"] = picture if one["donor"] and picture in posters else ""
    return filled(
        "page",
        ("page.css",),
        {"cards": cards, "again": None if planned is None else AGAIN, "written": time.time()},
        planned=planned,
        name=plain(folder.resolve().name) or "videos",
        totals=totals(cards),
        span=span,
        models=common(cards, "model"),
    )


def filled(template: str, sheets: Sequence[str], data: Mapping[str, Any], **told: Any) -> str:
    """A page of its template, with its style and script in it and their hashes in its policy.

    Args:
        template: Its name, which is the script's too.
        sheets: Style sheets, one after the other.
        data: For the script.
        told: For the template.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    css = "\n".join((HERE / sheet).read_text("utf-8") for sheet in sheets)
    js = (HERE / f"{template}.js").read_text("utf-8")
    environment = Environment(autoescape=True, loader=FileSystemLoader(HERE), undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(f"{template}.html.j2").render(
        mark=Markup(MARK),
        written=time.strftime("%Y-%m-%d %H:%M"),
        style=Markup(css),
        script=Markup(js),
        style_hash=digest(css),
        script_hash=digest(js),
        data=Markup(script_json(data)),
        **told,
    )


def span(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def common(cards: Iterable[Card], name: str) -> str:
    """The values of a setting, if they are few."""
    found = dict.fromkeys(value for one in cards for key, value in one["settings"] if key == name)
    return ", ".join(found) if len(found) <= 2 else f"{len(found)} models"


def listed(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def digest(text: str) -> str:
    """The source expression that lets a Content-Security-Policy pass this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def script_json(value: Any) -> str:
    """JSON that no HTML parser takes for the end of its script, and no old one for the end of a line: ASCII without <, > and &."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def poster_name(file: str) -> str:
    return f"{Path(file).stem}.jpg"


def make_poster(folder: Path, file: str) -> None:
    """Write the middle frame of a video into `posters/` unless a newer one is there; a broken video gets none."""
    if not file:
        return
    video, target = folder / file, folder / POSTERS / poster_name(file)
    part = folder / SCRATCH / f"poster.{os.getpid()}.part.jpg"
    try:
        made = video.stat().st_mtime_ns
        if target.is_file() and target.stat().st_mtime_ns >= made:
            return
        target.unlink(missing_ok=True)
        for needed in (target.parent, part.parent):
            needed.mkdir(exist_ok=True)
        if draw(video, part):
            os.replace(part, target)
    except OSError:
        return
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def draw(video: Path, target: Path) -> bool:
    """The middle frame of a video as a JPEG; False if there is none to be read."""
    from chai_cli.video import ffmpeg

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ffmpeg(*arguments), capture_output=True, stdin=subprocess.DEVNULL, start_new_session=True, timeout=60
        )

    try:
        told = run("-loglevel", "info", "-i", str(video)).stderr.decode("utf-8", "replace")
        length, rate = re.search(r"Duration: (\d+):(\d+):(\d+\.\d+)", told), re.search(r"([\d.]+) fps", told)
        hours, minutes, seconds = map(float, length.groups()) if length else (0.0, 0.0, 0.0)
        before = (
            (3600 * hours + 60 * minutes + seconds) / 2 - 1 / float(rate[1]) if rate else 0.0
        )  # ffmpeg takes the frame after it
        middle = f"{max(0.0, before):.4f}"
        frame = ["-ss", middle, "-i", str(video), "-frames:v", "1", "-threads", "1"]
        look = ["-vf", f"scale='min({POSTER_WIDTH},iw)':-2", "-q:v", "4", "-y", str(target)]
        process = run(*frame, *look)
    except (subprocess.SubprocessError, ValueError, ZeroDivisionError):
        return False
    return process.returncode == 0 and target.is_file() and target.stat().st_size > 0
