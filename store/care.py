"""Looking after a store: verify, repair, compact, export, import."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import lmdb
from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_pages

from store.codec import unseal
from store.environment import IMPORTED, NAMES, Environment
from store.errors import StoreError, explain, missing
from store.latents import LatentStore

MAGIC = b"chai-cache-1\n"
EXPORTED = ("entries", "latents", "vectors", "recency")
HEAD = struct.Struct(">BIQ")  # database, key length, value length


@dataclass
class Findings:
    """What `verify` saw: whole entries, damaged ones, and records that belong to no entry."""

    entries: int = 0
    damaged: list[str] = field(default_factory=list)
    orphans: int = 0
    structure: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not (self.damaged or self.orphans or self.structure)


def find(path: Path) -> Path:
    """The folder of a store.

    Raises:
        StoreError: there is none, or it may not be looked at.
    """
    path = Path(path)
    if path.is_file():
        raise StoreError(f"{path} is a file; give a folder as --cache")
    try:
        there = (path / "data.mdb").exists()
    except OSError as error:
        raise explain(path, error) from None
    if not there:
        raise missing(path)
    return path


def verify(path: Path, repair: bool = False) -> Findings:
    """Check the file's structure without opening it, then every checksum, then that the databases agree.

    Args:
        repair: Remove damaged entries and orphans. A file whose structure is broken is moved to `damaged.mdb`, and the store
            begins anew.

    Raises:
        StoreError: there is no store.
    """
    data = find(path) / "data.mdb"
    findings = Findings()
    try:
        findings.structure = [str(problem) for problem in verify_pages(str(data), subdir=False)]
    except (VerifyError, OSError, ValueError, struct.error) as error:
        findings.structure = [str(error) or type(error).__name__]
    if findings.structure:
        if repair:
            data.replace(data.with_name("damaged.mdb"))
            (Path(path) / "lock.mdb").unlink(missing_ok=True)
        return findings
    store = LatentStore(path, readonly=not repair)
    check_records(store, findings)
    if repair and not findings.sound:
        store.remove(findings.damaged)
        remove_orphans(store)
    store.close()
    return findings


def check_records(store: LatentStore, findings: Findings) -> None:
    environment = store.environment
    with environment.transaction() as txn:
        keys = [bytes(key) for key in txn.cursor(environment.db["entries"]).iternext(values=False)]
        there = set(keys)
        for key in keys:
            if is_whole(environment, txn, key):
                findings.entries += 1
            else:
                findings.damaged.append(key.hex())
        for name in ("latents", "vectors", "recency"):
            for record in txn.cursor(environment.db[name]).iternext(values=False):
                findings.orphans += bytes(record)[:8] not in there


def is_whole(environment: Environment, txn: lmdb.Transaction, key: bytes) -> bool:
    """True if the entry, its latents, its use and its vectors are all there with their right checksums."""
    db = environment.db
    try:
        unseal(txn.get(key, db=db["entries"]) or b"")
        for name in ("latents", "vectors"):
            cursor = txn.cursor(db[name])
            found, seen = cursor.set_range(key), 0
            while found and bytes(cursor.key()).startswith(key):
                unseal(cursor.value())
                seen += 1
                found = cursor.next()
            if name == "latents" and not seen:
                return False
    except StoreError:
        return False
    return txn.get(key, db=db["recency"]) is not None


def remove_orphans(store: LatentStore) -> None:
    environment = store.environment
    with environment.transaction(write=True) as txn:
        there = {bytes(key) for key in txn.cursor(environment.db["entries"]).iternext(values=False)}
        for name in ("latents", "vectors", "recency"):
            cursor = txn.cursor(environment.db[name])
            found = cursor.first()
            while found:
                found = cursor.next() if bytes(cursor.key())[:8] in there else cursor.delete()


def compact(path: Path) -> tuple[int, int]:
    """Write the store anew without free pages. No other process may have it open.

    Returns:
        Bytes of the file before and after.
    """
    path = find(path)
    data = path / "data.mdb"
    before = data.stat().st_size
    environment = Environment(path)
    fresh = path / "compact.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir()
        environment.open().copy(str(fresh), compact=True)
        environment.close()
        (fresh / "data.mdb").replace(data)
    except Exception as error:
        raise explain(path, error) from None
    finally:
        environment.close()
        shutil.rmtree(fresh, ignore_errors=True)
    return before, data.stat().st_size


def export(path: Path, target: Path) -> int:
    """Write all entries into one file, whole or not at all. Returns how many.

    The format is a line that names it, then records (database, key, value) and at the end the count and a CRC-32 of all before.
    """
    environment = Environment(path, readonly=True)
    target = Path(target)
    count, check = 0, 0
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror or error}; give a file in a folder that is there") from None
    try:
        with os.fdopen(handle, "wb") as file, environment.transaction() as txn:
            check = emit(file, MAGIC, check)
            for number, database in enumerate(EXPORTED):
                for key, value in txn.cursor(environment.db[database]):
                    check = emit(file, HEAD.pack(number, len(key), len(value)), check)
                    check = emit(file, bytes(key), check)
                    check = emit(file, bytes(value), check)
                    count += database == "entries"
            check = emit(file, HEAD.pack(255, 0, count), check)
            file.write(check.to_bytes(4, "big"))
        os.replace(name, target)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        Path(name).unlink(missing_ok=True)
        environment.close()
    return count


def emit(file: BinaryIO, data: bytes, check: int) -> int:
    file.write(data)
    return zlib.crc32(data, check)


def import_(path: Path, source: Path) -> int:
    """Take in the entries of an exported file that are not there yet. Returns how many.

    The whole file is checked before anything is written.

    Raises:
        StoreError: not an export, cut off, or changed since it was written.
    """
    source = Path(source)
    if not source.is_file():
        raise StoreError(f"{source} is a folder; give a file" if source.is_dir() else f"there is no file {source}")
    check_export(source)
    environment = Environment(path)
    taken = set()
    with source.open("rb") as file, environment.transaction(write=True) as txn:
        there = {bytes(key) for key in txn.cursor(environment.db["entries"]).iternext(values=False)}
        file.seek(len(MAGIC))
        while True:
            number, key_length, value_length = HEAD.unpack(file.read(HEAD.size))
            if number == 255:
                break
            key, value = file.read(key_length), file.read(value_length)
            if key[:8] not in there:
                txn.put(key, value, db=environment.db[EXPORTED[number]])
                taken.add(key[:8])
        if taken:
            txn.put(IMPORTED, os.urandom(8), db=environment.db["meta"])
    environment.close()
    return len(taken)


def check_export(source: Path) -> None:
    """Read an export through: structure, sizes, record checksums, and the checksum of it all."""
    broken = StoreError(f"{source} is not a whole chai cache export; make it again with: chai cache export")
    left = source.stat().st_size - 4
    with source.open("rb") as file:
        check = zlib.crc32(line := file.read(len(MAGIC)))
        left -= len(line)
        if line != MAGIC:
            raise broken
        entries = 0
        while True:
            head = file.read(HEAD.size)
            if len(head) < HEAD.size:
                raise broken
            number, key_length, value_length = HEAD.unpack(head)
            check = zlib.crc32(head, check)
            left -= HEAD.size
            if number == 255:
                break
            if number >= len(EXPORTED) or not 8 <= key_length <= 511 or value_length > left - key_length:
                raise broken
            key, value = file.read(key_length), file.read(value_length)
            check = zlib.crc32(value, zlib.crc32(key, check))
            left -= key_length + value_length
            try:
                if EXPORTED[number] == "entries":
                    json.loads(unseal(value))
                    entries += 1
                elif EXPORTED[number] != "recency":
                    unseal(value)
            except (StoreError, ValueError):
                raise broken from None
        if left or entries != value_length or file.read() != check.to_bytes(4, "big"):
            raise broken


assert set(EXPORTED) < set(NAMES)
