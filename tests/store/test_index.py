"""Search is exact, whatever the vectors are like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import store.index
from store import LatentStore, Vector
from store.care import export, import_
from store.index import KEY, Index, to_bfloat16
from tests.store.test_latents import entry, latents, unit

Matrix = np.ndarray


def keys(entries: np.ndarray) -> np.ndarray:
    made = np.zeros(len(entries), KEY)
    made["entry"] = entries
    return made


def random(rng: np.random.Generator, rows: int, width: int) -> Matrix:
    return rng.normal(size=(rows, width))


def near_duplicates(rng: np.random.Generator, rows: int, width: int) -> Matrix:
    """A few points, each again and again with changes below the precision of the codes, or with none."""
    points = rng.normal(size=(3, width))
    return points[rng.integers(3, size=rows)] + rng.normal(size=(rows, width)) * rng.choice([0, 1e-7, 1e-4, 1e-2], (rows, 1))


def outliers(rng: np.random.Generator, rows: int, width: int) -> Matrix:
    """One number in each row, not always the same, that leaves few steps for the others."""
    made = rng.normal(size=(rows, width)) * 0.01
    made[np.arange(rows), rng.integers(width, size=rows)] = rng.choice([-1, 1], rows)
    return made


def narrow(rng: np.random.Generator, rows: int, width: int) -> Matrix:
    """What text encoders give: a large part that all share."""
    return rng.normal(size=(1, width)) * 3 + rng.normal(size=(rows, width))


KINDS = [random, near_duplicates, outliers, narrow]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    make=st.sampled_from(KINDS),
    rows=st.sampled_from([1, 7, 500, 3000]),
    width=st.sampled_from([3, 16, 30, 64, 512]),
    count=st.sampled_from([1, 10, 600]),
    small=st.sampled_from([100, 4096]),
    unit_length=st.booleans(),
)
def test_no_row_that_belongs_to_the_nearest_is_left_out(
    seed: int, make: object, rows: int, width: int, count: int, small: int, unit_length: bool
) -> None:
    """With `small` 100 torch multiplies bytes from there on; without unit length only the proof is left to rely on."""
    rng = np.random.default_rng(seed)
    matrix = make(rng, rows, width)  # type: ignore[operator]
    if unit_length:
        matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    matrix = matrix.astype(np.float32)
    index = Index(width)
    for part in np.array_split(np.arange(rows), min(rows, 3)):
        index.extend(keys(part), matrix[part])
    queries = np.concatenate([matrix[:2], rng.normal(size=(2, width)), np.zeros((1, width))]).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.index, "SMALL", small)
        found = index.candidates(queries, count)
    truth = queries.astype(np.float64) @ matrix.T.astype(np.float64)
    for similarity, candidates in zip(truth, found, strict=True):
        last = np.sort(similarity)[-min(count, rows)]
        assert set(np.flatnonzero(similarity >= last)) <= set(candidates["entry"].tolist())


def test_few_rows_are_candidates_when_rows_are_apart() -> None:
    rng = np.random.default_rng(0)
    matrix = random(rng, 20_000, 512)
    matrix = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)
    index = Index(512)
    index.extend(keys(np.arange(20_000)), matrix)
    assert all(10 <= len(found) < 200 for found in index.candidates(matrix[:5] + 0.01, 10))


def test_an_index_equals_a_new_one_after_any_additions_and_removals() -> None:
    rng = np.random.default_rng(0)
    index, truth = Index(16), {}
    for step in range(300):
        if truth and rng.random() < 0.3:
            for gone in rng.choice(sorted(truth), size=min(len(truth), int(rng.integers(1, 30))), replace=False).tolist():
                del truth[gone]
            index.keep(np.array(sorted(truth), np.uint64))
        else:
            new = step * 100 + np.arange(rng.integers(1, 40))
            rows = rng.normal(size=(len(new), 16)).astype(np.float32)
            index.extend(keys(new), rows)
            truth |= dict(zip(new.tolist(), rows, strict=True))
        assert sorted(index.keys["entry"][: index.count].tolist()) == sorted(truth)
    for key, code, scale in zip(index.keys["entry"].tolist(), index.codes, index.scales, strict=True):
        if key in truth:
            assert np.linalg.norm(truth[key] - index.centre - scale * code) <= index.error * 1.001
            del truth[key]
    assert not truth


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    import torch

    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    ours = to_bfloat16(values)
    assert np.array_equal(torch.from_numpy(ours).bfloat16().float().numpy(), ours)
    assert np.abs(ours - values).max() <= np.abs(values).max() * 2**-8


@pytest.mark.parametrize("make", KINDS)
def test_a_store_finds_what_numpy_finds(tmp_path: Path, make: object) -> None:
    rng = np.random.default_rng(1)
    matrix = make(rng, 60, 32)  # type: ignore[operator]
    matrix = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)
    cache = LatentStore(tmp_path / "cache")
    ids = [cache.put(entry(), {}, [Vector("entity", str(n + k), matrix[n + k]) for k in range(3)]).id for n in range(0, 60, 3)]
    cache.remove(ids[5:8])
    left = [n for n in range(60) if not 15 <= n < 24]
    queries = rng.normal(size=(4, 32)).astype(np.float32)
    for query, found in zip(queries, cache.search("n", "entity", queries, 9), strict=True):
        truth = matrix[left].astype(np.float64) @ query.astype(np.float64)
        best = np.sort(truth)[::-1][:9]
        assert [m.similarity for m in found] == pytest.approx(best.tolist(), abs=1e-12)
        assert all(m.id == ids[int(m.label) // 3] for m in found)


def test_of_equally_near_entries_the_newest_comes_first(tmp_path: Path) -> None:
    cache = LatentStore(tmp_path / "cache")
    ids = [cache.put(entry(), {}, [Vector("prompt", "", unit(1, 2))]).id for _ in range(5)]
    assert [m.id for m in cache.search("n", "prompt", unit(1, 2)[None], 3)[0]] == ids[:1:-1]


def test_an_open_store_finds_imported_entries_that_are_older_than_its_own(tmp_path: Path) -> None:
    old = LatentStore(tmp_path / "old")
    first = old.put(entry(), latents(), [Vector("prompt", "", unit(1, 0))])
    old.close()
    cache = LatentStore(tmp_path / "cache")
    second = cache.put(entry(), latents(), [Vector("prompt", "", unit(1, 1))])
    assert [m.id for m in cache.search("n", "prompt", unit(1, 0)[None], 5)[0]] == [second.id]
    export(tmp_path / "old", tmp_path / "file")
    cache.environment.close()
    import_(tmp_path / "cache", tmp_path / "file")
    assert [m.id for m in cache.search("n", "prompt", unit(1, 0)[None], 5)[0]] == [first.id, second.id]


def test_only_what_is_new_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LatentStore(tmp_path / "cache")
    for number in range(5):
        cache.put(entry(str(number)), {}, [Vector("prompt", "", unit(1, number))])
    cache.search("n", "prompt", unit(1, 0)[None], 1)
    read: list[int] = []
    extend = Index.extend
    monkeypatch.setattr(Index, "extend", lambda self, new, rows: (read.append(len(rows)), extend(self, new, rows)))
    cache.put(entry("new"), {}, [Vector("prompt", "", unit(1, 9))])
    cache.log({"kind": "hit"})
    cache.remove([next(cache.entries()).id])
    assert len(cache.search("n", "prompt", unit(1, 0)[None], 9)[0]) == 5
    assert read == [1]
