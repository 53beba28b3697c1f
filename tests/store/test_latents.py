"""What a store keeps, finds, forgets, and refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from store import Entry, LatentStore, StoreError, Vector, namespace
from store.care import compact, export, import_, verify
from store.environment import SCHEMA, file_system
from store.eviction import POLICIES, Use


def entry(prompt: str = "a red ball", space: str = "n") -> Entry:
    return Entry(prompt, ("red ball",), space, "tiny", 3, {"scheduler": "euler", "sigmas": [1.0, 0.5]}, (64, 64, 17), 2.5)


def latents(seed: int = 0, channels: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(1, channels, 5, 8, 8, generator=generator) for name in ("step2", "clean")}


def unit(*values: float) -> np.ndarray:
    vector = np.array(values, np.float32)
    return vector / np.linalg.norm(vector)


@pytest.fixture
def store(tmp_path: Path) -> LatentStore:
    return LatentStore(tmp_path / "cache")


def test_an_entry_comes_back_as_it_was_put(store: LatentStore) -> None:
    kept = store.put(entry(), latents(), [Vector("prompt", "", unit(1, 0))], thumbnail=b"picture")
    found = store.entry(kept.id)
    assert found == kept
    assert found.bytes > 2 * 4 * 5 * 64 * 2
    assert found.latents == ("step2", "clean")
    assert store.thumbnail(kept.id) == b"picture"
    for name, value in store.latents(kept.id).items():
        assert (value - latents()[name]).abs().max() < 0.02


@pytest.mark.parametrize(("numbers", "error"), [("float32", 0.0), ("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2)])
def test_number_formats_trade_bytes_for_error(tmp_path: Path, numbers: str, error: float) -> None:
    store = LatentStore(tmp_path / numbers, numbers=numbers)
    kept = store.put(entry(), latents(channels=32), [])
    truth = latents(channels=32)["clean"]
    relative = (store.latents(kept.id)["clean"] - truth).norm() / truth.norm()
    assert relative <= error
    size = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}[numbers] * 2 * truth.numel()
    assert size <= kept.bytes <= size * 1.2 + 20_000


def test_search_is_exact_ranked_and_inside_the_namespace_and_the_kind(store: LatentStore) -> None:
    near = store.put(entry(), latents(), [Vector("entity", "red ball", unit(1, 0.1)), Vector("prompt", "", unit(1, 0))])
    store.put(entry(space="other"), latents(), [Vector("entity", "red ball", unit(1, 0))])
    far = store.put(entry(), latents(), [Vector("entity", "blue star", unit(1, 1)), Vector("entity", "dog", unit(0, 1))])
    found = store.search("n", "entity", unit(1, 0)[None], 5)[0]
    assert [(m.id, m.label) for m in found] == [(near.id, "red ball"), (far.id, "blue star"), (far.id, "dog")]
    assert found[0].similarity == pytest.approx(1 / np.sqrt(1.01), abs=1e-6)
    assert [m.id for m in store.search("n", "prompt", unit(1, 0)[None], 5)[0]] == [near.id]
    assert store.search("nowhere", "entity", unit(1, 0)[None], 5) == [[]]
    assert store.search("n", "sound", unit(1, 0)[None], 5) == [[]]


def test_the_vectors_of_entries_come_back_with_their_labels_in_order(store: LatentStore) -> None:
    rows = [("red ball", unit(1, 0.1)), ("blue star", unit(1, 1))]
    first = store.put(entry(), latents(), [Vector("entity", *row) for row in rows])
    second = store.put(entry(), latents(), [Vector("prompt", "", unit(1, 0))])
    found = store.vectors("n", "entity", [first.id, second.id, "00" * 8])
    assert list(found) == [first.id]
    assert [label for label, _ in found[first.id]] == ["red ball", "blue star"]
    assert all(np.array_equal(values, truth) for (_, values), (_, truth) in zip(found[first.id], rows, strict=True))
    store.remove([first.id])
    assert store.vectors("n", "entity", [first.id]) == {}


def test_vectors_of_another_width_are_found_by_their_own_queries_only(store: LatentStore) -> None:
    two = store.put(entry(), latents(), [Vector("prompt", "", unit(1, 0))])
    three = store.put(entry(), latents(), [Vector("prompt", "", unit(1, 0, 0))])
    assert [m.id for m in store.search("n", "prompt", unit(1, 0)[None], 5)[0]] == [two.id]
    assert [m.id for m in store.search("n", "prompt", unit(1, 0, 0)[None], 5)[0]] == [three.id]
    assert list(store.vectors("n", "prompt", [two.id, three.id])) == [two.id, three.id]


@pytest.mark.parametrize("values", [[np.nan, 1.0], [], [[1.0, 0.0]]])
def test_a_vector_that_is_no_row_of_numbers_is_refused(store: LatentStore, values: list[float]) -> None:
    with pytest.raises(StoreError, match="the entity vector 'ball' is no row of finite numbers; nothing was stored"):
        store.put(entry(), latents(), [Vector("entity", "ball", np.array(values))])
    assert len(store) == 0


def test_search_sees_what_another_process_wrote_and_removed(store: LatentStore, tmp_path: Path) -> None:
    import multiprocessing

    first = store.put(entry(), latents(), [Vector("prompt", "", unit(1, 0))])
    assert len(store.search("n", "prompt", unit(1, 0)[None], 5)[0]) == 1
    child = multiprocessing.get_context("spawn").Process(target=write_and_remove, args=(tmp_path / "cache", first.id))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    found = store.search("n", "prompt", unit(1, 0)[None], 5)[0]
    assert [m.label for m in found] == ["from the child"]


def write_and_remove(path: Path, id: str) -> None:
    other = LatentStore(path)
    other.put(entry(), latents(), [Vector("prompt", "from the child", unit(1, 0))])
    other.remove([id])


def test_namespaces_tell_models_shapes_and_tenants_apart() -> None:
    base = namespace("f", (1, 4, 5, 8, 8), "flow_prediction")
    assert (
        len({base, namespace("g", (1, 4, 5, 8, 8), "flow_prediction"), namespace("f", (1, 4, 5, 8, 9), "flow_prediction")}) == 3
    )
    assert namespace("f", (1,), "flow_prediction", tenant="a") != namespace("f", (1,), "flow_prediction", tenant="b")


def test_the_budget_holds_and_lru_keeps_what_was_used(tmp_path: Path) -> None:
    store = LatentStore(tmp_path / "cache", budget=1)
    with pytest.raises(StoreError, match="exceeds the budget of 1; give a larger --cache-budget"):
        store.put(entry(), latents(), [])
    assert len(store) == 0
    store.budget = 200_000
    first = store.put(entry("first"), latents(), [])
    for number in range(20):
        store.put(entry(f"p{number}"), latents(number), [Vector("prompt", "", unit(1, 0))])
        store.touch(first.id, saved=10)
        assert store.used() <= store.budget
    prompts = [e.prompt for e in store.entries()]
    assert "first" in prompts
    assert "p19" in prompts
    assert len(prompts) < 21
    assert store.entry(first.id).hits == 20


def test_policies_rank_as_they_say() -> None:
    old_busy = Use(stored=0, used=50, hits=9, saved=90)
    fresh = Use(stored=100, used=100, hits=0, saved=0)
    old_idle = Use(stored=1, used=1, hits=0, saved=0)
    order = {
        name: [u for _, u in sorted((p(u), i) for i, u in enumerate((old_busy, fresh, old_idle)))]
        for name, p in POLICIES.items()
    }
    assert order == {"lru": [2, 0, 1], "lfu": [2, 1, 0], "lcbfu": [2, 1, 0]}


def test_clear_and_evict(store: LatentStore) -> None:
    for number in range(5):
        store.put(entry(str(number)), latents(number), [Vector("prompt", "", unit(1, 0))])
    store.log({"hit": True})
    assert store.evict(store.used() // 2) >= 2
    assert 0 < len(store) < 5
    store.clear()
    assert (len(store), store.events(), store.search("n", "prompt", unit(1, 0)[None], 3)) == (0, [], [[]])


def test_two_stores_on_one_path_in_one_process(store: LatentStore, tmp_path: Path) -> None:
    store.put(entry(), latents(), [])
    store.close()
    again = LatentStore(tmp_path / "cache", readonly=True)
    assert len(again) == 1
    with pytest.raises(StoreError, match="is open for reading only; leave out --read-only-cache to change it"):
        again.put(entry(), latents(), [])


def test_schema_of_a_newer_chai_is_refused(store: LatentStore, tmp_path: Path) -> None:
    store.put(entry(), latents(), [])
    with store.environment.transaction(write=True) as txn:
        txn.put(b"schema", str(SCHEMA + 1).encode(), db=store.environment.db["meta"])
    store.close()
    with pytest.raises(StoreError, match="written by a newer chai"):
        len(LatentStore(tmp_path / "cache"))


def test_export_and_import_move_entries_once(store: LatentStore, tmp_path: Path) -> None:
    kept = [store.put(entry(str(n)), latents(n), [Vector("prompt", "", unit(1, n))], thumbnail=b"t") for n in range(3)]
    store.close()
    assert export(tmp_path / "cache", tmp_path / "file") == 3
    assert import_(tmp_path / "other", tmp_path / "file") == 3
    assert import_(tmp_path / "other", tmp_path / "file") == 0
    other = LatentStore(tmp_path / "other")
    assert [e.id for e in other.entries()] == [k.id for k in kept]
    assert torch.equal(other.latents(kept[1].id)["clean"], LatentStore(tmp_path / "cache").latents(kept[1].id)["clean"])
    other.close()
    assert verify(tmp_path / "other").sound


@pytest.mark.parametrize("harm", ["cut", "flip", "foreign", "empty"])
def test_a_harmed_export_is_refused_before_anything_is_written(store: LatentStore, tmp_path: Path, harm: str) -> None:
    store.put(entry(), latents(), [Vector("prompt", "", unit(1, 0))])
    store.close()
    file = tmp_path / "file"
    export(tmp_path / "cache", file)
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 1
    file.write_bytes({"cut": data[:-100], "flip": data, "foreign": b"PK\3\4" + data, "empty": b""}[harm])
    with pytest.raises(StoreError, match="not a whole chai cache export"):
        import_(tmp_path / "other", file)
    assert not (tmp_path / "other").exists()


def test_compacting_shrinks_the_file_and_keeps_the_entries(store: LatentStore, tmp_path: Path) -> None:
    kept = [store.put(entry(str(n)), latents(n, 64), []) for n in range(10)]
    store.remove([k.id for k in kept[:8]])
    store.close()
    before, after = compact(tmp_path / "cache")
    assert after < before / 2
    assert [e.prompt for e in LatentStore(tmp_path / "cache").entries()] == ["8", "9"]


def test_file_systems_are_named_by_the_longest_mount(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    table.write_text("1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /mnt rw shared:1 - nfs4 host:/x rw\n")
    assert file_system(Path("/mnt/cache"), str(table)) == "nfs4"
    assert file_system(Path("/mntx"), str(table)) == "ext4"
