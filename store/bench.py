"""How fast search is and what number formats cost: `python -m store.bench`, `python -m store.bench formats`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from store.codec import FORMATS, pack, unpack
from store.index import KEY, Index
from store.latents import Entry, LatentStore
from store.vector import Vector, pack_vector

COUNT = 10  # nearest rows
PAUSE = 0.3  # seconds between two ways, for the threads of the one before to fall asleep: libraries have pools of their own
EMBEDDING = ("n", "entity")


def rows(count: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Unit vectors [N, D] that share a part, as those of text encoders do."""
    made = rng.standard_normal((count, width), dtype=np.float32)
    made += rng.standard_normal(width, dtype=np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return made


def fill(folder: Path, matrix: np.ndarray) -> LatentStore:
    """A store with one entry that has all these vectors: written at once, since only its index is measured."""
    store = LatentStore(folder)
    store.put(Entry("", (), EMBEDDING[0], "", 0, {}, (0, 0, 0), 0.0), {}, [])
    with store.environment.transaction(write=True) as txn:
        for number, row in enumerate(matrix):
            entry = (number // 2**16).to_bytes(8, "big")
            record = pack_vector(EMBEDDING[0], Vector(EMBEDDING[1], "", row))
            txn.put(entry + (number % 2**16).to_bytes(2, "big"), record, db=store.environment.db["vectors"], append=True)
    return store


def search(count: int, width: int, queries: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    matrix = rows(count, width, rng)
    asked = rows(queries, width, rng)
    with tempfile.TemporaryDirectory() as folder:
        store = fill(Path(folder), matrix)
        began = time.perf_counter()
        found = store.search(*EMBEDDING, asked[:1], COUNT)[0]
        print(f"{count:,} x {width}: index read in {time.perf_counter() - began:.2f} s")
        truth = np.sort(matrix.astype(np.float64) @ asked[0].astype(np.float64))[::-1][:COUNT]
        assert np.allclose([match.similarity for match in found], truth, atol=1e-12, rtol=0)
        ways: dict[str, Callable[[np.ndarray], object]] = {
            "store": lambda query: store.search(*EMBEDDING, query, COUNT),
            "numpy float32": lambda query: plain(matrix, query),
        }
        try:
            from usearch.index import search as usearch

            ways["usearch exact"] = lambda query: usearch(matrix, query, COUNT, "ip", exact=True)
        except ImportError:
            print("usearch is left out: it is an optional extra that is not installed (pip install usearch)")
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                time.sleep(PAUSE)
                for query in asked:
                    began = time.perf_counter()
                    way(query[None])
                    taken[name].append(1000 * (time.perf_counter() - began))
        began = time.perf_counter()
        store.search(*EMBEDDING, asked, COUNT)
        together = 1000 * (time.perf_counter() - began) / len(asked)
        index = next(iter(store.indices.values()))
        memory = sum(array.nbytes for array in (index.codes, index.scales, index.keys)) / 2**20
        checked = statistics.mean(len(keys) for keys in index.candidates(asked, COUNT))
        store.close()
    for name, spans in taken.items():
        print(f"{name:14} median {statistics.median(spans):7.2f} ms   p90 {np.percentile(spans, 90):7.2f} ms a query")
    print(f"{'store':14} {together:14.2f} ms a query when {len(asked)} are asked at once")
    print(f"{memory:.0f} MiB of memory; {checked:.0f} rows compared in full for each query")
    print(f"a row added in {add_time(matrix[:1000]):.3f} ms")


def plain(matrix: np.ndarray, query: np.ndarray) -> np.ndarray:
    similarity = matrix @ query[0]
    best = np.argpartition(similarity, len(matrix) - COUNT)[-COUNT:]
    return best[np.argsort(-similarity[best])]


def add_time(matrix: np.ndarray) -> float:
    """Milliseconds that one more row takes."""
    index = Index(matrix.shape[1])
    key = np.zeros(1, KEY)
    began = time.perf_counter()
    for row in matrix:
        index.extend(key, row[None])
    return 1000 * (time.perf_counter() - began) / len(matrix)


def formats(file: Path | None) -> None:
    import torch
    from safetensors.torch import load_file

    latents = (
        load_file(file) if file else {"latents": torch.randn(1, 16, 5, 32, 32, generator=torch.Generator().manual_seed(0))}
    )
    size = sum(value.numel() for value in latents.values())
    print(f"{len(latents)} tensors, {size:,} numbers")
    for numbers in FORMATS:
        data = pack(latents, numbers)
        back = unpack(data)
        lost = sum(float((back[name] - value.float()).square().sum()) for name, value in latents.items())
        all_ = sum(float(value.float().square().sum()) for value in latents.values())
        print(
            f"{numbers:9} {len(data):12,} bytes   {len(data) / size:.2f} a number   relative RMS error {(lost / all_) ** 0.5:.2e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m store.bench", description=__doc__)
    parser.add_argument("what", nargs="?", default="search", choices=["search", "formats"])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000], help="vectors in the store")
    parser.add_argument("--width", type=int, default=512, help="numbers in a vector")
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="how often the ways take turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--file", type=Path, help="latents (.safetensors) for `formats`; by default random ones")
    options = parser.parse_args()
    if options.what == "formats":
        formats(options.file)
        return
    import torch

    torch.set_num_threads(options.threads)
    for count in options.rows:
        search(count, options.width, options.queries, options.rounds)


if __name__ == "__main__":
    main()
