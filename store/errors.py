"""What can go wrong with a store, in a sentence that says what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb


class StoreError(Exception):
    """The store cannot do this now. Nothing that was stored is lost by it."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explain(path: Path, error: Exception) -> StoreError:
    """The sentence for an error of LMDB or of the operating system.

    A full disk reaches py-lmdb as a generic commit error, so the disk itself is asked.
    """
    if isinstance(error, StoreError):
        return error
    said = str(error)
    if isinstance(error, (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)):
        return StoreError(f"the cache at {path} is damaged; move it away, or run: chai cache verify --repair --cache {path}")
    if isinstance(error, lmdb.VersionMismatchError):
        return StoreError(f"the cache at {path} has another LMDB format; move it away, or give another --cache")
    if isinstance(error, lmdb.MapFullError) or disk_is_full(path, error):
        return StoreError(f"the disk of {path} is full; free some space, or run: chai cache evict --cache {path}")
    if isinstance(error, PermissionError) and not os.access(path / "data.mdb", os.R_OK) and os.access(path, os.X_OK):
        return StoreError(f"the cache at {path} belongs to another user, who keeps it private; give another --cache")
    if isinstance(error, (lmdb.ReadonlyError, PermissionError)) or "Permission denied" in said or "Read-only" in said:
        return StoreError(f"the cache at {path} cannot be written; use --read-only-cache, or give another --cache")
    if isinstance(error, lmdb.ReadersFullError):
        return StoreError(f"too many processes read the cache at {path}; end some of them")
    return StoreError(
        f"the cache at {path} cannot be used ({said or type(error).__name__}); run: chai cache verify --repair --cache {path}, "
        "or give another --cache"
    )


def missing(path: Path) -> StoreError:
    return StoreError(f"there is no cache at {path}; chai gen makes one, or give another --cache")


def disk_is_full(path: Path, error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    said = str(error)
    return any(word in said for word in ("No space left", "Disk quota", "File too large", "Input/output error"))
