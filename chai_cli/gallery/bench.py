"""A bench into `index.html`: what `bench.json` says, and the clips that lie beside it.

The dictionary may be of an earlier chai, and its rows and prompts are whatever people write: as in the gallery, every value is brought to
a known form here and leaves as JSON that the page's script sets as text.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chai_cli.bench.output import FEW, read_document
from chai_cli.bench.run import REFERENCE, safe
from chai_cli.bench.statistics import Frontier, Setting
from chai_cli.embedded.world import ATTRIBUTES
from chai_cli.errors import ChaiError
from chai_cli.gallery.page import PAGE, as_dict, filled, listed, number, plain, put, whole

NUMBERS = ("calls", "seconds", "speedup", "fidelity", "clip_t", "psnr", "ssim", "worth", "unsafe", "unsafe_bound", "drift")
READ = tuple(ATTRIBUTES)
CUT = 4000  # characters of a text, at most

Bench = dict[str, Any]


def build_bench(folder: Path) -> Path:
    """Make the page of a bench again from its `bench.json`.

    Returns:
        The page.

    Raises:
        ChaiError: there is no such file, or the page cannot be written.
    """
    return write_bench(folder, read_document(Path(folder)))


def write_bench(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write the page of a bench, whole or not at all.

    Args:
        folder: Where `videos/` may lie, and the page goes.
        document: What `output.document` makes.

    Raises:
        ChaiError: the folder has a page that chai did not write, or the page cannot be written.
    """
    folder = Path(folder)
    try:
        return put(folder, bench_page(folder, document))
    except OSError as error:
        raise ChaiError(f"cannot write {folder / PAGE}: {error.strerror or error}") from None
    except RecursionError:
        raise ChaiError(f"cannot write {folder / PAGE}: the bench is nested too deeply") from None


def bench_page(folder: Path, document: Mapping[str, Any]) -> str:
    """The page as text."""
    bench = known(document)
    return filled(
        "bench",
        ("page.css", "bench.css"),
        {**bench, "videos": clips(folder, bench), "attributes": READ, "reference": REFERENCE, "few": FEW},
        name=plain(folder.resolve().name) or "bench",
        told=told(document),
        bench=bench,
        best=best(bench["rows"]),
        full=next((row for row in bench["rows"] if row["label"] == REFERENCE and row["shown"]), None),
        counts={kind: sum(row["kind"] == kind for row in bench["rows"]) for kind in ("reuse", "plain", "peer")},
        few=FEW,
    )


def told(document: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in the header."""
    machine, versions = as_dict(document.get("machine")), as_dict(document.get("versions"))
    threads = whole(machine.get("threads"))
    processor = [plain(machine.get(name)) for name in ("processor", "cpu_capability")]
    parts = [
        plain(machine.get("gpu")) or " ".join(filter(None, processor)),
        f"{threads} thread{'s' if threads > 1 else ''}" if threads else "",
        plain(machine.get("platform")),
        *(f"{plain(name)} {plain(value)}" for name, value in versions.items()),
    ]
    return {
        "model": cut(document.get("model")),
        "workload": cut(document.get("workload")).removeprefix("workload "),
        "machine": cut(", ".join(filter(None, parts))),
        "warnings": [cut(one) for one in as_list(document.get("warnings")) if plain(one)],
    }


def known(document: Mapping[str, Any]) -> Bench:
    """What the page shows of a bench, with every value of the kind that the script expects."""
    requests = [as_dict(one) for one in as_list(document.get("requests"))]
    scores, wrong = as_dict(document.get("scores")), as_dict(document.get("wrong"))
    options = as_dict(document.get("options"))
    own = plain(document.get("own_scheduler")) or own_solver(options)
    made = by_row(document.get("measurements"))
    cases = sorted({case for found in made.values() for case in found})
    aligned = len(cases) == len(requests)
    texts = Texts()
    rows = []
    for one in as_list(document.get("rows")):
        row = row_of(as_dict(one), options, own)
        if not row["label"]:
            continue
        found = made.get(row["label"], {})
        given = [number(value) for value in as_list(scores.get(one["label"]))]
        if aligned and len(given) == len(cases) == len(found) and None not in given:
            measured = [found[case] for case in cases]
            row["values"] = given
            row["cells"] = cells(measured, texts)
            row["wrong"] = misread(wrong.get(one["label"]), len(cases))
        row["points"] = points(row)
        rows.append(row)
    judged = any(row["shown"] and row["shown"]["attributes"] for row in rows)
    dense = next((row for row in rows if row["label"] == REFERENCE), None)
    for row in rows:
        row["outcomes"] = outcomes(row, dense) if judged and dense else ""
    mixed = any(row["rate"] is not None and row["rate"] < 1 for row in rows)
    plans = [row for row in rows if row["kind"] == "plain"]
    hulls = {"shown": hull(document.get("frontier")) or computed(plans, "shown"), "all": computed(plans, "all")}
    return {
        "rows": [{key: value for key, value in row.items() if key != "values"} for row in rows],
        "judged": judged,
        "exact": all(row["wrong"] is not None for row in rows if row["cells"]),
        "mixed": mixed,
        "frontiers": hulls,
        "cases": cases if aligned else [],
        "count": len(requests),
        "prompts": [cut(one.get("prompt")) for one in requests] if judged else [],
        "donors": donor_prompts(document) if judged else [],
        "texts": texts.all,
    }


class Texts:
    """Texts and readings that many cells share, each kept once."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.places: dict[Any, int] = {}

    def place(self, value: Any) -> int:
        if value not in self.places:
            self.places[value] = len(self.all)
            self.all.append(value)
        return self.places[value]


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def cut(value: Any) -> str:
    text = plain(value)
    return text if len(text) <= CUT else text[:CUT] + "…"


def row_of(row: Mapping[str, Any], options: Mapping[Any, Any], own: str) -> dict[str, Any]:
    """A row's figures, without what each request gave."""
    label, rate = cut(row.get("label")), number(row.get("hit_rate"))
    option = as_dict(options.get(row["label"])) if label else {}
    kind = kind_of(label, rate, option)
    hits, every = figures(row.get("hits")), figures(row.get("all"))
    bytes_ = number(row.get("entry_bytes"))
    return {
        "label": label,
        "kind": kind,
        "solver": plain(option.get("scheduler")) or own,
        "rate": rate,
        "shown": every if rate is None else hits,
        "all": every,
        "kib": None if bytes_ is None else bytes_ / 1024,
        "why": why_not(row, every),
        "cells": None,
        "values": [],
        "wrong": None,
    }


def kind_of(label: str, rate: float | None, option: Mapping[str, Any]) -> str:
    if option.get("reuse") is not None or rate is not None:
        return "reuse"
    if option.get("peer") is not None or label.partition(":")[0] != REFERENCE:
        return "peer"
    return "plain"


def why_not(row: Mapping[str, Any], every: Any) -> str:
    error = cut(row.get("error"))
    return f"not run: {error}" if error or every is None else "no hits"


def own_solver(options: Mapping[Any, Any]) -> str:
    """The model's own: the solver that plain rows name but never at full steps, for the reference is that."""
    rows = [as_dict(one) for one in options.values()]
    named = {plain(one.get("scheduler")) for one in rows if one.get("reuse") is None and one.get("peer") is None} - {""}
    full = {plain(one.get("scheduler")) for label, one in options.items() if plain(label).startswith(f"{REFERENCE}:scheduler=")}
    left = named - full
    return left.pop() if len(left) == 1 else "own"


def figures(value: Any) -> dict[str, Any] | None:
    """A `summary.Figures`; None if it lacks seconds or score."""
    told = as_dict(value)
    found: dict[str, Any] = {name: number(told.get(name)) for name in NUMBERS}
    if not found["seconds"] or found["seconds"] < 0 or found["fidelity"] is None:
        return None
    attributes = as_dict(told.get("attributes"))
    shares = [number(attributes.get(name)) for name in READ]
    found["attributes"] = shares if None not in shares else []
    found |= {name: difference(told.get(name)) for name in ("to_dense", "to_control", "to_frontier")}
    return found | {
        "count": whole(told.get("count")),
        "with_donor": whole(told.get("with_donor")),
        "control": cut(told.get("control")),
        "mib": number(told.get("peak_memory_mib")),
    }


def difference(value: Any) -> list[float | None] | None:
    """Mean, low and high end."""
    found = [number(as_dict(value).get(name)) for name in ("mean", "low", "high")]
    return found if found[0] is not None else None


def by_row(value: Any) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Measurements by row and request."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for one in as_list(value):
        made = as_dict(one)
        case = number(made.get("case"))
        if case is not None and case >= 0 and plain(made.get("row")):
            found.setdefault(cut(made["row"]), {})[int(case)] = made
    return found


def cells(measured: Sequence[Mapping[str, Any]], texts: Texts) -> dict[str, Any]:
    """What each request gave, in columns."""
    return {
        "hit": "".join("1" if one.get("hit") is True else "0" for one in measured),
        "seconds": [round(total(one), 4) for one in measured],
        "reading": [texts.place(reading(as_dict(one.get("seen")).get("reading"))) for one in measured],
        "why": [texts.place(cut(one.get("why"))) for one in measured],
        "donors": [texts.place(tuple(whole(at) for at in as_list(one.get("donors")))) for one in measured],
    }


def total(measurement: Mapping[str, Any]) -> float:
    return sum(max(0.0, number(value) or 0.0) for value in as_dict(measurement.get("seconds")).values())


def reading(value: Any) -> tuple[str, ...]:
    """What the judge read, by attribute; of several things one after the other."""
    told = as_dict(value)
    things = [as_dict(thing) for thing in as_list(told.get("things"))]
    read = (plain(told.get("background")), *(" + ".join(plain(one.get(name)) for one in things) for name in READ[1:]))
    return tuple(cut(one) for one in read)


def misread(value: Any, count: int) -> list[list[int]] | None:
    """For each request the attributes that are wrong, as places in `READ`."""
    found = as_list(value)
    if len(found) != count:
        return None
    return [[place for place, name in enumerate(READ) if name in as_list(one)] for one in found]


def outcomes(row: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    """A letter a request: right, gained (right where dense is wrong), wrong as dense is, lost (something that dense shows)."""
    if not row["values"] or len(row["values"]) != len(dense["values"]):
        return ""
    exact = row["wrong"] is not None and dense["wrong"] is not None
    made = []
    for at, (ours, theirs) in enumerate(zip(row["values"], dense["values"], strict=True)):
        lost = set(row["wrong"][at]) - set(dense["wrong"][at]) if exact else ours < theirs
        made.append("l" if lost else ("g" if theirs < ours else "r") if ours else "w")
    return "".join(made)


def points(row: Mapping[str, Any]) -> dict[str, list[float] | None]:
    """Seconds, score and half of the 95 % interval, over the requests that speak for a row (`shown`) and over all, in the mean."""
    shown, every = row["shown"], row["all"]
    values = row["values"]
    taken = row["cells"]["seconds"] if row["cells"] else []
    hits = [value for value, hit in zip(values, row["cells"]["hit"], strict=True) if hit == "1"] if row["cells"] else []
    mean = [statistics.fmean(taken), statistics.fmean(values)] if taken and any(taken) else None
    if mean is None and every:
        mean = [every["seconds"], every["fidelity"]]
    return {
        "shown": [shown["seconds"], shown["fidelity"], spread(values if row["rate"] is None else hits)] if shown else None,
        "all": [*mean, spread(values)] if mean else None,
    }


def spread(values: Sequence[float]) -> float:
    return 1.96 * statistics.pstdev(values) / len(values) ** 0.5 if values else 0.0


def hull(value: Any) -> list[list[float]]:
    """Seconds and score of each setting of the frontier as the document has it."""
    found = []
    for one in as_list(value):
        seconds, score = number(as_dict(one).get("seconds")), number(as_dict(one).get("fidelity"))
        scores = [number(each) for each in as_list(as_dict(one).get("scores"))]
        if score is None and scores and None not in scores:
            score = statistics.fmean(each for each in scores if each is not None)
        if seconds and seconds > 0 and score is not None:
            found.append([seconds, score])
    return sorted(found)


def computed(rows: Sequence[Mapping[str, Any]], view: str) -> list[list[float]]:
    settings = [Setting(row["label"], row["points"][view][0], (row["points"][view][1],)) for row in rows if row["points"][view]]
    return [[one.seconds, one.fidelity] for one in Frontier(settings).hull]


def donor_prompts(document: Mapping[str, Any]) -> list[str]:
    workload = as_dict(as_dict(document.get("asked")).get("workload"))
    return [cut(as_dict(one).get("prompt")) for one in as_list(workload.get("donors"))]


def best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row that reuses whose gain over the frontier has the highest low end."""
    gains = [row for row in rows if row["kind"] == "reuse" and row["shown"] and row["shown"]["to_frontier"]]
    return max(gains, key=lambda row: low_end(row["shown"]["to_frontier"]), default=None)


def low_end(gain: Sequence[float | None]) -> float:
    low = gain[1] if gain[1] is not None else gain[0]
    assert low is not None
    return low


def clips(folder: Path, bench: Bench) -> dict[str, Any]:
    """For each row that has any, the folder of its clips and the requests of which there is one."""
    there = listed(folder / "videos")
    if not there or not bench["judged"]:
        return {}
    found = {}
    for row in bench["rows"]:
        name = safe(row["label"])
        files = listed(folder / "videos" / name) if name in there else set()
        kept = [place for place, case in enumerate(bench["cases"]) if f"{case:04d}.mp4" in files]
        if kept:
            found[row["label"]] = {"folder": name, "kept": kept}
    return found
