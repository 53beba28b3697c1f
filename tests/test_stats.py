"""`chai stats`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from chai_cli.cache import Event
from chai_cli.commands.stats import summary
from chai_cli.errors import ChaiError
from store import Entry, LatentStore
from tests.test_cache_commands import Run, run

__all__ = ["run"]

NOON = 1_750_000_000.0
HOUR = 3600.0
CODE = """
import sys, time
began = time.perf_counter()
import typer
from chai_cli.commands.stats import stats
app = typer.Typer()
app.command()(stats)
try:
    app(sys.argv[1:])
finally:
    print(time.perf_counter() - began, "torch" in sys.modules, file=sys.stderr)
"""


def event(kind: str = "hit", time: float = NOON, seconds: float = 1.0, model: str = "tiny", donor: str = "d1") -> Event:
    hit = {"donor": donor, "donor_prompt": f"prompt of {donor}", "saved": 2.0, "calls_saved": 40} if kind == "hit" else {}
    return Event(time, kind, model, (64, 64, 17), "a red ball", seconds=seconds, **hit)  # type: ignore[arg-type]


def fill(path: Path, events: list[Event], entries: int = 1) -> None:
    """A cache with a log, written in one transaction so that thousands of rows take no time."""
    store = LatentStore(path)
    kept = store.put(Entry("a red ball", (), "n", "tiny", 0, {}, (64, 64, 17), 2.0), {}, [])
    with store.environment.transaction(write=True) as txn:
        db = store.environment.db
        for number, one in enumerate(events, 1):
            txn.put(number.to_bytes(8, "big"), json.dumps(asdict(one)).encode(), db=db["log"])
        for name in ("entries", "recency"):
            value = txn.get(bytes.fromhex(kept.id), db=db[name])
            for number in range(1, entries):
                txn.put(number.to_bytes(8, "big"), value, db=db[name])
    store.close()


def test_the_hit_rate_counts_look_ups_only() -> None:
    found = summary([event(), event("miss"), event("miss"), event("stored"), event("not stored"), event()])
    assert (found["lookups"], found["hits"], found["hit_rate"]) == (4, 2, 0.5)
    assert (found["seconds_saved"], found["calls_saved"]) == (4.0, 80)


def test_percentiles_are_of_hits_and_of_misses_by_model() -> None:
    hits = [event(seconds=float(n)) for n in range(1, 12)]
    found = summary([*hits, event("miss", seconds=7.0), event("miss", seconds=5.0, model="wan")])
    assert found["models"]["tiny"]["hit_seconds"] == {"p50": 6.0, "p90": 10.0}
    assert found["models"]["tiny"]["miss_seconds"] == {"p50": 7.0, "p90": 7.0}
    assert found["models"]["wan"]["hit_seconds"] == {"p50": None, "p90": None}
    assert found["miss_seconds"]["p50"] == 5.0  # nearest rank, as in the table of chai gen


def test_time_is_in_hours_within_a_day_and_in_days_beyond() -> None:
    hours = summary([event(time=NOON), event("miss", time=NOON), event(time=NOON + 2 * HOUR)])["over_time"]
    assert [(row["lookups"], row["hit_rate"]) for row in hours] == [(2, 0.5), (1, 1.0)]
    assert all(row["from"].endswith(":00") for row in hours)
    days = summary([event(time=NOON), event(time=NOON + 50 * HOUR)])["over_time"]
    assert [len(row["from"]) for row in days] == [10, 10]


def test_donors_are_ranked_by_their_hits() -> None:
    found = summary([event(), *(event(donor="d2") for _ in range(3))])["donors"]
    assert [(row["prompt"], row["hits"], row["seconds_saved"]) for row in found] == [
        ("prompt of d2", 3, 6.0),
        ("prompt of d1", 1, 2.0),
    ]


def test_an_empty_log_has_no_rates() -> None:
    found = summary([])
    assert (found["hit_rate"], found["models"], found["over_time"], found["donors"]) == (None, {}, [], [])


def test_stats_says_it_in_tables(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "cache", [event(), event("miss", seconds=3.0), event(model="wan")])
    said = run("stats").stdout
    for words in ("1 entries", "3 look-ups, 2 hits (67 %), 4.0 s saved by them", "prompt of d1", "3.00 s", "wan", "all"):
        assert words in said


def test_stats_tells_first_estimates_and_hits_without_a_donor(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "cache", [event(donor="")])
    store = LatentStore(tmp_path / "cache")
    store.put(Entry("a blue star", (), "n", "tiny", 0, {}, (64, 64, 17), 0.0), {"estimate0": torch.zeros(1, 4, 1, 1, 1)}, [])
    store.close()
    said = run("stats").stdout
    assert "2 entries" in said
    assert "1 of them are first estimates, which hits leave for later ones; the others full renders" in said
    assert "hits that learned from all renders have no donor of their own" in said
    assert json.loads(run("stats", "--json").stdout)["first_estimates"] == 1


def test_stats_says_it_in_json(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "cache", [event(), event("miss")])
    found = json.loads(run("stats", "--json").stdout)
    assert found["entries"] == 1
    assert 0 < found["used_bytes"] <= found["file_bytes"]
    assert found["hit_rate"] == 0.5


def test_a_cache_without_look_ups_and_an_empty_one_say_so(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "cache", [])
    assert "no look-ups yet" in run("stats").stdout
    run("cache", "clear", "--yes")
    assert run("stats").stdout == f"the cache at {tmp_path / 'cache'} is empty; chai gen fills it\n"


def test_a_missing_cache_is_an_error(run: Run) -> None:
    with pytest.raises(ChaiError, match="there is no cache at"):
        run("stats")


def test_stats_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    """The aim is 0.5 s on an idle machine. Only gross slowness fails here: seconds of the processor, which a busy one inflates."""
    events = [event("hit" if n % 3 else "miss", time=NOON + 600 * n, donor=f"d{n % 50}") for n in range(10_000)]
    fill(tmp_path / "cache", events, entries=1000)
    taken = []
    for _ in range(3):
        before = os.times()
        command = [sys.executable, "-c", CODE, "--cache", str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = os.times()
        taken.append(after.children_user - before.children_user + after.children_system - before.children_system)
        assert done.stderr.split()[-1] == "False"
        assert "1000 entries" in done.stdout
    assert statistics.median(taken) < 1.5


def test_the_clock_of_a_log_is_the_machines(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "cache", [event(time=time.time())])
    assert json.loads(run("stats", "--json").stdout)["over_time"][0]["from"].startswith(time.strftime("%Y-"))
