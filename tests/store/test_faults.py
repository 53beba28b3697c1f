"""What happens to a store when the world is unkind: each fault made for real."""

from __future__ import annotations

import multiprocessing
import os
import random
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from store import LatentStore, StoreError, Vector
from store.care import verify
from store.environment import check_whole
from tests.store.test_latents import entry, latents, unit

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")


def fill(path: Path, count: int = 4) -> list[str]:
    store = LatentStore(path)
    ids = [store.put(entry(str(n)), latents(n), [Vector("prompt", "", unit(1, n))]).id for n in range(count)]
    store.close()
    return ids


def put_forever(path: Path, budget: int) -> None:
    store = LatentStore(path, budget=budget)
    number = 0
    while True:
        store.put(entry(str(number)), latents(0), [Vector("prompt", "", unit(1, 0)), Vector("entity", "", unit(0, 1))])
        number += 1


def test_killed_while_putting_and_evicting(tmp_path: Path) -> None:
    """200 kills: the store opens, every entry is whole, and the bytes are within the budget."""
    budget, chance = 300_000, random.Random(0)
    latents(0)
    for _ in range(200):
        child = FORK.Process(target=put_forever, args=(tmp_path / "cache", budget))
        child.start()
        time.sleep(chance.uniform(0.01, 0.08))
        child.kill()
        child.join()
    findings = verify(tmp_path / "cache")
    assert findings.sound, findings
    store = LatentStore(tmp_path / "cache", budget=budget)
    most = len(store)
    assert most > 1
    assert store.used() <= budget
    assert sum(e.bytes for e in store.entries()) <= store.used() + 4096 * most
    store.put(entry(), latents(0), [])


@pytest.mark.parametrize("harm", ["cut", "flip a latent", "zero pages", "other version", "not lmdb"])
def test_a_harmed_file_is_an_error_or_a_miss_never_a_crash(tmp_path: Path, harm: str) -> None:
    ids = fill(tmp_path / "cache", 12)
    data = tmp_path / "cache" / "data.mdb"
    content = bytearray(data.read_bytes())
    if harm == "cut":
        content = content[: len(content) // 2]
    elif harm == "flip a latent":
        from store.codec import pack

        at = content.find(pack(latents(3), "bfloat16")[600:700])
        assert at > 0
        content[at] ^= 0xFF
    elif harm == "zero pages":
        content[4096 * 2 : 4096 * 40] = bytes(4096 * 38)
    elif harm == "other version":
        content[20:24] = content[4096 + 20 : 4096 + 24] = (2).to_bytes(4, "little")
    else:
        content = bytearray(b"SQLite format 3\0" * 1000)
    data.write_bytes(content)
    reader = SPAWN.Process(target=read_all, args=(tmp_path / "cache", ids, tmp_path / "said"))
    reader.start()
    reader.join(120)
    assert reader.exitcode == 0
    said = (tmp_path / "said").read_text()
    assert "move it away" in said or "1 missing" in said
    findings = verify(tmp_path / "cache", repair=True)
    assert not findings.sound or "1 missing" in said
    assert fill(tmp_path / "cache", 1)
    assert verify(tmp_path / "cache").sound


def read_all(path: Path, ids: list[str], said: Path) -> None:
    missing = 0
    try:
        store = LatentStore(path)
        for id in ids:
            try:
                store.latents(id)
            except KeyError:
                missing += 1
        store.search("n", "prompt", np.eye(2, dtype=np.float32), 3)
    except StoreError as error:
        said.write_text(str(error))
        return
    said.write_text(f"{missing} missing")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine cannot mount a tmpfs")
    try:
        store = LatentStore(disk / "cache")
        kept: list[str] = []

        def fill_up() -> None:
            for number in range(100):
                kept.append(store.put(entry(str(number)), latents(number, 32), []).id)

        with pytest.raises(StoreError, match="is full; free some space"):
            fill_up()
        assert kept
        for id in kept:
            assert store.latents(id)
        store.close()
        assert verify(disk / "cache").entries == len(kept)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        LatentStore(tmp_path / "file" / "cache").put(entry(), latents(), [])


NOBODY = 65534


def as_nobody(path: Path, readonly: bool, said: Path) -> None:
    """Read, then put, without the rights of root; writes down what came of it."""
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    store = LatentStore(path, readonly=readonly)
    results = []
    for step in (
        lambda: f"{len(store.search('n', 'prompt', unit(1, 0)[None], 9)[0])} found",
        lambda: f"{len(store.latents(next(store.entries()).id))} latents",
        lambda: store.put(entry(), latents(), []).prompt,
    ):
        try:
            results.append(step())
        except StoreError as error:
            results.append(str(error))
    said.write_text("\n".join(results))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter, with a cache of root's in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        fill(folder / "cache")
        LatentStore(folder / "cache", readonly=True).latents(LatentStore(folder / "cache").ids()[0])
        (folder / "said").touch()
        (folder / "said").chmod(0o666)
        yield folder


def told_to_nobody(folder: Path, readonly: bool) -> list[str]:
    child = FORK.Process(target=as_nobody, args=(folder / "cache", readonly, folder / "said"))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    return (folder / "said").read_text().splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_a_cache_that_only_its_owner_may_write(shared: Path) -> None:
    found, read, put = told_to_nobody(shared, readonly=True)
    assert (found, read) == ("4 found", "2 latents")
    assert put == f"the cache at {shared / 'cache'} is open for reading only; leave out --read-only-cache to change it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_writer_without_permission_is_told_what_to_do(shared: Path) -> None:
    advice = f"the cache at {shared / 'cache'} cannot be written; use --read-only-cache, or give another --cache"
    assert told_to_nobody(shared, readonly=False) == [advice] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("readonly", [True, False])
def test_a_private_cache_is_no_one_elses(shared: Path, readonly: bool) -> None:
    (shared / "cache" / "data.mdb").chmod(0o600)
    advice = f"the cache at {shared / 'cache'} belongs to another user, who keeps it private; give another --cache"
    assert set(told_to_nobody(shared, readonly)[:2]) == {advice}


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.environment.file_system", lambda path: "nfs4")
    with pytest.raises(StoreError, match=r"network file system \(nfs4\)"):
        len(LatentStore(tmp_path / "cache"))


def put_and_read(path: Path, number: int) -> None:
    store = LatentStore(path, budget=2_000_000)
    for turn in range(8):
        store.put(entry(f"{number}-{turn}"), latents(turn), [Vector("prompt", "", unit(1, turn))])
        for match in store.search("n", "prompt", unit(1, 0)[None], 3)[0]:
            try:
                store.latents(match.id)
            except KeyError:
                continue
            store.touch(match.id, 1.0)
        store.log({"turn": turn})


def test_a_file_that_grows_while_it_is_looked_at_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process adds pages and then says so in the header, in between."""
    store = LatentStore(tmp_path / "cache")
    store.put(entry("first"), latents(1), [Vector("prompt", "", unit(1, 1))])
    store.close()
    data = tmp_path / "cache" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[:-4096])
    with pytest.raises(StoreError, match="is cut off"):
        check_whole(data)

    def unpack(form: str, buffer: bytes, offset: int = 0) -> tuple[int, ...]:
        if form == "=QQ":
            data.write_bytes(whole)
        return struct.unpack_from(form, buffer, offset)

    monkeypatch.setattr("store.environment.struct", SimpleNamespace(unpack_from=unpack))
    check_whole(data)


def test_eight_processes_at_once(tmp_path: Path) -> None:
    children = [SPAWN.Process(target=put_and_read, args=(tmp_path / "cache", n)) for n in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(300)
    assert [child.exitcode for child in children] == [0] * 8
    store = LatentStore(tmp_path / "cache", budget=2_000_000)
    assert len(store.events()) == 64
    assert store.used() <= 2_000_000
    store.close()
    assert verify(tmp_path / "cache").sound


def hold(path: Path, ready: Path) -> None:
    store = LatentStore(path)
    with store.environment.transaction():
        ready.write_text("")
        time.sleep(600)


def test_a_stale_reader_does_not_stop_writers_and_its_slot_is_freed(tmp_path: Path) -> None:
    fill(tmp_path / "cache")
    child = SPAWN.Process(target=hold, args=(tmp_path / "cache", tmp_path / "ready"))
    child.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    store = LatentStore(tmp_path / "cache")
    store.put(entry(), latents(), [])
    child.kill()
    child.join()
    assert store.environment.open().reader_check() == 1
    assert len(store) == 5


def test_a_forked_child_opens_the_store_for_itself(tmp_path: Path) -> None:
    store = LatentStore(tmp_path / "cache")
    store.put(entry(), latents(), [Vector("prompt", "", unit(1, 0))])
    assert len(store.search("n", "prompt", unit(1, 0)[None], 1)[0]) == 1
    child = FORK.Process(target=store.log, args=({"from": "child"},))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert store.events() == [{"from": "child"}]
    store.put(entry(), latents(), [])
    assert len(store) == 2
