"""`chai bench`: the instrument itself is held to account."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from chai_cli.app import app
from chai_cli.backbones.base import Backbone, Look, Placement, find_record, load, resolve
from chai_cli.bench import output
from chai_cli.bench.fidelity import Critic, Seen, critic_for, flicker, psnr
from chai_cli.bench.gates import COMBINED, changes, gates
from chai_cli.bench.rows import SETS, Row, frontier, row_of
from chai_cli.bench.run import Bench, Measurement, keep_video, open_folder
from chai_cli.bench.statistics import Frontier, Setting, interval, upper_bound
from chai_cli.bench.summary import Difference, Summary, Table
from chai_cli.bench.workload import Workload, WorldLaw, from_requests, value, words, world
from chai_cli.donors import CacheOptions
from chai_cli.embed import EMBEDDED, Embedder, load_embedder
from chai_cli.embedded.world import ATTRIBUTES, held_out
from chai_cli.errors import ChaiError
from chai_cli.prompts import Request, Settings
from chai_cli.reuse.base import Donor, Method, Plan, Step
from chai_cli.reuse.cache_attention import CacheAttentionOptions
from chai_cli.reuse.dense import Dense

STEPS = 4
COUNT = 8
FAST = Settings(num_inference_steps=STEPS)


class Copy(Dense):
    """Gives the donor's clip, whatever was asked."""

    def __init__(self, donor: Donor) -> None:
        super().__init__(latents=donor.clean)

    def plan(self, look: Look) -> Plan:
        return Plan(look.num_inference_steps, look.num_inference_steps)


class Slow(Dense):
    """Plain sampling that dawdles."""

    def around(self, step: Step) -> AbstractContextManager[Any]:
        @contextmanager
        def dawdling() -> Any:
            time.sleep(0.2)
            yield

        return dawdling()


@dataclass(frozen=True)
class Planted(CacheAttentionOptions):
    """Keeps finished latents; what a hit does with them is planted."""

    match: str = "final"
    kind: type[Any] = Copy

    def hit(self, backbone: Backbone, donor: Donor) -> Method:  # type: ignore[override]
        return Copy(donor) if self.kind is Copy else Slow()


class Broken(Planted):
    def hit(self, backbone: Backbone, donor: Donor) -> Method:  # type: ignore[override]
        raise ChaiError("this method does not work here")


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load(find_record("embedded"), Placement(device="cpu"))


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return load_embedder(str(EMBEDDED))


@pytest.fixture(scope="module")
def critic() -> Critic:
    return critic_for(True, str(EMBEDDED), "cpu")


def measured(
    backbone: Backbone,
    critic: Critic,
    embedder: Embedder,
    folder: Path,
    work: Workload,
    rows: Sequence[Row],
    limit: int | None = None,
) -> tuple[Table, dict[str, Summary], Bench]:
    bench = Bench(backbone, critic, embedder, work, [row_of("dense"), *rows], folder, CacheOptions(folder))
    made = bench.run(limit)
    table = Table(work, bench.rows, {(one.row, one.case): one for one in made}, bench.entry_bytes, bench.own_scheduler())
    return table, {one.label: one for one in table.summaries()}, bench


@pytest.fixture(scope="module")
def planted(
    backbone: Backbone, critic: Critic, embedder: Embedder, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Table, dict[str, Summary], Path]:
    """A bench of a few requests that mostly hit, with methods whose faults are known."""
    folder = tmp_path_factory.mktemp("bench")
    rows = [
        Row("copy", reuse=Planted(fast_steps=2)),
        Row("slow", reuse=Planted(fast_steps=2, kind=Slow)),
        Row("broken", reuse=Broken(fast_steps=2)),
        row_of("chai:fast-steps=2,steps=1/2"),
        row_of("dense:steps=2"),
        row_of("dense:steps=2,scheduler=unipc"),
    ]
    table, rows_, _ = measured(backbone, critic, embedder, folder, world(COUNT, "hits", 5, settings=FAST), rows)
    return table, rows_, folder


def test_a_method_that_returns_the_donors_clip_shows_as_drift_and_unsafe(planted: Any) -> None:
    _, rows, _ = planted
    copy, chai = rows["copy"].hits, rows["chai:fast-steps=2,steps=1/2"].hits
    assert copy.count == chai.count >= COUNT - 3
    assert copy.drift >= copy.count - 2
    assert copy.unsafe >= copy.count / 2
    assert copy.unsafe_bound == upper_bound(copy.unsafe, copy.count)
    assert chai.drift < copy.drift
    assert copy.calls == 0


def test_a_slow_method_shows_as_slow(planted: Any) -> None:
    _, rows, _ = planted
    slow, dense = rows["slow"], rows["dense"]
    assert slow.hits.seconds > dense.all.seconds + 0.2 * STEPS * 0.9
    assert slow.hits.speedup < 1
    assert slow.hits.worth is None or slow.hits.worth < 1
    assert slow.hits.to_dense == Difference(0.0, 0.0, 0.0)  # the same latents, only later
    assert (slow.hits.psnr, slow.hits.ssim, slow.hits.flicker) == (100.0, pytest.approx(1.0, abs=1e-4), 1.0)


def test_identical_methods_show_no_difference(planted: Any) -> None:
    _table, rows, _ = planted
    one, other = rows["dense:steps=2"].all, rows["dense:steps=2,scheduler=unipc"].all
    assert one.control == "dense:steps=2,scheduler=unipc"
    assert one.to_control == Difference(0.0, 0.0, 0.0)
    assert one.attributes == other.attributes
    assert one.psnr == other.psnr


def test_the_control_of_a_method_has_as_many_calls_and_its_solver(planted: Any) -> None:
    _, rows, _ = planted
    chai = rows["chai:fast-steps=2,steps=1/2"].hits
    assert chai.control in ("dense:steps=2", "dense:steps=2,scheduler=unipc")
    assert chai.calls == rows[chai.control].all.calls == 4


def test_a_method_that_fails_is_told_and_costs_the_others_nothing(planted: Any) -> None:
    table, rows, _ = planted
    assert rows["broken"].error == "this method does not work here"
    assert rows["broken"].all is None
    assert len(table.cases) == COUNT
    assert "not run: this method does not work here" in output.markdown(table, list(rows.values()))


def test_what_a_request_costs_is_all_there(planted: Any) -> None:
    table, _, _ = planted
    for one in table.made.values():
        if not one.error:
            assert {"text", "write", "denoise", "decode"} <= one.seconds.keys()
            assert ("retrieval" in one.seconds) == (one.row in ("copy", "slow", "chai:fast-steps=2,steps=1/2"))


def test_plots_tables_and_json_hold_every_row(
    planted: Any, backbone: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, rows, _ = planted
    document = json.loads(json.dumps(output.document(table, list(rows.values()), backbone, {"asked": 1}), default=str))
    assert {row["label"] for row in document["rows"]} == set(rows)
    assert len(document["measurements"]) == 6 * COUNT
    assert document["versions"]["chai-cli"]
    assert document["machine"]["threads"]
    assert [path.stat().st_size > 5000 for path in output.plots(table, list(rows.values()), tmp_path)] == [True, True]
    output.print_tables(table, list(rows.values()))
    said = capsys.readouterr().out
    for label in rows:
        assert label in said
    assert "not run: this method does not work" in said
    (tmp_path / "bench.json").write_text(json.dumps(document))
    assert "| copy |" in output.compare(tmp_path, tmp_path / "bench.json")
    assert "+0.0000 [+0.0000, +0.0000]" in output.compare(tmp_path, tmp_path)


def test_a_bench_goes_on_where_it_stopped(backbone: Backbone, critic: Critic, embedder: Embedder, tmp_path: Path) -> None:
    work, rows = world(4, "cold", settings=FAST), [row_of("chai:fast-steps=2,steps=1/2")]
    table, _, _ = measured(backbone, critic, embedder, tmp_path, work, rows, limit=2)
    assert table.cases == [0, 1]
    lines = (tmp_path / "measurements.jsonl").read_text().splitlines()
    with (tmp_path / "measurements.jsonl").open("a") as file:
        file.write('{"row": "chai:fast-st')  # killed while it wrote
    table, _, bench = measured(backbone, critic, embedder, tmp_path, work, rows)
    assert table.cases == [0, 1, 2, 3]
    now = (tmp_path / "measurements.jsonl").read_text().splitlines()
    assert now[:4] == lines
    assert len(now) == 4 + 1 + 4
    whole = tmp_path / "at once"
    _, _, other = measured(backbone, critic, embedder, whole, work, rows)

    def told(bench: Bench) -> list[Any]:
        made = sorted(bench.done.values(), key=lambda one: (one.row, one.case))
        return [(one.row, one.case, one.hit, one.donors, one.calls, one.seen) for one in made]

    assert told(bench) == told(other)


def test_what_a_killed_bench_stored_of_an_unfinished_request_is_no_donor_for_it(
    backbone: Backbone, critic: Critic, embedder: Embedder, tmp_path: Path
) -> None:
    work, rows = world(2, "cold", settings=FAST), [row_of("chai:fast-steps=2,steps=1/2")]
    _, _, bench = measured(backbone, critic, embedder, tmp_path, work, rows, limit=1)
    kept = [one for one in bench.done.values() if one.row == "dense"]
    (tmp_path / "measurements.jsonl").write_text(json.dumps(vars(kept[0])) + "\n")  # killed after the store, before the line
    _, _, bench = measured(backbone, critic, embedder, tmp_path, work, rows, limit=1)
    assert not bench.done["chai:fast-steps=2,steps=1/2", 0].hit


def test_an_edited_request_is_measured_again(backbone: Backbone, critic: Critic, embedder: Embedder, tmp_path: Path) -> None:
    work = world(2, "cold", settings=FAST)
    measured(backbone, critic, embedder, tmp_path, work, [])
    edited = replace(work, cases=(work.cases[0], replace(work.cases[1], prompt="a red ball in space")))
    before = (tmp_path / "measurements.jsonl").read_text()
    bench = Bench(backbone, critic, embedder, edited, [row_of("dense")], tmp_path, CacheOptions(tmp_path))
    assert list(bench.done) == [("dense", 0)]
    bench.run()
    added = (tmp_path / "measurements.jsonl").read_text().removeprefix(before).splitlines()
    assert [json.loads(line)["case"] for line in added] == [1]
    assert bench.done["dense", 1].seen != json.loads(before.splitlines()[1])["seen"]


def test_donors_of_another_workload_are_not_taken_from_the_folder(
    backbone: Backbone, critic: Critic, embedder: Embedder, tmp_path: Path
) -> None:
    look = resolve(backbone.record, FAST, None)
    bench = Bench(backbone, critic, embedder, world(1, settings=FAST), [row_of("dense")], tmp_path, CacheOptions(tmp_path))
    one, other = ((text, backbone.encode(text, look)) for text in ("a red ball", "a blue star"))
    first = bench.reference("donor0", look, *one, keep=False)
    assert bench.reference("donor0", look, *one, keep=False).seconds == first.seconds  # read from disk
    second = bench.reference("donor0", look, *other, keep=False)
    assert not np.array_equal(first.frames, second.frames)
    path = next((tmp_path / "dense").iterdir())
    path.write_bytes(path.read_bytes()[:1000])  # torn
    assert np.array_equal(bench.reference("donor0", look, *other, keep=False).frames, second.frames)


def test_requests_that_cannot_be_rendered_or_cannot_gain_cost_nobody_else(
    backbone: Backbone, critic: Critic, embedder: Embedder, tmp_path: Path
) -> None:
    sizes = Settings(num_inference_steps=STEPS, height=60), FAST, replace(FAST, num_inference_steps=2), replace(FAST, seed=3)
    requests = [Request(i, i, f"a red ball number {i}", settings) for i, settings in enumerate(sizes)]
    work = from_requests("mine.jsonl", requests)
    table, rows, _ = measured(
        backbone, Critic(critic.clip, None), embedder, tmp_path, work, [row_of("chai:fast-steps=2,steps=2")]
    )
    assert table.cases == [1, 2, 3]
    assert table.dropped == 1
    assert any("left out" in text for text in output.warnings(table))
    chai = rows["chai:fast-steps=2,steps=2"]
    assert [table.made[chai.label, i].hit for i in table.cases] == [False, False, True]
    assert "takes no more" in table.made[chai.label, 2].why
    assert chai.all is not None
    assert chai.all.unsafe is None
    assert [path.name for path in output.plots(table, list(rows.values()), tmp_path)] == [
        "speed-fidelity.png",
        "speed-likeness.png",
    ]


def test_dense_takes_at_least_the_memory_of_fewer_steps(planted: Any) -> None:
    _, rows, _ = planted
    assert rows["dense"].all.peak_memory_mib > 300
    assert rows["dense"].all.peak_memory_mib > 0.8 * rows["dense:steps=2"].all.peak_memory_mib


def test_a_row_without_hits_says_so_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    table = planted_table([0.5] * 12, [False] * 12)
    for key, one in table.made.items():
        table.made[key] = replace(one, hit=False, donors=[])
    rows = table.summaries()
    assert rows[1].shown is None
    output.print_tables(table, rows)
    assert capsys.readouterr().out.count("no hits") == 3
    assert "no hits" in output.markdown(table, rows)


def test_a_bench_may_grow(tmp_path: Path) -> None:
    small, large = world(16, "hits", 8), world(64, "hits", 8)
    assert small.donors == large.donors
    assert small.cases == large.cases[:16]
    assert small.identity() == large.identity()


def test_with_shared_seeds_request_and_donor_begin_with_the_same_noise() -> None:
    work = world(4, "hits", 4, settings=Settings(seed=5), seeds="shared")
    assert {case.settings.seed for case in (*work.cases, *work.donors)} == {5}


def test_between_two_plain_rows_the_control_is_between_their_scores() -> None:
    table = planted_table([0.5] * 4, [True, False, True, False])
    for label, calls, good in (("dense:steps=2", 4, 0), ("dense:steps=12", 24, 1)):
        for i in range(4):
            one = table.made["dense" if good else "chai", i]
            table.made[label, i] = replace(one, row=label, calls=calls, hit=False, donors=[])
    table = Table(table.workload, [*table.rows, row_of("dense:steps=2"), row_of("dense:steps=12")], table.made)
    chai = table.summaries()[1]
    assert chai.hits is not None
    assert chai.hits.control == "between plain rows"
    share = (16 - 4) / (24 - 4)
    assert chai.hits.to_control is not None
    assert chai.hits.to_control.mean == pytest.approx(0.5 - (0.5 * (1 - share) + share))


def test_misses_of_a_cold_cache_become_donors(backbone: Backbone, critic: Critic, embedder: Embedder, tmp_path: Path) -> None:
    work = world(5, "cold", law=WorldLaw(fresh=0.0), settings=FAST)
    table, rows, _ = measured(backbone, critic, embedder, tmp_path, work, [row_of("chai:fast-steps=2,steps=1/2")])
    chai = rows["chai:fast-steps=2,steps=1/2"]
    first, *rest = [table.made[chai.label, i] for i in table.cases]
    assert not first.hit
    assert first.why == "the cache is empty"
    assert [one.donors for one in rest if one.hit]
    assert all(len(one.donors) == 1 and one.donors[0] < 0 for one in rest if one.hit)
    assert chai.expected_speedup == pytest.approx(chai.all.speedup, rel=0.25)  # type: ignore[union-attr]
    assert chai.entry_bytes
    assert chai.entry_bytes > 1000


def test_a_folder_of_another_bench_is_not_mixed_up(tmp_path: Path) -> None:
    open_folder(tmp_path, {"workload": 1}, False)
    with pytest.raises(ChaiError, match="another workload"):
        open_folder(tmp_path, {"workload": 2}, False)
    (tmp_path / "measurements.jsonl").write_text("")
    open_folder(tmp_path, {"workload": 2}, True)
    assert not (tmp_path / "measurements.jsonl").exists()


def test_a_bench_goes_on_wherever_its_text_tower_lies_now(tmp_path: Path) -> None:
    asked = []
    for place in (EMBEDDED, Path(shutil.copytree(EMBEDDED, tmp_path / "moved"))):
        arguments = f"bench --count 1 --num-inference-steps 1 --row dense:steps=1 --frontier-steps 1 --out {tmp_path / 'bench'}"
        CliRunner().invoke(app, [*arguments.split(), "--embedder", str(place)], catch_exceptions=False)
        asked.append(json.loads((tmp_path / "bench" / "asked.json").read_text()))
    assert asked[0] == asked[1]


def test_the_bound_is_that_of_clopper_and_pearson() -> None:
    assert upper_bound(0, 59) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert upper_bound(0, 59) < 0.05 < upper_bound(0, 58)
    assert upper_bound(3, 3) == 1.0
    assert upper_bound(0, 0) == 1.0
    assert upper_bound(5, 256) == pytest.approx(0.0406, abs=2e-4)


def test_an_interval_holds_the_mean_and_narrows_with_more_requests() -> None:
    rng = np.random.default_rng(0)
    few, many = rng.integers(-1, 2, 30), rng.integers(-1, 2, 3000)
    assert interval(few)[0] <= few.mean() <= interval(few)[1]
    assert np.diff(interval(many)) < np.diff(interval(few)) / 5
    assert interval([0.0] * 10) == (0.0, 0.0)


points = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 1)), min_size=1, max_size=12)


@given(points)
def test_no_plain_setting_lies_above_the_frontier(found: list[tuple[float, float]]) -> None:
    settings = [Setting(str(i), seconds, (score,)) for i, (seconds, score) in enumerate(found)]
    hull = Frontier(settings)
    for one in settings:
        assert hull.at(one.seconds).fidelity >= one.fidelity - 1e-9
        needed = hull.seconds_for(one.fidelity)
        assert needed is not None
        assert needed <= one.seconds + 1e-9


def test_half_way_between_two_settings_the_frontier_is_half_of_each() -> None:
    cheap, dear, bad = Setting("1", 1.0, (0.0, 1.0)), Setting("8", 3.0, (1.0, 1.0)), Setting("euler", 2.5, (0.0, 0.0))
    mix = Frontier([bad, dear, cheap]).at(2.0)
    assert (mix.low, mix.high, mix.share) == (cheap, dear, 0.5)
    assert list(mix.scores()) == [0.5, 1.0]
    assert Frontier([cheap, dear]).seconds_for(0.75) == pytest.approx(2.0)
    assert Frontier([cheap, dear]).seconds_for(1.1) is None
    assert Frontier([cheap, dear]).at(0.1).fidelity == cheap.fidelity


def test_the_world_repeats_itself_but_never_asks_the_same_again() -> None:
    law = WorldLaw(fresh=0.2)
    work = world(200, law=law)
    assert work == world(200, law=law)
    scenes = [case.scene for case in work.cases if case.scene]
    assert len({words(scene) for scene in scenes}) == 200
    assert all(held_out(scene.background, scene.things[0]) for scene in scenes)
    near = [
        min(sum(value(scene, name) != value(other, name) for name in ATTRIBUTES) for other in scenes[:i])
        for i, scene in enumerate(scenes)
        if i
    ]
    assert np.mean(np.array(near) <= 3) > 0.9
    assert len({case.settings.seed for case in work.cases}) == 200


def test_requests_of_the_hits_policy_are_changes_of_its_donors() -> None:
    work = world(50, "hits", 10)
    assert len(work.donors) == 10
    for case in work.cases:
        assert case.scene
        differ = [
            sum(value(case.scene, name) != value(donor.scene, name) for name in ATTRIBUTES)
            for donor in work.donors
            if donor.scene
        ]
        assert 1 <= min(differ) <= 3
    donors = {donor.settings.seed for donor in work.donors}
    assert not donors & {case.settings.seed for case in work.cases}


def test_more_requests_than_the_world_has_are_told() -> None:
    with pytest.raises(ChaiError, match=r"there are only \d+ such requests; give a smaller --count, or more --donors"):
        world(5000, "hits", 1)


def test_the_first_prompts_of_a_file_are_its_donors() -> None:
    requests = [Request(i, i, f"prompt {i}", Settings(seed=i)) for i in range(5)]
    work = from_requests("mine.txt", requests, "warm", 2)
    assert [case.prompt for case in work.donors] == ["prompt 0", "prompt 1"]
    assert [case.prompt for case in work.cases] == ["prompt 2", "prompt 3", "prompt 4"]
    with pytest.raises(ChaiError, match="all of them are donors"):
        from_requests("mine.txt", requests, "hits", 5)


def test_the_frontier_leaves_out_what_the_reference_is() -> None:
    labels = [row.label for row in frontier(6, "unipc", (1, 4, 8))]
    assert labels == [
        *(f"dense:steps={n},scheduler={solver}" for solver in ("euler", "unipc") for n in (1, 4)),
        "dense:scheduler=euler",
    ]
    assert [row.label for row in frontier(6, "unipc", (4,), ["unipc"])] == ["dense:steps=4,scheduler=unipc"]
    with pytest.raises(ChaiError, match="one of euler, unipc, not 'ddim'"):
        frontier(6, "unipc", (4,), ["ddim"])


def test_differences_between_clips() -> None:
    still = np.zeros((5, 8, 8, 3), np.uint8)
    moving = still.copy()
    moving[2] = 255
    assert psnr(still, still) == 100.0
    assert psnr(still, moving) == pytest.approx(10 * np.log10(5))
    assert flicker(still) == 0.0
    assert flicker(moving) == pytest.approx((255 + 2 * 255 + 255) / 3)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("magic", "no method named 'magic'"),
        ("chai:colour=red", "no option 'colour'"),
        ("chai:fast-steps=many", "must be a whole number"),
        ("chai:steps=2/x", "whole numbers such as 2/3/4"),
        ("dense:steps=0", "steps must be a whole number"),
        ("dense:scheduler=ddim", "the scheduler is one of"),
        ("nirvana:start-sigma=2", "between 0 (clean) and 1"),
        ("chai+nirvana+chai", "two go together as one that says where to start"),
        ("nirvana+correction", "two go together as one that says where to start"),
    ],
)
def test_a_row_that_cannot_be_is_one_sentence(spec: str, said: str) -> None:
    with pytest.raises(ChaiError) as told:
        row_of(spec)
    assert said in str(told.value)


@pytest.mark.parametrize("name", SETS)
def test_every_row_of_a_set_can_be(name: str) -> None:
    assert [row_of(spec).label for spec in SETS[name]] == list(dict.fromkeys(SETS[name]))


def test_two_methods_go_together() -> None:
    row = row_of("nirvana+chai:start-sigma=0.9,match=sigma,scheduler=euler")
    assert row.scheduler == "euler"
    assert row.reuse is not None
    assert row.reuse.schedule(30) == 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "hits"), "needs --donors"),
        (("--changes", "1,2"), "--changes takes three shares"),
        (("--model", "wan2.1-t2v-1.3b"), "give --prompts FILE"),
        (("--compare", "/none.json", "/none.json"), "cannot read /none.json"),
        (("--row", "magic"), "no method named"),
        (("--set", "all"), "--set is one of correction, published, variants, starts"),
        (("--seeds", "mine"), "seeds are one of own, shared"),
        (("--num-frames", "9"), "reads clips of its own size only"),
    ],
)
def test_wrong_use_of_the_command_is_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ChaiError) as told:
        CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert said in str(told.value)


def test_measurements_of_another_version_are_done_again(tmp_path: Path) -> None:
    from chai_cli.bench.run import read_measurements

    good = Measurement("dense", 0)
    (tmp_path / "m.jsonl").write_text(
        json.dumps({**vars(good), "extra": 1}) + "\n" + json.dumps(vars(replace(good, case=1))) + "\n"
    )
    assert list(read_measurements(tmp_path / "m.jsonl")) == [("dense", 1)]


def planted_table(known: Sequence[float], losses: Sequence[bool]) -> Table:
    """Hits of a row whose losses are given; dense shows everything."""
    work = world(len(known), "hits", 64)
    made = {}
    for i, case in enumerate(work.cases):
        assert case.scene
        thing = asdict(case.scene.things[0])
        wrong = thing | {"colour": "red" if thing["colour"] != "red" else "blue"}
        for label in ("dense", "chai"):
            shown = wrong if label == "chai" and losses[i] else thing
            seen = asdict(Seen(0.2, 30.0, 0.9, 1.0, {"background": case.scene.background, "things": [shown]}))
            one = Measurement(
                label,
                i,
                hit=label == "chai",
                donors=[0] if label == "chai" else [],
                seconds={"denoise": 1.0},
                seen=seen,
                calls=16 if label == "chai" else 60,
            )
            made[label, i] = replace(one, similarity=known[i])
    return Table(work, [row_of("dense"), row_of("chai")], made)


def test_a_gate_on_what_predicts_losses_accepts_what_is_safe() -> None:
    rng = np.random.default_rng(0)
    known = rng.random(400)
    found = {one.figure: one for one in gates(planted_table(list(known), list(known < 0.4)))}
    similarity, combined = found["prompt similarity"], found[COMBINED]
    assert similarity.threshold == pytest.approx(0.4, abs=0.06)
    assert similarity.unsafe <= 10
    assert similarity.bound < 0.12
    assert similarity.accepted > 100
    assert combined.accepted > 100
    assert found["coverage"].threshold is None
    assert found["coverage"].accepted == 0


def test_no_gate_is_found_where_losses_come_by_chance() -> None:
    rng = np.random.default_rng(1)
    found = gates(planted_table(list(rng.random(200)), list(rng.random(200) < 0.4)))
    assert all(one.accepted < 30 for one in found)


def test_losses_are_counted_by_what_differs() -> None:
    table = planted_table([0.5] * 60, [True] * 60)
    for change in changes(table):
        assert (change.unsafe_if_differs, change.unsafe_if_same) == (change.differs, change.same)
        assert change.differs + change.same == 60


@pytest.mark.parametrize(
    ("later", "speedup", "warned"), [(40, 4.0, "seconds are of the 40 of 70 requests"), (9, 1.0, "do not trust")]
)
def test_seconds_of_two_runs_are_not_compared(later: int, speedup: float, warned: str) -> None:
    """A row added in a second run, on a slower machine, to 30 requests whose full render the first had timed."""
    table = planted_table([0.5] * (30 + later), [False] * (30 + later))
    for (label, i), one in list(table.made.items()):
        first, added = i < 30, label == "chai"
        session, seconds = ("first", 4.0) if first and not added else ("second", 2.0 if added else 8.0)
        table.made[label, i] = replace(one, session=session, seconds={"denoise": 4.0 if first and added else seconds})
    table = Table(table.workload, table.rows, table.made)
    figures = table.summary(table.rows[1]).hits
    assert figures
    assert (figures.count, figures.speedup) == (30 + later, speedup)
    assert any(warned in line for line in output.warnings(table))
    few = table.figures(table.rows[1], range(20, 35))  # a row that hits seldom: five of its hits were timed together
    assert few.speedup == (4.0 if later == 40 else 1.0)


def test_kept_videos_have_their_prompts_beside_them(tmp_path: Path) -> None:
    frames = np.zeros((5, 16, 16, 3), np.uint8)
    look = resolve(find_record("embedded"), Settings(), None)
    for index, prompt in enumerate(["a red ball", "ein grüner Würfel / 50 %"]):
        keep_video(tmp_path, index, prompt, frames, look)
    assert json.loads((tmp_path / "prompts.json").read_text()) == {
        "0000.mp4": "a red ball",
        "0001.mp4": "ein grüner Würfel / 50 %",
    }
    assert (tmp_path / "0001.mp4").stat().st_size > 500
