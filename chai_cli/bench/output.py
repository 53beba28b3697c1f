"""What a bench leaves behind: `bench.json`, tables, two plots, and the comparison of two benches."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chai_cli.backbones.base import Backbone
from chai_cli.batch import versions
from chai_cli.bench.gates import changes, gates
from chai_cli.bench.statistics import Frontier
from chai_cli.bench.summary import Difference, Figures, Summary, Table
from chai_cli.bench.workload import Workload
from chai_cli.errors import ChaiError

FORMAT = 1


def machine(backbone: Backbone) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "device": str(backbone.device),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if backbone.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(backbone.device)
    return found


def document(table: Table, summaries: Sequence[Summary], backbone: Backbone) -> dict[str, Any]:
    """Everything, as it goes into `bench.json`."""
    return {
        "format": FORMAT,
        "versions": versions(),
        "machine": machine(backbone),
        "model": backbone.record.name,
        "fingerprint": backbone.fingerprint,
        "score": score_name(table),
        "workload": {
            "name": table.workload.name,
            "policy": table.workload.policy,
            **table.workload.parameters,
            "measured": len(table.cases),
        },
        "requests": [
            {"prompt": table.workload.cases[i].prompt, "seed": table.workload.cases[i].settings.seed} for i in table.cases
        ],
        "rows": [one.json() for one in summaries],
        "gates": [asdict(one) for one in gates(table)],
        "changes": [asdict(one) for one in changes(table)],
        "scores": {
            one.label: [table.score(one.label, i) for i in table.cases] for one in summaries if not one.error and table.cases
        },
        "measurements": [asdict(table.made[one.label, i]) for one in summaries if not one.error for i in table.cases],
    }


def score_name(table: Table) -> str:
    return "four attributes right" if table.judged else "CLIP-T"


def shown(summary: Summary) -> Figures | None:
    """The figures that speak for a row: over its hits, or over all requests where it reuses nothing."""
    return summary.hits or summary.all


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def differs(value: Difference | None, judged: bool) -> str:
    if value is None:
        return "-"
    if judged:
        return f"{100 * value.mean:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"
    return f"{value.mean:+.4f} [{value.low:+.4f}, {value.high:+.4f}]"


WIDTH = 160  # columns of tables that go into a file or a pipe
SPEED = ("row", "hit rate", "n", "calls", "seconds", "x on hits", "x overall", "1/(h/s+1-h)", "MiB", "entry KiB")
FIDELITY = (
    "row",
    "n",
    "score",
    "to dense",
    "to control",
    "to frontier",
    "worth",
    "unsafe",
    "bound",
    "drift",
    "CLIP-T",
    "PSNR",
    "SSIM",
)


def speed_cells(one: Summary) -> list[str]:
    figures = shown(one)
    if figures is None or one.all is None:
        return [one.label, f"not run: {one.error}"]
    on_hits = f"{one.hits.speedup:.2f}" if one.hits else "-" if one.hit_rate is not None else f"{figures.speedup:.2f}"
    return [
        one.label,
        "-" if one.hit_rate is None else f"{100 * one.hit_rate:.0f} %",
        str(figures.count),
        f"{figures.calls:.0f}",
        f"{figures.seconds:.3f}",
        on_hits,
        f"{one.all.speedup:.2f}",
        "-" if one.expected_speedup is None else f"{one.expected_speedup:.2f}",
        f"{figures.peak_memory_mib:.0f}",
        "-" if one.entry_bytes is None else f"{one.entry_bytes / 1024:.1f}",
    ]


def fidelity_cells(one: Summary, judged: bool) -> list[str]:
    figures = shown(one)
    if figures is None:
        return [one.label, f"not run: {one.error}"]
    return [
        one.label,
        str(figures.count),
        percent(figures.fidelity) if judged else f"{figures.fidelity:.4f}",
        differs(figures.to_dense, judged),
        differs(figures.to_control, judged),
        differs(figures.to_frontier, judged),
        "never" if figures.worth is None else f"{figures.worth:.2f}",
        "-" if figures.unsafe is None else str(figures.unsafe),
        percent(figures.unsafe_bound),
        "-" if figures.drift is None or one.hit_rate is None else str(figures.drift),
        f"{figures.clip_t:.4f}",
        f"{figures.psnr:.1f}",
        f"{figures.ssim:.3f}",
    ]


def print_tables(table: Table, summaries: Sequence[Summary]) -> None:
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    title = f"{len(table.cases)} requests, workload {table.workload.name}, {table.workload.policy}; score: {score_name(table)}"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    for name, columns, cells in (
        ("speed", SPEED, speed_cells),
        ("fidelity", FIDELITY, lambda one: fidelity_cells(one, table.judged)),
    ):
        grid = Grid(title=name, title_justify="left")
        for number, column in enumerate(columns):
            grid.add_column(column, justify="right" if number else "left", overflow="fold", min_width=0 if number else 20)
        for one in summaries:
            made = cells(one)
            grid.add_row(*map(Text, made + [""] * (len(columns) - len(made))))
        console.print(grid)
    console.print(
        "Rows that reuse are shown over their hits, others over all requests. worth: seconds that the best plain sampling needs for "
        "the same score, over the row's. Intervals: 95 %, bootstrap over requests. unsafe: requests that lost an attribute which dense "
        "shows; bound: what the true share stays below (95 %, Clopper-Pearson).",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def markdown(table: Table, summaries: Sequence[Summary]) -> str:
    """The fidelity and speed of each row as one table."""
    columns = ["row", "n", "calls", "seconds", "x", "score", "to dense", "to control", "to frontier", "worth", "unsafe (bound)"]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for one in summaries:
        figures = shown(one)
        if figures is None:
            lines.append(f"| {one.label} | not run: {one.error} |" + " |" * (len(columns) - 2))
            continue
        cells = fidelity_cells(one, table.judged)
        unsafe = "-" if figures.unsafe is None else f"{figures.unsafe} ({percent(figures.unsafe_bound)} %)"
        parts = [cells[1], f"{figures.calls:.0f}", f"{figures.seconds:.2f}", f"{figures.speedup:.2f}", *cells[2:7], unsafe]
        lines.append(f"| {one.label} | {' | '.join(parts)} |")
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
    made = []
    worked = [(one, one.all) for one in summaries if one.all is not None]
    plain = {row.label: row.scheduler or table.own_scheduler or "own" for row in table.rows if row.plain}
    scale = 100 if table.judged else 1
    figure, axes = pyplot.subplots(figsize=(9, 6))
    for solver in dict.fromkeys(plain.values()):
        points = sorted((f.seconds, scale * f.fidelity) for one, f in worked if plain.get(one.label) == solver)
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, linewidth=1, label=f"plain, {solver}")
    hull = Frontier(table.settings(table.cases)).hull
    axes.plot([s.seconds for s in hull], [scale * s.fidelity for s in hull], "k--", linewidth=1, label="plain, best mix")
    for number, (one, figures) in enumerate([pair for pair in worked if pair[0].label not in plain]):
        scores = [table.score(one.label, i) for i in table.cases]
        error = 1.96 * scale * (statistics.pstdev(scores) / len(scores) ** 0.5)
        marker = "sD^vP*X<>hp8"[number % 12]
        axes.errorbar(figures.seconds, scale * figures.fidelity, error, fmt=marker, capsize=2, label=one.label)
    axes.set_xlabel("seconds a request")
    axes.set_ylabel("four attributes right, %" if table.judged else "CLIP-T")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    made.append(folder / "speed-fidelity.png")
    figure.savefig(made[-1], dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    if table.judged:
        made.append(attribute_plot(pyplot, worked, folder, set(plain)))
    return made


def attribute_plot(pyplot: Any, worked: Sequence[tuple[Summary, Figures]], folder: Path, plain: set[str]) -> Path:
    """One line of points for each row that reuses, its controls and dense."""
    controls = {figures.control for one, figures in worked if one.label not in plain} | {"dense"}
    rows = [(one, shown(one)) for one, _ in worked if one.label not in plain or one.label in controls]
    names = list(next(figures for _, figures in worked).attributes)
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.35 * len(rows)))
    for number, name in enumerate(names):
        values = [100 * figures.attributes[name] for _, figures in rows if figures]
        axes.plot(values, range(len(values)), "os^Dv"[number % 5], label=name, alpha=0.8)
    axes.set_yticks(range(len(rows)), [one.label for one, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("clips with the attribute right, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path = folder / "attributes.png"
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    return path


def compare(first: Path, second: Path) -> str:
    """Two benches, row by row. Scores of the same requests are compared in pairs."""
    ours, theirs = (read_document(path) for path in (first, second))
    lines = []
    for name in ("model", "fingerprint", "score", "workload", "machine", "versions"):
        if ours[name] != theirs[name]:
            lines.append(f"{name} differs: {ours[name]} / {theirs[name]}")
    same = ours["requests"] == theirs["requests"]
    if not same:
        lines.append("the requests differ: scores are not compared in pairs")
    there = {row["label"]: row for row in theirs["rows"]}
    lines += ["", "| row | seconds | score | difference of scores |", "| --- | ---: | ---: | ---: |"]
    for row in ours["rows"]:
        other = there.get(row["label"])
        if other is None or not row["all"] or not other["all"]:
            lines.append(f"| {row['label']} | only in one of the two | | |")
            continue
        seconds = f"{row['all']['seconds']:.3f} / {other['all']['seconds']:.3f}"
        score = f"{row['all']['fidelity']:.4f} / {other['all']['fidelity']:.4f}"
        label = row["label"]
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
