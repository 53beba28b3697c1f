"""`chai cache` and the words it uses."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from chai_cli.cache import Event, default_cache, format_bytes, parse_bytes
from chai_cli.commands import cache, stats
from chai_cli.commands.cache import age, shortest
from chai_cli.errors import ChaiError
from store import Entry, LatentStore, Vector

app = typer.Typer()
app.add_typer(cache.app, name="cache")
app.command("stats")(stats.stats)

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `chai …` on the cache in `tmp_path/cache`."""
    monkeypatch.setenv("CHAI_CACHE", str(tmp_path / "cache"))

    def invoke(*arguments: str | Path) -> Result:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def ids(tmp_path: Path) -> list[str]:
    """Three entries; the first has two hits, the last is the largest and has a picture."""
    store = LatentStore(tmp_path / "cache")
    made = []
    for number, prompt in enumerate(("a red ball", "a [bold]dog[/bold] on snow", "the blue star")):
        schedule = {"scheduler": "euler", "num_inference_steps": 30, "sigmas": {"2": 0.9333, "3": 0.9}}
        entry = Entry(prompt, (prompt[2:],), "n", "tiny", number, schedule, (64, 96, 17), 2.5)
        latents = {"step2": torch.zeros(1, 4, 5, 100 * number + 8, 8)}
        vector = Vector("prompt", "", np.eye(3, dtype=np.float32)[number])
        made.append(store.put(entry, latents, [vector], thumbnail=b"picture" if number == 2 else b"").id)
    store.touch(made[0], 22)
    store.touch(made[0], 22)
    store.close()
    return made


def test_ls_shows_what_there_is_newest_first(run: Run, ids: list[str]) -> None:
    lines = run("cache", "ls").stdout.splitlines()
    rows = [line for line in lines if "tiny" in line]
    assert [prompt in row for prompt, row in zip(("blue star", "[bold]dog[/bold]", "red ball"), rows, strict=True)] == [
        True
    ] * 3
    assert "96x64x17" in rows[0]
    assert "3 entries" in lines[-1]
    shown = [row.split()[1] for row in rows]
    assert len(set(shown)) == 3
    assert all(id.startswith(part) for id, part in zip(reversed(ids), shown, strict=True))


@pytest.mark.parametrize(
    ("sort", "first"), [("stored", 2), ("used", 0), ("hits", 0), ("saved", 0), ("bytes", 2), ("prompt", 1)]
)
def test_ls_sorts_and_limits_json_lines(run: Run, ids: list[str], sort: str, first: int) -> None:
    rows = [json.loads(line) for line in run("cache", "ls", "--json", "--sort", sort, "--limit", 2).stdout.splitlines()]
    assert len(rows) == 2
    assert rows[0]["id"] == ids[first]
    assert {"prompt", "entities", "size", "model", "bytes", "hits", "stored"} <= set(rows[0])


def test_show_needs_only_as_much_of_an_id_as_is_unique(run: Run, ids: list[str], tmp_path: Path) -> None:
    short = ids[2][: shortest(ids)]
    said = run("cache", "show", short, "--thumbnail", tmp_path / "picture.jpg").stdout
    for word in (ids[2], "the blue star", "step 2: 0.9333, step 3: 0.9000", "num inference steps", "96x64x17"):
        assert word in said
    assert (tmp_path / "picture.jpg").read_bytes() == b"picture"
    assert json.loads(run("cache", "show", short, "--json").stdout)["schedule"]["sigmas"] == {"2": 0.9333, "3": 0.9}


def test_show_says_what_is_wrong_with_an_id(run: Run, ids: list[str], tmp_path: Path) -> None:
    with pytest.raises(ChaiError, match="no entry begins with 'ffff'; chai cache ls lists them"):
        run("cache", "show", "ffff")
    with pytest.raises(ChaiError, match="3 entries begin with '1'; give more of the id"):
        run("cache", "show", "1")
    with pytest.raises(ChaiError, match="has no picture"):
        run("cache", "show", ids[0], "--thumbnail", tmp_path / "picture.jpg")
    with pytest.raises(ChaiError, match=r"cannot write .*; give another file"):
        run("cache", "show", ids[2], "--thumbnail", tmp_path / "none" / "picture.jpg")


def test_evict_by_id_and_by_budget(run: Run, ids: list[str], tmp_path: Path) -> None:
    assert run("cache", "evict", ids[1]).stdout.startswith("1 removed, 2 left in ")
    assert run("cache", "evict", "--budget", "1kB", "--cache-policy", "lfu").stdout.startswith("2 removed, 0 left")
    with pytest.raises(ChaiError, match="say what to remove: ids of entries, or --budget"):
        run("cache", "evict")
    with pytest.raises(ChaiError, match="is no size in bytes"):
        run("cache", "evict", "--budget", "much")


def test_evict_keeps_the_entry_with_hits(run: Run, ids: list[str], tmp_path: Path) -> None:
    store = LatentStore(tmp_path / "cache")
    budget = store.used() - 1
    store.close()
    run("cache", "evict", "--budget", budget, "--cache-policy", "lfu")
    assert ids[0] in run("cache", "ls", "--json").stdout


def test_verify_finds_damage_and_repairs_it(run: Run, ids: list[str], tmp_path: Path) -> None:
    assert run("cache", "verify").stdout == "3 entries, all sound\n"
    store = LatentStore(tmp_path / "cache")
    with store.environment.transaction(write=True) as txn:
        txn.put(bytes.fromhex(ids[1]), b"harmed", db=store.environment.db["latents"])
    store.close()
    found = run("cache", "verify")
    assert found.exit_code == 1
    assert f"damaged: {ids[1]}" in found.stdout
    assert f"run: chai cache verify --repair --cache {tmp_path / 'cache'}" in found.stdout
    assert "repaired: 1 entries removed, 2 sound ones left" in run("cache", "verify", "--repair").stdout
    assert run("cache", "verify").exit_code == 0


def test_a_broken_file_is_moved_away(run: Run, ids: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache" / "data.mdb").write_bytes(b"x" * 50_000)
    assert run("cache", "verify").exit_code == 1
    assert "damaged.mdb; the cache begins anew" in run("cache", "verify", "--repair").stdout
    assert (tmp_path / "cache" / "damaged.mdb").exists()


def test_clear_asks_a_person_and_refuses_a_program(run: Run, ids: list[str]) -> None:
    with pytest.raises(ChaiError, match=r"this removes 3 entries from .*; give --yes if that is meant"):
        run("cache", "clear")
    assert run("cache", "ls", "--json").stdout.count("\n") == 3
    assert run("cache", "clear", "--yes").stdout == "3 entries removed\n"
    assert "is empty; chai gen fills it" in run("cache", "ls").stdout


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 3)])
def test_clear_does_what_the_person_answers(
    ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    try:
        cache.clear(yes=False, cache=tmp_path / "cache")
    except typer.Abort:
        assert left
    assert len(LatentStore(tmp_path / "cache")) == left


def test_export_and_import_carry_the_entries(run: Run, ids: list[str], tmp_path: Path) -> None:
    assert run("cache", "export", tmp_path / "file").stdout.startswith(f"3 entries in {tmp_path / 'file'} (")
    with pytest.raises(ChaiError, match="is there already"):
        run("cache", "export", tmp_path / "file")
    assert run("cache", "export", tmp_path / "file", "--overwrite").exit_code == 0
    with pytest.raises(ChaiError, match="in a folder that is there"):
        run("cache", "export", tmp_path / "none" / "file")
    other = ("--cache", tmp_path / "other")
    assert run("cache", "import", tmp_path / "file", *other).stdout == f"3 entries are new in {tmp_path / 'other'}\n"
    assert run("cache", "import", tmp_path / "file", *other).stdout.startswith("0 entries are new")
    assert run("cache", "ls", "--json", *other).stdout.count("\n") == 3
    with pytest.raises(ChaiError, match="there is no file"):
        run("cache", "import", tmp_path / "none")


def test_compact_gives_freed_bytes_back(run: Run, ids: list[str], tmp_path: Path) -> None:
    before = (tmp_path / "cache" / "data.mdb").stat().st_size
    run("cache", "evict", *ids)
    assert "now" in run("cache", "compact").stdout
    assert (tmp_path / "cache" / "data.mdb").stat().st_size < before


@pytest.mark.parametrize(
    "command", [["ls"], ["show", "1"], ["evict", "1"], ["verify"], ["clear", "--yes"], ["export", "file"], ["compact"]]
)
def test_a_missing_cache_is_not_made_by_looking_at_it(run: Run, tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(ChaiError, match=r"there is no cache at .*; chai gen makes one, or give another --cache"):
        run("cache", *command)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GB", 10**9),
        ("500MiB", 500 * 2**20),
        ("2e9", 2 * 10**9),
        ("1.5 kb", 1500),
        ("7", 7),
        ("2G", 2 * 10**9),
        ("3tib", 3 * 2**40),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1XB", "1,5GB", "nan", "inf", "1e999"])
def test_what_is_no_size_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ChaiError, match=r"is no size in bytes; write it as 500MB, 1.5GB or 2GiB"):
        parse_bytes(text)


def test_sizes_and_ages_are_short() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 1_234_567, 5 * 10**9)] == ["0 B", "999 B", "1.0 KB", "1.2 MB", "5.0 GB"]
    assert [age(n) for n in (-5, 59, 60, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAI_CACHE", "/elsewhere")
    assert default_cache() == Path("/elsewhere")
    monkeypatch.delenv("CHAI_CACHE")
    assert default_cache().parts[-2:] == ("chai", "latents")


def test_a_log_row_of_another_version_is_read() -> None:
    event = Event.read({"kind": "hit", "colour": "red", "size": [64, 64, 17], "time": 5.0})
    assert (event.kind, event.size, event.model, event.saved) == ("hit", (64, 64, 17), "", 0.0)
    assert Event.read({}).kind == ""
    assert time.time() > Event.read({}).time
