"""LatentStore: what a finished render leaves behind for later ones."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

from store.codec import FORMATS, pack, seal, unpack, unseal
from store.environment import Environment
from store.errors import StoreError
from store.eviction import POLICIES, Use
from store.index import Index, Match

if TYPE_CHECKING:
    from torch import Tensor

USE = struct.Struct("=ddqd")  # stored, used, hits, saved
DEFAULT_BUDGET = 10**9
LOG_LIMIT = 100_000


@dataclass(frozen=True)
class Entry:
    """One finished render.

    Attributes:
        namespace: Entries of one namespace have latents that fit each other; see `namespace`.
        schedule: How it was solved: scheduler, steps, sigmas, and the sigma of each kept step.
        size: Height, width (pixels) and frames.
        seconds: What the render took.
        hits, saved: How often it served as a donor, and the steps that this saved.
        bytes: What it occupies on disk.
    """

    prompt: str
    entities: tuple[str, ...]
    namespace: str
    model: str
    seed: int
    schedule: dict[str, Any]
    size: tuple[int, int, int]
    seconds: float
    id: str = ""
    stored: float = 0.0
    used: float = 0.0
    hits: int = 0
    saved: float = 0.0
    bytes: int = 0
    latents: tuple[str, ...] = field(default=())


def namespace(fingerprint: str, latent_shape: Sequence[int], prediction_type: str, tenant: str = "") -> str:
    """The partition inside which latents are compatible. Tenants never see each other's entries."""
    shape = "x".join(map(str, latent_shape))
    return json.dumps([tenant, fingerprint, shape, prediction_type])


def next_key(txn: lmdb.Transaction, db: Any) -> bytes:
    """The time in nanoseconds, but always after every key there is: what came later sorts later, whoever wrote it."""
    cursor = txn.cursor(db)
    last = int.from_bytes(cursor.key(), "big") if cursor.last() else 0
    return max(time.time_ns(), last + 1).to_bytes(8, "big")


class LatentStore:
    """A folder of latents with a budget, an exact vector index and a log of look-ups. Safe for many processes.

    Args:
        path: The folder; made when first written.
        budget: Bytes on disk. Entries leave by `policy` to make room.
        policy: `lru`, `lfu` or `lcbfu`.
        numbers: How latents are stored: `bfloat16`, `float16`, `float32` or `int8`.
        readonly: Never write; touches and logs are dropped.

    Example:
        >>> import tempfile, torch
        >>> store = LatentStore(Path(tempfile.mkdtemp()))
        >>> entry = Entry("a red ball", ("red ball",), "n", "m", 0, {}, (64, 64, 17), 1.0)
        >>> kept = store.put(entry, {"clean": torch.ones(1, 2, 3)}, [("prompt", np.array([1.0, 0.0]))])
        >>> store.search("n", np.array([[1.0, 0.0]]), 1)[0][0].similarity
        1.0
    """

    def __init__(
        self,
        path: Path,
        budget: int = DEFAULT_BUDGET,
        policy: str = "lru",
        numbers: str = "bfloat16",
        readonly: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise StoreError(f"no eviction policy named {policy!r}; there is {', '.join(POLICIES)}")
        if numbers not in FORMATS:
            raise StoreError(f"no number format named {numbers!r}; there is {', '.join(FORMATS)}")
        self.path = Path(path)
        self.budget = budget
        self.policy = policy
        self.numbers = numbers
        self.environment = Environment(self.path, readonly)
        self.readonly = readonly
        self.indices: dict[str, Index] = {}
        self.seen: tuple[int, int] = (-1, -1)  # process and LMDB transaction that the indices show
        self.known: set[str] = set()
        self.newest = b""

    # Writing

    def put(
        self,
        entry: Entry,
        latents: Mapping[str, Tensor],
        vectors: Sequence[tuple[str, np.ndarray]],
        thumbnail: bytes = b"",
    ) -> Entry:
        """Store a render and make room for it, in one transaction: all or nothing.

        Args:
            latents: By name, such as `step2` or `clean`.
            vectors: Labelled unit vectors [D], of the entities and of the whole prompt.

        Returns:
            The entry with its id, time and bytes.

        Raises:
            StoreError: it alone exceeds the budget, or it could not be written; the store is as before.
        """
        now = time.time()
        data = pack(latents, self.numbers)
        with self.environment.transaction(write=True) as txn:
            db = self.environment.db
            before = self.environment.pages(txn)
            key = next_key(txn, db["entries"])
            kept = replace(entry, id=key.hex(), stored=now, used=now, latents=tuple(latents))
            record = seal(json.dumps(asdict(kept)).encode())
            txn.put(key, record, db=db["entries"])
            txn.put(key, data, db=db["latents"])
            if thumbnail:
                txn.put(key + b"t", seal(thumbnail), db=db["latents"])
            for number, (label, vector) in enumerate(vectors):
                head = json.dumps([entry.namespace, label]).encode()
                body = np.asarray(vector, np.float32).tobytes()
                txn.put(key + number.to_bytes(2, "big"), seal(struct.pack("=I", len(head)) + head + body), db=db["vectors"])
            txn.put(key, USE.pack(now, now, 0, 0.0), db=db["recency"])
            size = self.environment.pages(txn) - before
            if size > self.budget:
                txn.abort()
                raise StoreError(
                    f"an entry of {size:,} bytes exceeds the budget of {self.budget:,}; give a larger --cache-budget"
                )
            kept = replace(kept, bytes=size)
            txn.put(key, seal(json.dumps(asdict(kept)).encode()), db=db["entries"])
            self.make_room(txn, self.budget, spare=key)
        return kept

    def make_room(self, txn: lmdb.Transaction, budget: int, spare: bytes = b"") -> int:
        """Remove entries, worst first by the policy, until the pages in use fit the budget. Returns how many went."""
        if self.environment.pages(txn) <= budget:
            return 0
        score = POLICIES[self.policy]
        uses = [(score(Use(*USE.unpack(value))), bytes(key)) for key, value in txn.cursor(self.environment.db["recency"])]
        gone = 0
        for _, key in sorted(uses):
            if self.environment.pages(txn) <= budget:
                break
            if key != spare:
                self.delete(txn, key)
                gone += 1
        return gone

    def delete(self, txn: lmdb.Transaction, key: bytes) -> None:
        db = self.environment.db
        for name in ("entries", "latents", "vectors", "recency"):
            cursor = txn.cursor(db[name])
            found = cursor.set_range(key)
            while found and bytes(cursor.key()).startswith(key):
                found = cursor.delete()

    def remove(self, ids: Sequence[str]) -> None:
        """Forget entries; unknown ids are ignored."""
        with self.environment.transaction(write=True) as txn:
            for one in ids:
                self.delete(txn, bytes.fromhex(one))

    def evict(self, budget: int) -> int:
        """Shrink to a budget. Returns how many entries went."""
        with self.environment.transaction(write=True) as txn:
            return self.make_room(txn, budget)

    def clear(self) -> None:
        """Forget every entry and the log."""
        with self.environment.transaction(write=True) as txn:
            for name in ("entries", "latents", "vectors", "recency", "log"):
                txn.drop(self.environment.db[name], delete=False)

    def touch(self, id: str, saved: float) -> None:
        """Note that an entry served as a donor and saved some steps. A read-only store forgets it."""
        if self.readonly:
            return
        key = bytes.fromhex(id)
        with self.environment.transaction(write=True) as txn:
            value = txn.get(key, db=self.environment.db["recency"])
            if value:
                use = Use(*USE.unpack(value))
                txn.put(
                    key, USE.pack(use.stored, time.time(), use.hits + 1, use.saved + saved), db=self.environment.db["recency"]
                )

    def log(self, event: Mapping[str, Any]) -> None:
        """Append a look-up or a store to the log; the oldest of 100,000 go."""
        if self.readonly:
            return
        with self.environment.transaction(write=True) as txn:
            db = self.environment.db["log"]
            txn.put(next_key(txn, db), json.dumps(dict(event)).encode(), db=db)
            if txn.stat(db)["entries"] > LOG_LIMIT:
                cursor = txn.cursor(db)
                cursor.first()
                cursor.delete()

    # Reading

    def __len__(self) -> int:
        with self.environment.transaction() as txn:
            return int(txn.stat(self.environment.db["entries"])["entries"])

    def used(self) -> int:
        """Bytes of the pages in use."""
        with self.environment.transaction() as txn:
            return self.environment.pages(txn)

    def entries(self) -> Iterator[Entry]:
        """All whole entries, oldest first."""
        with self.environment.transaction() as txn:
            keys = [bytes(key) for key in txn.cursor(self.environment.db["entries"]).iternext(values=False)]
        for key in keys:
            try:
                yield self.entry(key.hex())
            except KeyError:
                continue

    def entry(self, id: str) -> Entry:
        """One entry with its use so far.

        Raises:
            KeyError: gone or damaged. A damaged one is removed.
        """
        key = bytes.fromhex(id)
        with self.environment.transaction() as txn:
            record = txn.get(key, db=self.environment.db["entries"])
            use = txn.get(key, db=self.environment.db["recency"])
        if record is None or use is None:
            raise KeyError(id)
        try:
            found = json.loads(unseal(record))
        except StoreError:
            self.drop_damaged(id)
            raise KeyError(id) from None
        stored, used, hits, saved = USE.unpack(use)
        found |= {"stored": stored, "used": used, "hits": hits, "saved": saved}
        fields: dict[str, Any] = {k: tuple(v) if k in ("entities", "size", "latents") else v for k, v in found.items()}
        return Entry(**fields)

    def latents(self, id: str) -> dict[str, Tensor]:
        """An entry's latents, float32.

        Raises:
            KeyError: gone or damaged. A damaged entry is removed.
        """
        with self.environment.transaction() as txn:
            data = txn.get(bytes.fromhex(id), db=self.environment.db["latents"])
        if data is None:
            raise KeyError(id)
        try:
            return unpack(data)
        except StoreError:
            self.drop_damaged(id)
            raise KeyError(id) from None

    def thumbnail(self, id: str) -> bytes:
        """The picture stored with an entry, empty if there is none."""
        with self.environment.transaction() as txn:
            data = txn.get(bytes.fromhex(id) + b"t", db=self.environment.db["latents"])
        return unseal(data) if data else b""

    def drop_damaged(self, id: str) -> None:
        if not self.readonly:
            self.remove([id])

    def events(self) -> list[dict[str, Any]]:
        """The log, oldest first."""
        with self.environment.transaction() as txn:
            return [json.loads(bytes(value)) for _, value in txn.cursor(self.environment.db["log"])]

    def search(self, namespace: str, queries: np.ndarray, count: int) -> list[list[Match]]:
        """The nearest vectors of a namespace for each query, best first, exactly.

        Args:
            queries: Unit vectors [Q, D].
        """
        self.refresh()
        index = self.indices.get(namespace)
        return index.search(queries, count) if index else [[] for _ in queries]

    def refresh(self) -> None:
        """Bring the matrices up to date with what this and other processes wrote: only the difference is read."""
        with self.environment.transaction() as txn:
            now = (os.getpid(), txn.id())
            if now == self.seen:
                return
            db = self.environment.db["entries"]
            if self.seen[0] != now[0]:
                self.indices, self.known, self.newest = {}, set(), b""
            cursor = txn.cursor(db)
            found = cursor.set_range(self.newest + b"\0") if self.newest else cursor.first()
            while found:
                self.newest = bytes(cursor.key())
                self.known.add(self.newest.hex())
                self.read_vectors(txn, self.newest)
                found = cursor.next()
            if len(self.known) != txn.stat(db)["entries"]:  # something went: only then are all keys read
                there = {bytes(key).hex() for key in txn.cursor(db).iternext(values=False)}
                for id in self.known - there:
                    for index in self.indices.values():
                        index.remove(id)
                self.known = there
        self.seen = now

    def read_vectors(self, txn: lmdb.Transaction, key: bytes) -> None:
        cursor = txn.cursor(self.environment.db["vectors"])
        found = cursor.set_range(key)
        while found and bytes(cursor.key()).startswith(key):
            try:
                body = unseal(cursor.value())
            except StoreError:
                return
            (length,) = struct.unpack_from("=I", body)
            namespace, label = json.loads(body[4 : 4 + length])
            vector = np.frombuffer(body[4 + length :], np.float32)
            self.indices.setdefault(namespace, Index(len(vector))).add(key.hex(), label, vector)
            found = cursor.next()

    def close(self) -> None:
        self.environment.close()
