"""LatentStore: what a finished render leaves behind for later ones."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from store.codec import FORMATS, pack, seal, unpack, unseal
from store.environment import IMPORTED, Environment
from store.errors import StoreError
from store.eviction import POLICIES, Use
from store.vector import Match, Vector, pack_vector, peek_label, peek_values, unpack_vector

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from store.index import Index

USE = struct.Struct("=ddqd")  # stored, used, hits, saved
DEFAULT_BUDGET = 10**9
LOG_LIMIT = 100_000
BATCH = 4096  # vectors read into an index at a time


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
        >>> kept = store.put(entry, {"clean": torch.ones(1, 2, 3)}, [Vector("prompt", "", np.array([1.0, 0.0]))])
        >>> store.search("n", "prompt", np.array([[1.0, 0.0]]), 1)[0][0].similarity
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
        self.indices: dict[tuple[str, str, int], Index] = {}  # by namespace, kind and width
        self.seen = (-1, -1)  # process and LMDB transaction that the indices show
        self.known = 0  # entries that they show
        self.newest = b""  # the last of these
        self.imported = b""  # only an import can add entries before the last, and it changes this mark

    # Writing

    def put(
        self,
        entry: Entry,
        latents: Mapping[str, Tensor],
        vectors: Sequence[Vector],
        thumbnail: bytes = b"",
    ) -> Entry:
        """Store a render and make room for it, in one transaction: all or nothing.

        Args:
            latents: By name, such as `step2` or `clean`.
            vectors: Of the entities and of the whole prompt. One of another width than its kind's others is kept, and found
                by queries of its own width only.

        Returns:
            The entry with its id, time and bytes.

        Raises:
            StoreError: it alone exceeds the budget, or it could not be written, or a vector is no row of finite numbers; the
                store is as before.
        """
        now = time.time()
        data = pack(latents, self.numbers)
        rows = [pack_vector(entry.namespace, vector) for vector in vectors]
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
            for number, row in enumerate(rows):
                txn.put(key + number.to_bytes(2, "big"), row, db=db["vectors"])
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

    def file_bytes(self) -> int:
        """Bytes of the file, free pages included."""
        return (self.path / "data.mdb").stat().st_size

    def ids(self) -> list[str]:
        """Ids of all entries, oldest first."""
        with self.environment.transaction() as txn:
            return [bytes(key).hex() for key in txn.cursor(self.environment.db["entries"]).iternext(values=False)]

    def entries(self) -> Iterator[Entry]:
        """All whole entries, oldest first."""
        for id in self.ids():
            try:
                yield self.entry(id)
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
        found |= {"id": id, "stored": stored, "used": used, "hits": hits, "saved": saved}
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
            rows = [bytes(value) for value in txn.cursor(self.environment.db["log"]).iternext(keys=False)]
        return json.loads(b"[" + b",".join(rows) + b"]")  # at once: several times faster than one by one

    def search(self, namespace: str, kind: str, queries: np.ndarray, count: int) -> list[list[Match]]:
        """The nearest vectors of a kind in a namespace for each query, best first, exactly; of equally near ones the newest.

        Args:
            queries: Unit vectors [Q, D].
        """
        with self.environment.transaction() as txn:
            self.refresh(txn)
            index = self.indices.get((namespace, kind, queries.shape[1]))
            if index is None or count < 1:
                return [[] for _ in queries]
            near = index.candidates(queries, count)
            return [self.rank(txn, query, keys, count) for query, keys in zip(queries, near, strict=True)]

    def rank(self, txn: lmdb.Transaction, query: np.ndarray, keys: np.ndarray, count: int) -> list[Match]:
        """The nearest of a few rows, by their stored numbers in float64."""
        import numpy as np

        raw = keys.tobytes()
        found = txn.cursor(self.environment.db["vectors"]).getmulti([raw[at : at + 10] for at in range(0, len(raw), 10)])
        records = [(bytes(key), bytes(record)) for key, record in found]
        if not records:
            return []
        rows = np.stack([peek_values(record, len(query)) for _, record in records])
        similarity = rows.astype(np.float64) @ query.astype(np.float64)
        order = sorted(range(len(records)), key=lambda i: (similarity[i], records[i][0]), reverse=True)[:count]
        return [Match(records[i][0][:8].hex(), peek_label(records[i][1]), float(similarity[i])) for i in order]

    def vectors(self, namespace: str, kind: str, ids: Iterable[str]) -> dict[str, list[tuple[str, np.ndarray]]]:
        """Labels and vectors [D] of a kind of the given entries, in the order in which they were put.

        Unknown entries, and those with no vector of the kind, are absent.
        """
        found: dict[str, list[tuple[str, np.ndarray]]] = {}
        with self.environment.transaction() as txn:
            for id in ids:
                prefix = bytes.fromhex(id)
                for key, space, vector in self.rows(txn, prefix):
                    if not key.startswith(prefix):
                        break
                    if (space, vector.kind) == (namespace, kind):
                        found.setdefault(id, []).append((vector.label, vector.values))
        return found

    def rows(self, txn: lmdb.Transaction, start: bytes) -> Iterator[tuple[bytes, str, Vector]]:
        """Key, namespace and vector of all sound records from a key on."""
        cursor = txn.cursor(self.environment.db["vectors"])
        if cursor.set_range(start):
            for key, record in cursor.iternext():
                try:
                    yield bytes(key), *unpack_vector(bytes(record))
                except StoreError:
                    continue

    def refresh(self, txn: lmdb.Transaction) -> None:
        """Bring the indices up to date with what this and other processes wrote: only the difference is read."""
        now = (os.getpid(), txn.id())
        if now == self.seen:
            return
        db = self.environment.db["entries"]
        imported = bytes(txn.get(IMPORTED, db=self.environment.db["meta"]) or b"")
        if self.seen[0] != now[0] or imported != self.imported:
            self.forget()
            self.imported = imported
        self.read_new(txn)
        cursor = txn.cursor(db)
        if cursor.set_range(self.newest + b"\0") if self.newest else cursor.first():
            self.known += sum(1 for _ in cursor.iternext(values=False))
        self.newest = bytes(cursor.key()) if cursor.last() else b""
        if self.known != (count := txn.stat(db)["entries"]):  # something went: only then are all keys read
            import numpy as np

            there = np.frombuffer(b"".join(cursor.iternext(values=False)) if cursor.first() else b"", ">u8")
            for index in self.indices.values():
                index.keep(there)
            self.known = count
        self.seen = now

    def read_new(self, txn: lmdb.Transaction) -> None:
        """Add the vectors of the entries after the last known one, some thousand at a time."""
        import numpy as np

        from store.index import KEY, Index

        new: dict[tuple[str, str, int], list[tuple[bytes, np.ndarray]]] = {}

        def add(kind: tuple[str, str, int]) -> None:
            keys, values = zip(*new.pop(kind), strict=True)
            index = self.indices.setdefault(kind, Index(kind[2]))
            index.extend(np.frombuffer(b"".join(keys), KEY), np.stack(values))

        for key, namespace, vector in self.rows(txn, self.newest + b"\xff\xff\xff" if self.newest else b""):
            kind = (namespace, vector.kind, len(vector.values))
            new.setdefault(kind, []).append((key, vector.values))
            if len(new[kind]) == BATCH:
                add(kind)
        for kind in list(new):
            add(kind)

    def forget(self) -> None:
        self.indices, self.known, self.newest, self.seen = {}, 0, b"", (-1, -1)

    def close(self) -> None:
        self.forget()
        self.environment.close()
