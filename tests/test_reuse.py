"""`chai gen` with the cache: hits, misses, what they say, and that no trouble with the cache ever costs a video."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from chai_cli.backbones.base import find_record
from chai_cli.backbones.wan import WanBackbone
from chai_cli.denoise import Trajectory
from chai_cli.donors import Donors
from chai_cli.report import Row, gains, read_rows
from store import LatentStore, StoreError
from tests.conftest import rows_of, videos_of

Reuse = Callable[..., Result]
CLIP = find_record("embedded").embedder
FEW = ("--steps", "4", "--method", "chai", "--fast-steps", "2", "--cache-steps", "2", "--no-metadata")


@pytest.fixture
def reuse(chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> Reuse:
    """`chai gen` with the cache `tmp_path/cache` on the tiny model, into `tmp_path/out` or another folder."""

    def run(prompts: list[str], *options: str | Path, out: str = "out") -> Result:
        file = tmp_path / "prompts.txt"
        file.write_text("\n".join(prompts), "utf-8")
        size = ("--height", "64", "--width", "64", "--num-frames", "9")
        where = ("--out", tmp_path / out, "--cache", tmp_path / "cache", "--embedder", CLIP)
        return chai("gen", file, "--model", tiny_folder, *where, *size, *FEW, *options)

    return run


def reused(folder: Path) -> list[str]:
    return [row["reuse"] for row in rows_of(folder)]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name.split("-", 1)[1]: path.read_bytes() for path in folder.glob("*.mp4")}


RED, BLUE, RELATED = "a red ball on a snowy field", "a blue star at sunset", "a red ball in a forest"


def test_empty_cache_renders_densely_and_makes_the_same_request_a_hit(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED], out="first")
    reuse([RED], "--no-cache", out="dense")
    reuse([RED], out="again")
    assert bytes_of(tmp_path / "first") == bytes_of(tmp_path / "dense")
    assert (reused(tmp_path / "first"), reused(tmp_path / "dense"), reused(tmp_path / "again")) == (["miss"], ["none"], ["hit"])


def test_a_hit_says_what_it_shares_with_whom_and_what_it_saved(reuse: Reuse, tmp_path: Path) -> None:
    result = reuse([RED, BLUE, RELATED])
    assert result.exit_code == 0, result.output
    first, second, hit = rows_of(tmp_path / "out")
    assert (first["reuse"], first["why"], second["reuse"]) == ("miss", "the cache is empty", "miss")
    assert "nearest entity" in second["why"]
    assert (hit["reuse"], hit["donor_prompt"], hit["steps"], hit["model_calls"], hit["calls_saved"]) == ("hit", RED, 2, 4, 4)
    assert hit["shared"] == [{"entity": "red ball", "donor_entity": "red ball", "similarity": pytest.approx(1)}]
    assert set(hit["seconds"]) == {"text", "retrieval", "denoise", "write", "decode", "store", "total"}
    assert "hit: a red ball on a snowy field (red ball 1.00)" in " ".join(result.output.replace("│", " ").split())
    assert "1 of 3 hits" in result.output
    assert first["not_stored"] == ""


def test_only_dense_renders_become_donors(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED, RELATED])
    assert [entry.prompt for entry in LatentStore(tmp_path / "cache").entries()] == [RED]


def test_second_run_skips_and_overwrite_hits(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED, BLUE])
    assert "0 rendered, 2 skipped" in reuse([RED, BLUE]).output
    reuse([RED, BLUE], "--overwrite")
    assert reused(tmp_path / "out") == ["miss", "miss", "hit", "hit"]


def test_a_frozen_cache_gives_the_same_bytes_in_any_order(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED, BLUE], out="donors")
    asked = [RELATED, "a green cross in a city", "a blue star over the sea", RED]
    frozen = "--read-only-cache"
    reuse(asked, frozen, out="forward")
    reuse(asked[::-1], frozen, out="backward")
    for prompt in asked:
        reuse([prompt], frozen, out="alone")
    for row in rows_of(tmp_path / "forward"):
        assert (row["reuse"] == "miss") == (row["prompt"] == asked[1])
    forward, backward = bytes_of(tmp_path / "forward"), bytes_of(tmp_path / "backward")
    assert forward == backward
    assert len(forward) == 4
    alone = bytes_of(tmp_path / "alone")
    assert alone == forward


def test_read_only_keeps_nothing_and_says_so(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED], out="first")
    before = (tmp_path / "cache" / "data.mdb").read_bytes()
    result = reuse([BLUE], "--read-only-cache")
    assert rows_of(tmp_path / "out")[0]["not_stored"] == "the cache is read-only"
    assert "not stored" in result.output
    assert (tmp_path / "cache" / "data.mdb").read_bytes() == before


def test_without_the_cache_nothing_is_touched(reuse: Reuse, tmp_path: Path) -> None:
    assert reuse([RED], "--no-cache").exit_code == 0
    assert not (tmp_path / "cache").exists()
    assert reused(tmp_path / "out") == ["none"]


@pytest.mark.parametrize(
    "other", [("--tenant", "b"), ("--width", "96"), ("--num-frames", "5"), ("--dtype", "bfloat16")], ids=lambda o: o[0]
)
def test_entries_of_another_tenant_size_or_model_are_no_donors(reuse: Reuse, tmp_path: Path, other: tuple[str, ...]) -> None:
    reuse([RED], out="first")
    reuse([RED], *other)
    row = rows_of(tmp_path / "out")[0]
    assert (row["reuse"], row["why"]) == ("miss", "the cache is empty")


def test_changed_reuse_options_render_again_and_donors_that_lack_latents_are_refused(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED])
    result = reuse([RED], "--cache-steps", "1,2")
    assert "1 rendered" in result.output
    row = rows_of(tmp_path / "out")[-1]
    assert (row["reuse"], row["why"]) == ("miss", "the donor's entry does not hold the latents that these options read")


@pytest.mark.parametrize("options", [("--match", "sigma"), ("--match", "final"), ("--cache-mode", "append")])
def test_every_way_of_reuse_makes_a_video_of_its_own(reuse: Reuse, tmp_path: Path, options: tuple[str, ...]) -> None:
    reuse([RED, RELATED], out="plain")
    reuse([RED, RELATED], *options, "--tenant", "other")
    assert reused(tmp_path / "out") == ["miss", "hit"]
    hit = "a-red-ball-in-a-forest.mp4"
    assert bytes_of(tmp_path / "out")[hit] != bytes_of(tmp_path / "plain")[hit]


def test_show_repeats_the_reuse_options(reuse: Reuse, chai: Callable[..., Result], tmp_path: Path) -> None:
    reuse([RED], "--metadata", "--match", "sigma")
    said = chai("show", tmp_path / "out" / "0001-a-red-ball-on-a-snowy-field.mp4").stdout
    assert "--method chai:fast-steps=2,match=sigma,steps=2,blocks=1,mode=replace,sides=both" in said


@pytest.fixture
def nirvana(chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> Reuse:
    """As `reuse`, with latents to start from."""

    def run(prompts: list[str], *options: str | Path, method: str = "nirvana", out: str = "out") -> Result:
        (tmp_path / "prompts.txt").write_text("\n".join(prompts), "utf-8")
        size = ("--height", "64", "--width", "64", "--num-frames", "9", "--steps", "10", "--scheduler", "euler")
        where = ("--out", tmp_path / out, "--cache", tmp_path / "cache", "--embedder", CLIP, "--model", tiny_folder)
        return chai("gen", tmp_path / "prompts.txt", *where, *size, "--method", method, *options)

    return run


def test_a_hit_that_starts_from_its_own_trajectory_leaves_out_half_the_steps_and_gives_the_same_video(
    nirvana: Reuse, tmp_path: Path
) -> None:
    nirvana([RED], "--cache-dtype", "float32", "--no-metadata")
    nirvana([RED], "--cache-dtype", "float32", "--no-metadata", out="again")
    row = rows_of(tmp_path / "again")[0]
    assert (row["reuse"], row["steps"], row["method"]) == ("hit", 5, "nirvana")
    assert row["calls_saved"] == 2 * 5
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "again")


def test_a_method_that_goes_by_whole_prompts_asks_for_no_shared_entity(nirvana: Reuse, tmp_path: Path) -> None:
    nirvana([RED, "a small red ball on a snowy field", BLUE])
    first, *rest = rows_of(tmp_path / "out")
    assert first["why"] == "the cache is empty"
    for row in rest:
        assert row["shared"] == []
        assert ("alike" in row["why"]) == (row["reuse"] == "hit")
    assert reused(tmp_path / "out") == ["miss", "hit", "miss"]


def test_entries_of_one_method_are_no_donors_for_another_that_reads_other_latents(nirvana: Reuse, tmp_path: Path) -> None:
    nirvana([RED], method="chai:fast-steps=4,steps=4", out="chai")
    nirvana([RED], method="nirvana:source=clean")
    assert reused(tmp_path / "out") == ["miss"]
    assert "does not hold the latents" in rows_of(tmp_path / "out")[0]["why"]


@pytest.mark.parametrize(
    "method",
    ["nirvana:source=clean,start-sigma=0.8", "nirvana+chai:fast-steps=5,steps=3,match=sigma", "chai:steps=2/4,blocks=1/2"],
)
def test_show_repeats_any_method(nirvana: Reuse, chai: Callable[..., Result], tmp_path: Path, method: str) -> None:
    from chai_cli.reuse import reuse_of

    nirvana([RED], method=method)
    said = chai("show", tmp_path / "out" / "0001-a-red-ball-on-a-snowy-field.mp4").stdout.split()
    assert reuse_of(said[said.index("--method") + 1]) == reuse_of(method)


def test_several_donors_are_read_where_there_are(nirvana: Reuse, tmp_path: Path) -> None:
    nirvana([RED, "a blue star in a forest"], method="chai:fast-steps=4,donors=1", out="one")
    nirvana([RELATED], "--read-only-cache", method="chai:fast-steps=4,donors=1", out="alone")
    nirvana([RELATED], "--read-only-cache", method="chai:fast-steps=4,donors=3", out="three")
    alone, three = (bytes_of(tmp_path / name) for name in ("alone", "three"))
    assert reused(tmp_path / "one") == ["miss", "miss"]
    assert reused(tmp_path / "alone") == reused(tmp_path / "three") == ["hit"]
    assert alone != three


# Hits that learn from many renders

MANY = [RED, BLUE, "a green ring in a city", "a white heart at sea", "a pink cross in space", "a yellow square in the desert"]
LEARNING = "correction:fast-steps=3,least=4"


def test_after_four_full_renders_every_prompt_hits_related_or_not(
    nirvana: Reuse, chai: Callable[..., Result], tmp_path: Path
) -> None:
    result = nirvana(MANY, method=LEARNING)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "out")
    assert [row["reuse"] for row in rows] == ["miss"] * 4 + ["hit"] * 2
    assert [row["why"] for row in rows[:4]] == [f"{n} of the 4 full renders to learn from" for n in range(4)]
    for row in rows[4:]:
        assert (row["steps"], row["model_calls"], row["calls_saved"], row["donor"]) == (3, 6, 14, "")
        assert row["why"] == "learned from 4 full renders"
    assert "hit: learned from 4 full renders" in " ".join(result.output.replace("│", " ").split())
    kept = [entry.latents for entry in LatentStore(tmp_path / "cache").entries()]
    assert kept[4:] == [("estimate0",)] * 2  # what the model said first to each hit
    assert "(a first estimate only)" in chai("cache", "ls", "--cache", tmp_path / "cache").output
    found = json.loads(chai("stats", "--cache", tmp_path / "cache", "--json").stdout)
    assert (found["lookups"], found["hits"], found["donors"]) == (6, 2, [])


def test_what_was_learned_does_not_depend_on_who_asks_first(nirvana: Reuse, tmp_path: Path) -> None:
    nirvana(MANY[:5], method=LEARNING, out="donors")
    for order, out in ((MANY[4:], "forward"), (MANY[:3:-1], "backward")):
        nirvana(order, "--read-only-cache", "--no-metadata", method=LEARNING, out=out)
    forward = bytes_of(tmp_path / "forward")
    assert forward == bytes_of(tmp_path / "backward")
    assert len(forward) == 2


def test_it_learns_once_in_a_run_as_soon_as_there_is_enough(
    nirvana: Reuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import chai_cli.reuse.correction as correction

    whole, fits = correction.fit, []
    monkeypatch.setattr(correction, "fit", lambda *given: (fits.append(1), whole(*given))[1])
    nirvana(MANY, method=LEARNING)
    assert len(fits) == 1
    nirvana([*MANY, RELATED], method="correction:fast-steps=3,least=6", out="more")
    assert reused(tmp_path / "more") == ["miss"] * 2 + ["hit"] * 5
    assert len(fits) == 2


def test_with_enough_first_estimates_the_first_step_of_a_hit_takes_no_call(chai: Callable[..., Result], tmp_path: Path) -> None:
    places = ("in the desert", "at sea", "in space", "in a forest")
    prompts = [f"a large {colour} ball {place}" for place in places for colour in ("red", "blue", "pink", "green")]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))

    def run(method: str, out: str) -> list[dict[str, Any]]:
        command = ("gen", tmp_path / "prompts.txt", "--steps", "5", "--cache", tmp_path / "cache", "--overwrite")
        result = chai(*command, "--out", tmp_path / out, "--method", f"correction:fast-steps=2,least=4,{method}")
        assert result.exit_code == 0, result.output
        return rows_of(tmp_path / out)

    rows = run("guess=0.1", "first")
    assert [row["reuse"] for row in rows] == ["miss"] * 4 + ["hit"] * 12
    assert [row["model_calls"] for row in rows[4:14]] == [4] * 10
    for row in rows[14:]:  # it learns anew from 6, 9 and 14
        assert (row["steps"], row["model_calls"], row["calls_saved"]) == (2, 2, 8)
        assert row["why"] == "learned from 4 full renders, its first step from 14 prompts"
    assert [row["model_calls"] for row in run("guess=0.1", "again")] == [2] * 16
    entries = list(LatentStore(tmp_path / "cache").entries())
    assert len({entry.prompt for entry in entries}) == len(entries) == 14
    assert {row["model_calls"] for row in run("guess=1", "never")} == {4}


@pytest.mark.parametrize("policy", ["lru", "lfu", "lcbfu"])
def test_first_estimates_never_push_out_what_was_learned_from(nirvana: Reuse, tmp_path: Path, policy: str) -> None:
    prompts = [
        f"a {colour} {shape}" for shape in ("ball", "ring", "cross", "star") for colour in ("red", "blue", "pink", "green")
    ]
    nirvana(prompts, "--cache-budget", "180KB", "--cache-policy", policy, method=LEARNING)
    assert reused(tmp_path / "out") == ["miss"] * 4 + ["hit"] * 12
    entries = list(LatentStore(tmp_path / "cache").entries())
    assert [entry.prompt for entry in entries if "clean" in entry.latents] == prompts[:4]
    assert len(entries) < 16  # the budget was full


def test_a_lesson_stays_if_it_cannot_be_learned_anew(nirvana: Reuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, asked = Donors.gather, []

    def gather(self: Donors, *given: Any) -> Any:
        asked.append(1)
        if len(self.earlier):
            raise MemoryError
        return whole(self, *given)

    monkeypatch.setattr(Donors, "gather", gather)
    nirvana([*MANY, RELATED, "a blue ring", "a red cross"], method=LEARNING)
    assert reused(tmp_path / "out") == ["miss"] * 4 + ["hit"] * 5
    assert len(asked) > 5  # four looks before there was enough, one that learned, one that failed


def test_a_first_estimate_is_no_donor(nirvana: Reuse, tmp_path: Path) -> None:
    nirvana(MANY, method=LEARNING, out="learned")
    nirvana(MANY[4:5], method="nirvana", out="other")
    donor = rows_of(tmp_path / "other")[0]
    assert donor["donor_prompt"] not in MANY[4:]


def test_a_full_cache_makes_room_for_what_it_learns_from(nirvana: Reuse, tmp_path: Path) -> None:
    nirvana([f"{prompt} at night" for prompt in MANY] * 2, "--cache-budget", "400KB", method="chai:steps=2/3/4", out="others")
    nirvana(MANY, "--cache-budget", "400KB", method=LEARNING)
    assert reused(tmp_path / "out") == ["miss"] * 4 + ["hit"] * 2


@pytest.mark.parametrize("other", [("--guidance-scale", "2"), ("--scheduler", "unipc"), ("--steps", "8")], ids=lambda o: o[0])
def test_renders_that_were_solved_otherwise_teach_nothing(nirvana: Reuse, tmp_path: Path, other: tuple[str, ...]) -> None:
    nirvana(MANY[:4], method=LEARNING, out="donors")
    nirvana(MANY[4:5], *other, method=LEARNING)
    (row,) = rows_of(tmp_path / "out")
    assert (row["reuse"], row["why"]) == ("miss", "0 of the 4 full renders to learn from")


def test_entries_without_what_it_reads_are_told_and_damaged_ones_left_out(nirvana: Reuse, tmp_path: Path) -> None:
    nirvana(MANY[:4], method=LEARNING, out="donors")
    nirvana(MANY[4:5], method="correction:fast-steps=4")
    assert rows_of(tmp_path / "out")[0]["why"] == "0 of the 8 full renders to learn from"
    store = LatentStore(tmp_path / "cache")
    with store.environment.transaction(write=True) as txn:
        first = store.ids()[0]
        data = bytearray(txn.get(bytes.fromhex(first), db=store.environment.db["latents"]))
        data[len(data) // 2] ^= 0xFF
        txn.put(bytes.fromhex(first), bytes(data), db=store.environment.db["latents"])
    store.close()
    nirvana(MANY[5:], method=LEARNING, out="damaged")
    (row,) = rows_of(tmp_path / "damaged")
    assert (row["status"], row["reuse"]) == ("done", "miss")
    assert row["why"] == "3 of the 4 full renders to learn from"


def test_a_dry_run_knows_whether_there_is_enough_to_learn_from(nirvana: Reuse, tmp_path: Path) -> None:
    nirvana(MANY[:3], method=LEARNING)
    assert "(0 of them hits on the present cache)" in nirvana(MANY[4:], "--dry-run", method=LEARNING).output
    nirvana(MANY[:4], method=LEARNING)
    result = nirvana(MANY[4:], "--dry-run", method=LEARNING, out="more")
    assert "2 to render (2 of them hits on the present cache)" in result.output
    assert "learned from 4 full renders" in result.output
    other = nirvana(MANY[4:], "--dry-run", method="correction:fast-steps=5", out="more")
    assert "(0 of them hits on the present cache)" in other.output


def test_a_cache_too_small_to_learn_from_is_told(nirvana: Reuse, tmp_path: Path) -> None:
    result = nirvana([RED, BLUE], "--cache-budget", "120KB", method=LEARNING)
    assert result.exit_code == 0
    assert " ".join(result.output.split()).count("no prompt of 64x64, 9 frames can be a hit: the cache has room for") == 1
    assert "of the 4 full renders to learn from; give --cache-budget" in rows_of(tmp_path / "out")[0]["why"]


def test_warm_renders_as_many_as_it_takes_to_learn_well_from_all_over_the_file(
    chai: Callable[..., Result], nirvana: Reuse, tiny_folder: Path, tmp_path: Path
) -> None:
    prompts = [
        f"a {colour} {shape} at sea" for shape in ("ball", "ring", "cross") for colour in ("red", "blue", "pink", "white")
    ]
    (tmp_path / "warm.txt").write_text("\n".join(prompts))
    size = ("--height", "64", "--width", "64", "--num-frames", "9", "--steps", "10", "--scheduler", "euler")
    command = ("cache", "warm", tmp_path / "warm.txt", "--model", tiny_folder, *size, "--cache", tmp_path / "cache")
    command = (*command, "--embedder", CLIP, "--method", LEARNING)
    result = chai(*command, "--limit", "4")
    assert "4 of 12 prompts cover 12" in result.output
    assert {entry.prompt.split()[2] for entry in LatentStore(tmp_path / "cache").entries()} == {"ball", "ring", "cross"}
    assert "8 of 12 prompts cover 12 (the cache covers 12 already)" in chai(*command, "--dry-run").output
    nirvana(prompts[:2], method=LEARNING)
    assert reused(tmp_path / "out") == ["hit", "hit"]
    other = ("--method", "correction:fast-steps=5")
    assert "12 of 12 prompts cover 12" in chai(*command, *other, "--dry-run").output.replace("(the cache covers 0 already)", "")
    elsewhere = (*command, "--cache", tmp_path / "small", "--budget")
    chai(*elsewhere, "400KB")
    assert 4 <= len(LatentStore(tmp_path / "small")) < 12
    assert "nothing to render" in chai(*elsewhere, "400KB").output
    refused = chai(*elsewhere, "100KB")
    assert (refused.exit_code, "give --cache-budget" in refused.stderr) == (2, True)


def test_an_option_of_another_method_says_whose_it_is(nirvana: Reuse) -> None:
    result = nirvana([RED], "--match", "sigma", method="correction")
    assert result.exit_code == 2
    assert "correction has no option --match; --method chai has one" in result.stderr


def test_min_coverage_asks_for_more_than_one_shared_entity(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED, RELATED], "--min-coverage", "0.6")
    row = rows_of(tmp_path / "out")[1]
    assert row["reuse"] == "miss"
    assert row["why"].startswith("the best donor covers 0.5")
    assert row["why"].endswith("of the prompt's entities < 0.60")
    reuse([RED, RELATED], "--min-coverage", "0.45", "--tenant", "other", out="lenient")
    assert reused(tmp_path / "lenient") == ["miss", "hit"]


def test_an_option_that_a_method_does_not_have_is_told(nirvana: Reuse) -> None:
    result = nirvana([RED], "--cache-blocks", "1")
    assert result.exit_code == 2
    assert "nirvana has no option --cache-blocks" in result.stderr


def test_min_similarity_decides(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED], out="first")
    reuse([BLUE], "--min-similarity", "-1", "--read-only-cache", out="lenient")
    reuse([RELATED], "--min-similarity", "1", "--read-only-cache", out="strict")
    assert (reused(tmp_path / "lenient"), reused(tmp_path / "strict")) == (["hit"], ["hit"])  # the same entity is 1 itself


def test_prompts_without_entities_and_hostile_ones_render(reuse: Reuse, tmp_path: Path) -> None:
    prompts = ["a\0b", "!!!", "🟥🟥", "مربع أحمر", "very " * 500, "running quickly"]
    assert reuse(prompts).exit_code == 0
    assert len(videos_of(tmp_path / "out")) == len(prompts)


# Faults: the video is there, the row says why it was not stored and what to do.


def broken_row(reuse: Reuse, tmp_path: Path, *options: str | Path) -> dict[str, Any]:
    result = reuse([RED], *options)
    assert result.exit_code == 0, result.output
    assert len(videos_of(tmp_path / "out")) == 1
    row = rows_of(tmp_path / "out")[0]
    assert row["status"] == "done"
    return row


def test_a_cache_that_is_a_file(reuse: Reuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    row = broken_row(reuse, tmp_path, "--cache", tmp_path / "file")
    assert row["not_stored"].endswith("is a file; give a folder as --cache")


def test_a_cache_on_a_network_file_system(reuse: Reuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.environment.file_system", lambda path: "nfs4")
    row = broken_row(reuse, tmp_path)
    assert "network file system (nfs4)" in row["not_stored"]
    assert "give a local --cache" in row["not_stored"]


def test_a_cache_file_of_something_else(reuse: Reuse, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "data.mdb").write_bytes(b"not a cache" * 10_000)
    row = broken_row(reuse, tmp_path)
    assert "is not a chai cache" in row["not_stored"]
    assert "move it away" in row["not_stored"]


def test_a_budget_smaller_than_one_entry(reuse: Reuse, tmp_path: Path) -> None:
    row = broken_row(reuse, tmp_path, "--cache-budget", "1KB")
    assert "give a larger --cache-budget" in row["not_stored"]


def test_a_full_disk(reuse: Reuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise StoreError("the disk of cache is full; free some space, or run: chai cache evict")

    monkeypatch.setattr(LatentStore, "put", full)
    assert "disk of cache is full" in broken_row(reuse, tmp_path)["not_stored"]


def test_an_unforeseen_error_of_the_cache(reuse: Reuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentStore, "search", lambda *a: 1 / 0)
    monkeypatch.setattr(LatentStore, "put", lambda *a: 1 / 0)
    row = broken_row(reuse, tmp_path)
    assert "ZeroDivisionError" in row["why"]
    assert "ZeroDivisionError" in row["not_stored"]


def test_a_damaged_donor_is_a_miss_and_gone(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED], out="first")
    store = LatentStore(tmp_path / "cache")
    with store.environment.transaction(write=True) as txn:
        cursor = txn.cursor(store.environment.db["latents"])
        cursor.first()
        key, value = bytes(cursor.key()), bytearray(cursor.value())
        value[len(value) // 2] ^= 1
        txn.put(key, bytes(value), db=store.environment.db["latents"])
    store.close()
    reuse([RED])
    assert reused(tmp_path / "out") == ["miss"]
    assert [entry.prompt for entry in LatentStore(tmp_path / "cache").entries()] == [RED]  # the fresh one


def test_without_an_embedder_all_renders_and_stderr_says_what_to_do(
    chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "p.txt").write_text(RED)
    size = ("--height", "64", "--width", "64", "--num-frames", "9", "--cache", tmp_path / "cache")
    result = chai("gen", tmp_path / "p.txt", "--out", tmp_path / "out", "--model", tiny_folder, *size, *FEW)
    assert result.exit_code == 0, result.output
    assert "--embedder" in result.stderr
    assert "--embedder" in rows_of(tmp_path / "out")[0]["not_stored"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--embedder", "no-such-model"), "no-such-model"),
        (("--cache-steps", "two"), "--cache-steps takes numbers from 1"),
        (("--cache-steps", "0"), "--cache-steps takes numbers from 1"),
        (("--cache-blocks", "9"), "blocks 1 to 2, not 9"),
        (("--cache-budget", "much"), "write it as 500MB"),
        (("--cache-budget", "0"), "write it as 500MB"),
        (("--method", "magic"), "there is chai, nirvana, correction, nirvana+chai, dense"),
        (("--cache-steps", "3,9"), "none of the steps that read the donor (3,9) is among the 2 of a hit"),
        (("--method", "dense"), "dense has no option --fast-steps"),
        (("--no-cache", "--read-only-cache"), "--no-cache reads nothing either"),
        (("--width", "60"), "multiples of"),
        (("--num-frames", "8"), "multiple of 4 plus 1"),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_code_2(reuse: Reuse, options: tuple[str, ...], said: str) -> None:
    result = reuse([RED], *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 2


# Looking ahead


def test_dry_run_predicts_hits_without_loading_the_model(reuse: Reuse, monkeypatch: pytest.MonkeyPatch) -> None:
    reuse([RED], out="first")
    monkeypatch.setattr(WanBackbone, "__init__", lambda *a: pytest.fail("the model was loaded"))
    result = reuse([RELATED, BLUE], "--dry-run")
    assert "hit 0001-a-red-ball-in-a-forest.mp4: shares 'red ball'" in result.output
    assert "render 0002-a-blue-star-at-sunset.mp4" in result.output
    assert "2 to render (1 of them hits on the present cache)" in result.output


def test_gains_compare_hits_with_dense_renders_of_the_same_size() -> None:
    def row(reuse: str, total: float, saved: float = 0.0) -> Row:
        return Row("a", 1, "a", "done", reuse=reuse, seconds={"total": total}, seconds_saved=saved, calls_saved=4)

    line = gains([row("miss", 10), row("hit", 2, 8), row("hit", 3, 7)])
    assert line == "2 of 3 hits, 4.0x on hits, 2.0x overall, 8 model calls and 15.0 s saved"
    assert gains([row("none", 10)]) == ""


def test_seconds_saved_count_against_the_median_dense_render() -> None:
    look = type("Look", (), {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 4})()
    donors = Donors.__new__(Donors)
    size = (64, 64, 9, 4)
    donors.dense_seconds = {size: [90.0, 9.0, 1.0, 5.0]}  # the first starts cold
    found = type("Found", (), {"entry": type("Entry", (), {"seconds": 100.0, "schedule": {"num_inference_steps": 8}})()})()
    assert donors.saved(found, look, 2.0) == 3.0
    donors.dense_seconds = {size: [90.0]}
    assert donors.saved(found, look, 2.0) == 88.0
    donors.dense_seconds = {}
    assert donors.saved(found, look, 2.0) == 48.0  # the donor took twice the steps


def test_a_request_of_few_steps_neither_hits_nor_becomes_a_donor(reuse: Reuse, tmp_path: Path) -> None:
    reuse([RED], out="first")
    reuse([RED, BLUE], "--steps", "2")
    for row in rows_of(tmp_path / "out"):
        assert (row["reuse"], row["why"]) == ("miss", "a hit takes 2 steps, and this takes no more")
        assert row["not_stored"] == "too few steps to be a donor"
    assert len(list(LatentStore(tmp_path / "cache").entries())) == 1


def test_dry_run_names_what_the_model_cannot_make(chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "height": 65}\n{"prompt": "b", "num_frames": 18}\n{"prompt": "c"}\n')
    result = chai("gen", tmp_path / "p.jsonl", "--out", tmp_path / "out", "--model", tiny_folder, "--dry-run")
    assert result.exit_code == 1
    assert "fail 0001-a.mp4: height and width must be multiples of 16, not 65" in result.output
    assert "fail 0002-b.mp4: num_frames must be a multiple of 4 plus 1, not 18" in result.output
    assert "render 0003-c.mp4" in result.output
    assert "1 to render (0 of them hits on the present cache), 2 that cannot be rendered, 0 already there" in result.output


def test_a_dry_run_as_json_is_a_line_for_each_prompt(reuse: Reuse) -> None:
    reuse([RED])
    result = reuse([RELATED, BLUE], "--dry-run", "--json", out="more")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["prompt"], row["outcome"]) for row in rows] == [(RELATED, "hit"), (BLUE, "render")]
    assert "nearest entity" in rows[1]["why"]


def test_dry_run_into_a_file_is_one_sentence(reuse: Reuse, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    result = reuse([RED], "--dry-run")
    assert result.exit_code == 2
    assert "it is a file; choose another --out" in result.stderr


# Filling the cache


@pytest.fixture
def warm(chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> Callable[..., Result]:
    def run(prompts: list[str], *options: str | Path) -> Result:
        file = tmp_path / "warm.txt"
        file.write_text("\n".join(prompts), "utf-8")
        size = ("--height", "64", "--width", "64", "--num-frames", "9", "--cache", tmp_path / "cache", "--embedder", CLIP)
        few = ("--steps", "4", "--method", "chai", "--fast-steps", "2", "--cache-steps", "2")
        return chai("cache", "warm", file, "--model", tiny_folder, *size, *few, *options)

    return run


FAMILY = [RED, "a red ball at sunset", "a red ball in space", "a blue star in a forest", "a blue star in a city", "a cup"]


def test_warm_renders_the_prompts_that_cover_the_most(warm: Callable[..., Result], reuse: Reuse, tmp_path: Path) -> None:
    result = warm(FAMILY, "--limit", "2")
    assert result.exit_code == 0, result.output
    assert "2 of 6 prompts cover 5" in result.output
    assert len(list(LatentStore(tmp_path / "cache").entries())) == 2
    reuse(FAMILY, "--read-only-cache")
    assert reused(tmp_path / "out") == ["hit"] * 5 + ["miss"]


@pytest.mark.parametrize("command", ["warm", "bench", "gen"])
def test_the_text_encoder_has_left_before_anything_is_rendered(
    warm: Callable[..., Result],
    reuse: Reuse,
    chai: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    done = []

    def watch(name: str) -> None:
        own = getattr(WanBackbone, name)

        def told(self: Any, *given: Any) -> Any:
            done.append(name)
            return own(self, *given)

        monkeypatch.setattr(WanBackbone, name, told)

    for name in ("encode", "release_text_encoder", "velocity"):
        watch(name)
    if command == "warm":
        warm(FAMILY)
    elif command == "gen":
        reuse(FAMILY)
    else:
        few = "--policy hits --donors 2 --count 2 --num-inference-steps 2 --frontier-steps 1 --row chai:fast-steps=1,steps=1"
        chai("bench", "--out", tmp_path / "bench", *few.split())
    assert [name for name, _ in itertools.groupby(done)] == ["encode", "release_text_encoder", "velocity"]


def test_warm_goes_on_where_it_was_stopped(
    warm: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import chai_cli.render as render

    whole = render.denoise
    runs: list[str] = []

    def stopping(*arguments: Any, **options: Any) -> Trajectory:
        if len(runs) == 1:
            raise KeyboardInterrupt
        runs.append("run")
        return whole(*arguments, **options)

    monkeypatch.setattr(render, "denoise", stopping)
    stopped = warm(FAMILY)
    assert stopped.exit_code == 130
    assert "run the same command again" in stopped.stderr
    monkeypatch.setattr(render, "denoise", whole)
    result = warm(FAMILY)
    assert "2 of 6 prompts cover 6 (the cache covers 3 already)" in result.output
    assert "nothing to render: the cache covers 6 of 6 prompts" in warm(FAMILY).output
    assert len(list(LatentStore(tmp_path / "cache").entries())) == 3


def test_warm_says_before_anything_is_loaded_that_there_are_too_few_steps(
    warm: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WanBackbone, "__init__", lambda *a: pytest.fail("the model was loaded"))
    result = warm(FAMILY, "--steps", "2")
    assert result.exit_code == 2
    assert (
        "no prompt can be a donor: a hit takes 2 steps, and this takes no more; give more --num-inference-steps"
        in result.stderr
    )


def test_warm_dry_run_and_json(warm: Callable[..., Result], tmp_path: Path) -> None:
    result = warm(FAMILY, "--dry-run")
    assert "3 of 6 prompts cover 6" in result.output
    assert not (tmp_path / "cache" / "data.mdb").exists() or len(LatentStore(tmp_path / "cache")) == 0
    rows = [json.loads(line) for line in warm(FAMILY, "--json", "--limit", "1").stdout.splitlines()]
    assert [row["status"] for row in rows] == ["done"]


def test_warm_stops_at_a_cache_that_takes_no_more(warm: Callable[..., Result]) -> None:
    result = warm([RED], "--budget", "1KB")
    assert result.exit_code == 2
    assert "give a larger --cache-budget" in result.stderr


def test_warm_reports_failures_and_goes_on(
    warm: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = WanBackbone.encode

    def failing(self: WanBackbone, prompt: str, look: Any) -> Any:
        if "cup" in prompt:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, prompt, look)

    monkeypatch.setattr(WanBackbone, "encode", failing)
    result = warm(FAMILY)
    assert result.exit_code == 1
    assert "2 stored, 1 failed" in result.output
    assert "--vae-tiling" in result.stderr


def test_the_end_of_the_sample_hits_on_its_beginning(chai: Callable[..., Result], tmp_path: Path) -> None:
    result = chai("gen", "samples/related.txt", "--out", tmp_path / "out", "--cache", tmp_path / "cache", "--steps", "9")
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "out" / "report.jsonl")
    assert [row["reuse"] for row in rows] == ["miss"] * 8 + ["hit"] * 4
