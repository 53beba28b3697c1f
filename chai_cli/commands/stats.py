"""`chai stats`: what the cache is worth."""

from __future__ import annotations

import json as json_module
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from chai_cli.cache import FIRST_ESTIMATE, Event, folder, format_bytes
from chai_cli.commands.cache import CacheOption, console, opened
from chai_cli.report import percentile

DONORS = 10  # shown
PERIODS = 14  # shown; --json has all
DAY = 86400


def stats(
    cache: CacheOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what the cache holds, how often it helped, and what that saved."""
    with opened(cache) as store:
        lone = sum(entry.latents == FIRST_ESTIMATE for entry in store.entries())
        held = {"entries": len(store), "first_estimates": lone, "used_bytes": store.used(), "file_bytes": store.file_bytes()}
        events = [Event.read(row) for row in store.events()]
    found = {"cache": str(folder(cache)), **held, **summary(events)}
    if json:
        typer.echo(json_module.dumps(found, ensure_ascii=False))
    elif not (held["entries"] or events):
        typer.echo(f"the cache at {folder(cache)} is empty; chai gen fills it")
    else:
        print_tables(found)


def summary(events: list[Event]) -> dict[str, Any]:
    """Figures of a log: all, by model, over time, and by donor."""
    looks = [event for event in events if event.kind in ("hit", "miss")]
    hits = [event for event in looks if event.kind == "hit"]
    return {
        **figures(looks),
        "seconds_saved": sum(event.saved for event in hits),
        "calls_saved": sum(event.calls_saved for event in hits),
        "models": {model: figures(some) for model, some in groups(looks, lambda event: event.model)},
        "over_time": [{"from": start, **rate(some)} for start, some in groups(looks, period(looks))],
        "donors": donors(hits),
    }


def groups(events: Iterable[Event], key: Callable[[Event], str]) -> list[tuple[str, list[Event]]]:
    made = defaultdict(list)
    for event in events:
        made[key(event)].append(event)
    return sorted(made.items())


def period(events: list[Event]) -> Callable[[Event], str]:
    """The day of an event, or its hour where all lie within a day; local time."""
    times = [event.time for event in events]
    form = "%Y-%m-%d %H:00" if times and max(times) - min(times) <= DAY else "%Y-%m-%d"
    return lambda event: time.strftime(form, time.localtime(event.time))


def rate(looks: list[Event]) -> dict[str, Any]:
    hits = sum(event.kind == "hit" for event in looks)
    return {"lookups": len(looks), "hits": hits, "hit_rate": hits / len(looks) if looks else None}


def figures(looks: list[Event]) -> dict[str, Any]:
    """Hit rate, and the seconds that half and nine tenths of the hits and of the misses stay below."""
    made = rate(looks)
    for kind, name in (("hit", "hit_seconds"), ("miss", "miss_seconds")):
        taken = [event.seconds for event in looks if event.kind == kind]
        made[name] = {"p50": percentile(taken, 0.5) if taken else None, "p90": percentile(taken, 0.9) if taken else None}
    return made


def donors(hits: list[Event]) -> list[dict[str, Any]]:
    """The donors with the most hits."""
    rows: list[dict[str, Any]] = [
        {"id": id, "prompt": some[-1].donor_prompt, "hits": len(some), "seconds_saved": sum(event.saved for event in some)}
        for id, some in groups([hit for hit in hits if hit.donor], lambda event: event.donor)
    ]
    return sorted(rows, key=lambda row: (-row["hits"], -row["seconds_saved"]))[:DONORS]


def print_tables(found: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    output = console()

    def say(text: str) -> None:
        output.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left", overflow="ellipsis", no_wrap=True, max_width=60)
        for row in rows:
            table.add_row(*map(Text, row))
        output.print(table)

    used, size = format_bytes(found["used_bytes"]), format_bytes(found["file_bytes"])
    say(f"{found['cache']}: {found['entries']} entries, {used} used of a file of {size}")
    if found["first_estimates"]:
        say(f"{found['first_estimates']} of them are first estimates, which hits leave for later ones; the others full renders")
    if not found["lookups"]:
        say("no look-ups yet")
        return
    say(f"{found['lookups']} look-ups, {found['hits']} hits ({share(found)}), {found['seconds_saved']:.1f} s saved by them")
    columns = ["model", "look-ups", "hit rate", "hit p50", "hit p90", "miss p50", "miss p90"]
    everything = {"all": found} if len(found["models"]) > 1 else {}
    rows = []
    for model, row in (found["models"] | everything).items():
        spans = [row[kind][part] for kind in ("hit_seconds", "miss_seconds") for part in ("p50", "p90")]
        rows.append([model, str(row["lookups"]), share(row), *("-" if span is None else f"{span:.2f} s" for span in spans)])
    show("seconds a video", columns, rows)
    rows = [[row["from"], str(row["lookups"]), share(row)] for row in found["over_time"][-PERIODS:]]
    show("over time", ["from", "look-ups", "hit rate"], rows)
    if found["donors"]:
        rows = [[row["prompt"], str(row["hits"]), f"{row['seconds_saved']:.1f} s"] for row in found["donors"]]
        show("donors", ["prompt", "hits", "saved"], rows)
    elif found["hits"]:
        say("hits that learned from all renders have no donor of their own")


def share(row: dict[str, Any]) -> str:
    return f"{100 * row['hit_rate']:.0f} %"
