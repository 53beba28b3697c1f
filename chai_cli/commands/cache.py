"""`chai cache`: look into the cache, and look after it."""

from __future__ import annotations

import enum
import json as json_module
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chai_cli.cache import folder
from chai_cli.commands.options import Policy

if TYPE_CHECKING:
    from rich.console import Console

    from store import Entry, LatentStore

app = typer.Typer(help="Look into the cache, and look after it.", no_args_is_help=True)

CacheOption = Annotated[
    Path | None, typer.Option("--cache", envvar="CHAI_CACHE", help="Folder of the cache (default: in your user cache).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]

ID = 16  # characters of an entry's id


class Sort(enum.StrEnum):
    stored = "stored"
    used = "used"
    hits = "hits"
    saved = "saved"
    bytes = "bytes"
    prompt = "prompt"


@contextmanager
def told() -> Iterator[None]:
    """What goes wrong in the store is told to the user."""
    from chai_cli.errors import ChaiError
    from store import StoreError

    try:
        yield
    except StoreError as error:
        raise ChaiError(str(error)) from None


@contextmanager
def opened(cache: Path | None, readonly: bool = True, policy: Policy = Policy.lru) -> Iterator[LatentStore]:
    """The cache, which must be there."""
    from store import LatentStore
    from store.care import find

    with told():
        store = LatentStore(find(folder(cache)), policy=policy.value, readonly=readonly)
        try:
            yield store
        finally:
            store.close()


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


@app.command("ls")
def ls(
    cache: CacheOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many entries.")] = 50,
    sort: Annotated[Sort, typer.Option(help="Largest or newest first; prompts from A to Z.")] = Sort.stored,
    json: JsonOption = False,
) -> None:
    """List the entries."""
    from rich.table import Table
    from rich.text import Text

    from chai_cli.cache import FIRST_ESTIMATE, format_bytes

    with opened(cache) as store:
        entries = list(store.entries())
    length = shortest([entry.id for entry in entries])
    entries.sort(key=lambda entry: getattr(entry, sort.value), reverse=sort is not Sort.prompt)
    if json:
        for entry in entries[:limit]:
            typer.echo(json_module.dumps(asdict(entry), ensure_ascii=False))
        return
    if not entries:
        typer.echo(f"the cache at {folder(cache)} is empty; chai gen fills it")
        return
    table = Table(caption=f"{len(entries)} entries" + (f", {limit} shown (--limit)" if limit < len(entries) else ""))
    table.add_column("id", no_wrap=True)
    table.add_column("prompt", overflow="ellipsis", no_wrap=True, max_width=44)
    table.add_column("entities", overflow="ellipsis", no_wrap=True, max_width=36)
    table.add_column("size", no_wrap=True)
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=16)
    for heading in ("on disk", "hits", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    now = time.time()
    for entry in entries[:limit]:
        about = "(a first estimate only)" if entry.latents == FIRST_ESTIMATE else ", ".join(entry.entities)
        words = (entry.id[:length], entry.prompt, about, size_of(entry), entry.model)
        figures = (format_bytes(entry.bytes), str(entry.hits), age(now - entry.stored))
        table.add_row(*(Text(cell) for cell in (*words, *figures)))
    console().print(table)


def shortest(ids: list[str], least: int = 6) -> int:
    """Characters from which no two ids begin alike."""
    return next((n for n in range(least, ID) if len({id[:n] for id in ids}) == len(ids)), ID)


def size_of(entry: Entry) -> str:
    height, width, frames = entry.size
    return f"{width}x{height}x{frames}"


def age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


@app.command("show")
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="An entry's id, or as much of its beginning as is unique.")],
    cache: CacheOption = None,
    thumbnail: Annotated[Path | None, typer.Option(help="Write the picture (JPEG) to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print all that is known of an entry."""
    from chai_cli.cache import format_bytes
    from chai_cli.errors import ChaiError

    with opened(cache) as store:
        found = resolve(store, id)
        try:
            entry = store.entry(found)
            picture = store.thumbnail(found) if thumbnail else b""
        except KeyError:
            raise ChaiError(f"entry {found} is damaged; run: chai cache verify --repair --cache {store.path}") from None
    if thumbnail:
        if not picture:
            raise ChaiError(f"entry {found} has no picture")
        try:
            thumbnail.write_bytes(picture)
        except OSError as error:
            raise ChaiError(f"cannot write {thumbnail}: {error.strerror}; give another file") from None
    if json:
        typer.echo(json_module.dumps(asdict(entry), ensure_ascii=False))
        return
    rows: dict[str, Any] = {
        "id": entry.id,
        "prompt": entry.prompt,
        "entities": ", ".join(entry.entities),
        "model": entry.model,
        "size": size_of(entry),
        "seed": entry.seed,
        **{name.replace("_", " "): value for name, value in entry.schedule.items() if name != "sigmas"},
        **sigmas_of(entry.schedule.get("sigmas")),
        "latents": ", ".join(entry.latents),
        "on disk": format_bytes(entry.bytes),
        "rendered in": f"{entry.seconds:.2f} s",
        "stored": moment(entry.stored),
        "last used": moment(entry.used),
        "hits": entry.hits,
        "steps saved": f"{entry.saved:g}",
        "namespace": entry.namespace,
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:{width}}  {value}")


def sigmas_of(sigmas: Any) -> dict[str, str]:
    """A line for the sigmas of the kept steps, whether they are by step or a list."""
    if isinstance(sigmas, dict):
        return {"sigmas": ", ".join(f"step {step}: {float(sigma):.4f}" for step, sigma in sigmas.items())}
    return {"sigmas": ", ".join(f"{float(sigma):.4f}" for sigma in sigmas)} if sigmas else {}


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def resolve(store: LatentStore, id: str) -> str:
    """The one entry whose id begins so."""
    from chai_cli.errors import ChaiError

    found = [one for one in store.ids() if one.startswith(id.lower())] if id else []
    if not found:
        raise ChaiError(f"no entry begins with {id!r}; chai cache ls lists them")
    if len(found) > 1:
        raise ChaiError(f"{len(found)} entries begin with {id!r}; give more of the id")
    return found[0]


@app.command("evict")
def evict(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Entries to remove.")] = None,
    budget: Annotated[str | None, typer.Option(help="Shrink to this many bytes, such as 500MB or 2GiB.")] = None,
    policy: Annotated[Policy, typer.Option("--cache-policy", help="Which entries go first with --budget.")] = Policy.lru,
    cache: CacheOption = None,
) -> None:
    """Remove entries: some by their ids, or the least useful until a budget holds."""
    from chai_cli.cache import format_bytes, parse_bytes
    from chai_cli.errors import ChaiError

    if not ids and budget is None:
        raise ChaiError("say what to remove: ids of entries, or --budget with the bytes to shrink to")
    size = parse_bytes(budget) if budget is not None else None
    with opened(cache, readonly=False, policy=policy) as store:
        before = len(store)
        store.remove([resolve(store, id) for id in ids or []])
        if size is not None:
            store.evict(size)
        left, used = len(store), format_bytes(store.used())
    typer.echo(f"{before - left} removed, {left} left in {used}; chai cache compact gives freed bytes back to the disk")


@app.command("verify")
def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    cache: CacheOption = None,
) -> None:
    """Check every byte. Exit code 1: something is damaged."""
    from store.care import verify as check

    path = folder(cache)
    with told():
        findings = check(path, repair=repair)
    if findings.sound:
        typer.echo(f"{findings.entries} entries, all sound")
        return
    for problem in findings.structure[:5]:
        typer.echo(f"structure: {problem}")
    for id in findings.damaged:
        typer.echo(f"damaged: {id}")
    if findings.orphans:
        typer.echo(f"{findings.orphans} records belong to no entry")
    if not repair:
        typer.echo(f"the cache is damaged; run: chai cache verify --repair --cache {path}")
        raise typer.Exit(1)
    if findings.structure:
        typer.echo(f"the file is moved to {path / 'damaged.mdb'}; the cache begins anew")
    else:
        typer.echo(f"repaired: {len(findings.damaged)} entries removed, {findings.entries} sound ones left")


@app.command("clear")
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    cache: CacheOption = None,
) -> None:
    """Remove every entry and the log."""
    from chai_cli.errors import ChaiError

    with opened(cache, readonly=False) as store:
        count = len(store)
        if not yes:
            if not sys.stdin.isatty():
                raise ChaiError(f"this removes {count} entries from {store.path}; give --yes if that is meant")
            typer.confirm(f"Remove {count} entries from {store.path}?", abort=True)
        store.clear()
    typer.echo(f"{count} entries removed")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="File to write.")],
    cache: CacheOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Write all entries into one file, to be imported elsewhere."""
    from chai_cli.errors import ChaiError

    if file.exists() and not overwrite:
        raise ChaiError(f"{file} is there already; give another name, or --overwrite")
    from chai_cli.cache import format_bytes
    from store.care import export as write
    from store.care import find

    with told():
        count = write(find(folder(cache)), file)
    typer.echo(f"{count} entries in {file} ({format_bytes(file.stat().st_size)})")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that chai cache export wrote.")],
    cache: CacheOption = None,
) -> None:
    """Take in the entries of an exported file that are not there yet."""
    from store.care import import_ as take

    with told():
        count = take(folder(cache), file)
    typer.echo(f"{count} entries are new in {folder(cache)}")


@app.command("compact")
def compact(cache: CacheOption = None) -> None:
    """Give freed bytes back to the disk. No other program may use the cache meanwhile."""
    from chai_cli.cache import format_bytes
    from store.care import compact as shrink

    with told():
        before, after = shrink(folder(cache))
    typer.echo(f"{format_bytes(before)} before, {format_bytes(after)} now")
