"""What a bench leaves behind: `bench.json`, tables, two plots, and the comparison of two benches."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from chai_cli.backbones.base import Backbone
from chai_cli.bench.gates import changes, gates
from chai_cli.bench.run import REFERENCE
from chai_cli.bench.statistics import Frontier
from chai_cli.bench.summary import Difference, Figures, Summary, Table
from chai_cli.bench.workload import Workload
from chai_cli.embedded.world import ATTRIBUTES
from chai_cli.errors import ChaiError
from chai_cli.machine import processor, versions

FORMAT = 1


def machine(backbone: Backbone) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "device": str(backbone.device),
        "platform": platform.platform(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if backbone.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(backbone.device)
    return found


def document(table: Table, summaries: Sequence[Summary], backbone: Backbone, asked: dict[str, Any]) -> dict[str, Any]:
    """Everything, as it goes into `bench.json`.

    Args:
        asked: What the bench was asked to do: model, workload, settings, cache.
    """
    return {
        "format": FORMAT,
        "versions": versions(),
        "machine": machine(backbone),
        "model": backbone.record.name,
        "asked": asked,
        "own_scheduler": table.own_scheduler,
        "score": score_name(table),
        "workload": workload_words(table.workload),
        "warnings": warnings(table),
        "requests": [
            {"prompt": table.workload.cases[i].prompt, **asdict(table.workload.cases[i].settings)} for i in table.cases
        ],
        "rows": [asdict(one) for one in summaries],
        "options": {row.label: asdict(row) for row in table.rows},
        "frontier": [asdict(one) for one in Frontier(table.settings(table.cases, statistics.median)).hull]
        if table.cases
        else [],
        "gates": [asdict(one) for one in gates(table)],
        "changes": [asdict(one) for one in changes(table)],
        "scores": {
            one.label: [table.score(one.label, i) for i in table.cases] for one in summaries if not one.error and table.cases
        },
        "wrong": {
            one.label: [[name for name, fine in table.right(one.label, i).items() if not fine] for i in table.cases]
            for one in summaries
            if not one.error and table.judged
        },
        "measurements": [asdict(table.made[one.label, i]) for one in summaries if not one.error for i in table.cases],
    }


def score_name(table: Table) -> str:
    return "four attributes right" if table.judged else "CLIP-T"


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def differs(value: Difference | None, judged: bool, count: int) -> str:
    if value is None:
        return "-"
    scale, digits = (100, 1) if judged else (1, 4)
    mean, low, high = (f"{scale * x:+.{digits}f}" for x in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]" if count >= FEW else mean


WIDTH = 170  # columns of tables that go into a file or a pipe
LABEL = 60  # columns of a row's name
FEW = 10  # requests, under which an interval says nothing
SPEED = ("row", "hit rate", "n", "calls", "seconds", "x on hits", "x overall", "1/(h/s+1-h)", "MiB", "entry KiB")
FIDELITY = ("row", "n", "score", "to dense", "to control", "to frontier", "worth", "unsafe", "bound", "drift")
CLIPS = ("row", "n", "CLIP-T", "PSNR", "SSIM", "flicker")


def speed_cells(one: Summary) -> list[str]:
    figures = one.shown
    if figures is None or one.all is None:
        rate = "-" if one.hit_rate is None else f"{100 * one.hit_rate:.0f} %"
        return [one.label, rate, one.why_not()]
    return [
        one.label,
        "-" if one.hit_rate is None else f"{100 * one.hit_rate:.0f} %",
        str(figures.count),
        f"{figures.calls:.0f}",
        f"{figures.seconds:.3f}",
        f"{figures.speedup:.2f}",
        f"{one.all.speedup:.2f}",
        "-" if one.expected_speedup is None else f"{one.expected_speedup:.2f}",
        f"{figures.peak_memory_mib:.0f}",
        "-" if one.entry_bytes is None else f"{one.entry_bytes / 1024:.1f}",
    ]


def fidelity_cells(label: str, figures: Figures, judged: bool) -> list[str]:
    return [
        label,
        str(figures.count),
        percent(figures.fidelity) if judged else f"{figures.fidelity:.4f}",
        differs(figures.to_dense, judged, figures.count),
        differs(figures.to_control, judged, figures.count),
        differs(figures.to_frontier, judged, figures.count),
        "never" if figures.worth is None else f"{figures.worth:.2f}",
        "-" if figures.unsafe is None else str(figures.unsafe),
        percent(figures.unsafe_bound),
        "-" if figures.drift is None else f"{figures.drift} of {figures.with_donor}",
    ]


def clip_cells(label: str, figures: Figures) -> list[str]:
    likeness = [f"{figures.clip_t:.4f}", f"{figures.psnr:.1f}", f"{figures.ssim:.3f}", f"{figures.flicker:.2f}"]
    return [label, str(figures.count), *likeness, *(percent(value) for value in figures.attributes.values())]


def print_tables(table: Table, summaries: Sequence[Summary]) -> None:
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    title = f"{len(table.cases)} requests, workload {table.workload.name}, {table.workload.policy}; score: {score_name(table)}"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    clips = (*CLIPS, *ATTRIBUTES) if table.judged else CLIPS

    def own(one: Summary, cells: Callable[[Figures], list[str]]) -> list[str]:
        return cells(one.shown) if one.shown else [one.label, one.why_not()]

    tables = [
        ("speed", SPEED, [speed_cells(one) for one in summaries]),
        ("fidelity", FIDELITY, [own(one, partial(fidelity_cells, one.label, judged=table.judged)) for one in summaries]),
        ("clips", clips, [own(one, partial(clip_cells, one.label)) for one in summaries]),
    ]
    if differently(summaries):
        rows = [fidelity_cells(one.label, one.common, table.judged) for one in summaries if one.common]
        tables.append(("fidelity on the requests that all rows hit which hit any", FIDELITY, rows))
    for name, columns, rows in tables:
        grid = Grid(title=name, title_justify="left")
        widest = min(LABEL, max(len(row[0]) for row in rows))
        for number, column in enumerate(columns):
            grid.add_column(column, justify="right" if number else "left", overflow="fold", min_width=0 if number else widest)
        for row in rows:
            grid.add_row(*map(Text, row + [""] * (len(columns) - len(row))))
        console.print(grid)
    console.print(
        "Rows that reuse are shown over their hits, others over all requests. worth: seconds that the best plain sampling needs for "
        "the same score, over the row's. Intervals: 95 %, bootstrap over requests. unsafe: requests that lost an attribute which dense "
        "shows; bound: what the true share stays below (95 %, Clopper-Pearson); drift: those that show the donor's attribute instead. "
        "PSNR, SSIM and flicker (1 is as steady) are against the dense clip of the same request: how different, not how good.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def differently(summaries: Sequence[Summary]) -> bool:
    """Whether rows that reuse hit different requests."""
    counts = {one.hits.count for one in summaries if one.hits}
    return any(one.common and one.hits and one.common.count != one.hits.count for one in summaries) or len(counts) > 1


def warnings(table: Table) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    if table.dropped:
        found.append(f"{table.dropped} requests are left out of all figures because some row failed on them")
    if (timed := len(table.timed(table.cases))) < len(table.cases):
        found.append(f"seconds are of the {timed} of {len(table.cases)} requests that all rows rendered in one run")
    for label, count in table.sessions().items():
        found.append(
            f"{label}: {count} of {len(table.cases)} requests were timed in another run than dense; do not trust its seconds"
        )
    return found


def markdown(table: Table, summaries: Sequence[Summary]) -> str:
    """The fidelity and speed of each row as one table."""
    columns = ["row", "hit rate", "n", "calls", "seconds", "x", "x overall", "1/(h/s+1-h)", *FIDELITY[2:]]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for one in summaries:
        cells = speed_cells(one)[:8]
        if one.shown:
            cells += fidelity_cells(one.label, one.shown, table.judged)[2:]
        lines.append(f"| {' | '.join(cells + [''] * (len(columns) - len(cells)))} |")
    return "\n".join(lines)


def plots(table: Table, summaries: Sequence[Summary], folder: Path) -> list[Path]:
    """Speed against score, and the score by attribute.

    Raises:
        ChaiError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ChaiError("no plots: matplotlib is missing; pip install 'chai-cli[bench]'") from None
    made = [frontier_plot(pyplot, table, summaries, folder / "speed-fidelity.png", "score")]
    if table.judged:
        made.append(attribute_plot(pyplot, table, summaries, folder / "attributes.png"))
    else:
        made.append(frontier_plot(pyplot, table, summaries, folder / "speed-likeness.png", "psnr"))
    return made


def frontier_plot(pyplot: Any, table: Table, summaries: Sequence[Summary], path: Path, what: str) -> Path:
    """Mean seconds of a request against the score, or against likeness to dense; bars are 95 % of the mean."""
    worked = [(one, one.all) for one in summaries if one.all is not None]
    plain = {row.label: row.scheduler or table.own_scheduler or "own" for row in table.rows if row.plain}
    scale = 100 if table.judged and what == "score" else 1

    def point(label: str) -> tuple[float, float, float]:
        seconds = statistics.fmean(table.made[label, i].total for i in table.timed(table.cases))
        if what == "psnr":
            values = [float(table.made[label, i].seen["psnr"]) for i in table.cases]
        else:
            values = [table.score(label, i) for i in table.cases]
        spread = 1.96 * statistics.pstdev(values) / len(values) ** 0.5
        return seconds, scale * statistics.fmean(values), scale * spread

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for solver in dict.fromkeys(plain.values()):
        points = sorted(point(one.label)[:2] for one, _ in worked if plain.get(one.label) == solver)
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, linewidth=1, label=f"plain, {solver}")
    if what == "score":
        hull = Frontier(table.settings(table.cases, statistics.fmean)).hull
        axes.plot([s.seconds for s in hull], [scale * s.fidelity for s in hull], "k--", linewidth=1, label="plain, best mix")
    for number, one in enumerate(one for one, _ in worked if one.label not in plain):
        seconds, value, spread = point(one.label)
        axes.errorbar(seconds, value, spread, fmt="sD^vP*X<>hp8"[number % 12], capsize=2, label=one.label)
    axes.set_title(f"{len(table.cases)} requests, {table.workload.name}, {table.workload.policy}", fontsize=9)
    axes.set_xlabel("seconds a request, mean over all requests")
    axes.set_ylabel("PSNR to dense, dB" if what == "psnr" else "four attributes right, %" if table.judged else "CLIP-T")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    return path


def attribute_plot(pyplot: Any, table: Table, summaries: Sequence[Summary], path: Path) -> Path:
    """One line of points for each row that reuses, its controls and dense."""
    plain = {row.label for row in table.rows if row.plain}
    controls = {label for one in summaries if one.shown for label in one.shown.control.split(", ") if one.label not in plain}
    rows = [one for one in summaries if one.shown and (one.label not in plain or one.label in controls | {REFERENCE})]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.35 * len(rows)))
    for number, name in enumerate(ATTRIBUTES):
        values = [100 * one.shown.attributes[name] for one in rows if one.shown]
        axes.plot(values, range(len(values)), "os^Dv"[number % 5], label=name, alpha=0.8)
    axes.set_yticks(range(len(rows)), [f"{one.label} (n={one.shown.count})" for one in rows if one.shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("clips with the attribute right, %: over hits, or over all requests for rows that reuse nothing")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    return path


def compare(first: Path, second: Path) -> str:
    """Two benches, row by row. Scores of the same requests are compared in pairs."""
    ours, theirs = (read_document(path) for path in (first, second))
    lines = []
    for name in ("model", "asked", "score", "workload", "machine", "versions"):
        if ours[name] != theirs[name]:
            lines.append(f"{name} differs: {ours[name]} / {theirs[name]}")
    same = ours["requests"] == theirs["requests"] and ours["score"] == theirs["score"]
    if not same:
        lines.append("requests or score differ: scores are not compared in pairs")
    counts = f"n {len(ours['requests'])} / {len(theirs['requests'])}"
    lines += ["", f"| row, {counts} | seconds | score | second less first |", "| --- | ---: | ---: | ---: |"]
    there = {row["label"]: row for row in theirs["rows"]}
    for row in ours["rows"]:
        label, other = row["label"], there.get(row["label"])
        if other is None:
            lines.append(f"| {label} | only in {first} | | |")
            continue
        if not row["all"] or not other["all"]:
            lines.append(f"| {label} | not run: {row['error'] or other['error']} | | |")
            continue
        seconds = f"{row['all']['seconds']:.3f} / {other['all']['seconds']:.3f}"
        score = f"{row['all']['fidelity']:.4f} / {other['all']['fidelity']:.4f}"
        told = "-"
        if same:
            found = Difference.of(theirs["scores"][label], ours["scores"][label])
            told = f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
        lines.append(f"| {label} | {seconds} | {score} | {told} |")
    lines += [f"| {label} | only in {second} | | |" for label in there if label not in {row["label"] for row in ours["rows"]}]
    return "\n".join(lines)


def read_document(path: Path) -> dict[str, Any]:
    """A `bench.json`, or the one in a folder.

    Raises:
        ChaiError: it is not there, or not such a file.
    """
    file = path / "bench.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise ChaiError(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError:
        raise ChaiError(f"{file} is not a bench.json: it is no JSON") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not {"rows", "scores", "requests"} <= found.keys():
        raise ChaiError(f"{file} is not a bench.json of this version of chai")
    return found


def workload_words(workload: Workload) -> str:
    told = ", ".join(f"{key} {value}" for key, value in workload.parameters.items())
    return f"workload {workload.name}, {workload.policy}: {told}"
