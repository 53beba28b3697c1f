"""One LMDB environment: where it may lie, how it is opened, which schema it has."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from store.errors import StoreError, explain, missing

MAP_SIZE = 1 << 40  # costs nothing on disk and spares all growth logic
MAX_READERS = 2048
NAMES = ("meta", "entries", "latents", "vectors", "recency", "log")
SCHEMA = 1
IMPORTED = b"imported"  # in `meta`: bytes that change with every import
REMOTE = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "glusterfs",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.gcsfuse",
    ]
)
META_PAGES = 2

# From a schema to the next: each is given the write transaction and the named databases.
MIGRATIONS: dict[int, Callable[[lmdb.Transaction, dict[str, Any]], None]] = {}


def file_system(path: Path, mounts: str = "/proc/self/mountinfo") -> str:
    """The type of the file system that holds a path, as the kernel names it; empty where that cannot be told."""
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return ""
    real, best, kind = os.path.realpath(path), "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def check_whole(data: Path) -> None:
    """Refuse a file that is shorter than its own header says: mapping it would end in SIGBUS.

    Raises:
        StoreError: not an LMDB file of this format, or cut off.
    """
    if data.stat().st_size == 0:
        return
    newest = (-1, 0, 0)
    with data.open("rb") as file:
        head = file.read(152)
        if len(head) < 152:
            raise StoreError(f"{data} is cut off; move it away, or give another --cache")
        page = struct.unpack_from("=I", head, 40)[0]
        if not 512 <= page <= 65_536:
            raise StoreError(f"{data} is not a chai cache; move it away, or give another --cache")
        for number in range(META_PAGES):
            file.seek(number * page)
            meta = file.read(152)
            if len(meta) == 152 and struct.unpack_from("=II", meta, 16) == (0xBEEFC0DE, 1):
                last, transaction = struct.unpack_from("=QQ", meta, 136)
                newest = max(newest, (transaction, last, page))
        size = os.fstat(file.fileno()).st_size  # after the headers: another process may write, and it writes them last
    transaction, last, page = newest
    if transaction < 0:
        raise StoreError(f"{data} is not a chai cache, or one of another version; move it away, or give another --cache")
    if size < (last + 1) * page:
        raise StoreError(f"{data} is cut off; move it away, or run: chai cache verify --repair --cache {data.parent}")


class Environment:
    """Opened at first use in each process, and again after a fork; never handed from one process to another.

    Args:
        path: The folder.
        readonly: Never write, not even the schema.
    """

    def __init__(self, path: Path, readonly: bool = False) -> None:
        self.path = Path(path)
        self.readonly = readonly
        self.owner = -1
        self.env: lmdb.Environment | None = None
        self.db: dict[str, Any] = {}

    def open(self) -> lmdb.Environment:
        if self.env is not None and self.owner == os.getpid():
            return self.env
        self.close()
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file; give a folder as --cache")
        kind = file_system(self.path)
        if kind in REMOTE:
            raise StoreError(
                f"{self.path} is on a network file system ({kind}), which LMDB cannot share safely; give a local --cache"
            )
        try:
            if not self.readonly:
                self.path.mkdir(parents=True, exist_ok=True)
            data = self.path / "data.mdb"
            if data.exists():
                check_whole(data)
            elif self.readonly:
                raise missing(self.path)
            self.env = lmdb.open(
                str(self.path),
                map_size=MAP_SIZE,
                max_dbs=len(NAMES) + 2,
                max_readers=MAX_READERS,
                readonly=self.readonly,
                create=not self.readonly,
                writemap=False,
                lock=self.can_lock(),
            )
            self.owner = os.getpid()
            self.env.reader_check()
            self.db = {name: self.env.open_db(name.encode(), create=not self.readonly) for name in NAMES}
            self.migrate()
        except (lmdb.Error, OSError) as error:
            self.close()
            raise explain(self.path, error) from None
        except StoreError:
            self.close()
            raise
        return self.env

    def can_lock(self) -> bool:
        """False for a reader who may not write the lock: what is overwritten under its eyes fails its checksum."""
        lock = self.path / "lock.mdb"
        return not self.readonly or os.access(lock if lock.exists() else self.path, os.W_OK)

    def migrate(self) -> None:
        """Bring an older schema up to this one, a step at a time, in one transaction."""
        assert self.env is not None
        with self.env.begin() as txn:
            found = txn.get(b"schema", db=self.db["meta"])
        schema = int(found) if found else None
        if schema == SCHEMA:
            return
        if schema is not None and schema > SCHEMA:
            raise StoreError(
                f"the cache at {self.path} was written by a newer chai (schema {schema}, this one knows {SCHEMA}); "
                "upgrade chai, or give another --cache"
            )
        if self.readonly:
            raise StoreError(f"the cache at {self.path} has an old schema; open it once without --read-only-cache")
        with self.env.begin(write=True) as txn:
            for step in range(schema or SCHEMA, SCHEMA):
                MIGRATIONS[step](txn, self.db)
            txn.put(b"schema", str(SCHEMA).encode(), db=self.db["meta"])

    @contextmanager
    def transaction(self, write: bool = False) -> Iterator[lmdb.Transaction]:
        """A transaction; `self.db` holds the databases.

        Raises:
            StoreError: with the reason in words.
        """
        if write and self.readonly:
            raise StoreError(f"the cache at {self.path} is open for reading only; leave out --read-only-cache to change it")
        env = self.open()
        try:
            with env.begin(write=write) as txn:
                yield txn
        except (lmdb.Error, OSError) as error:
            raise explain(self.path, error) from None

    def pages(self, txn: lmdb.Transaction) -> int:
        """Bytes of all pages in use: what the entries occupy on disk, without the free pages kept for reuse."""
        used = 0
        for db in self.db.values():
            stat = txn.stat(db)
            used += (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        return used

    def close(self) -> None:
        """Give the handle back. In a forked child this closes the inherited copy, which leaves the parent's alone."""
        if self.env is not None:
            self.env.close()
        self.env = None
        self.db = {}
