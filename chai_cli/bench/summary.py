"""From measurements to the figures of each row, beside the frontier of plain sampling."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chai_cli.bench.fidelity import drifted, four, lost
from chai_cli.bench.rows import Row
from chai_cli.bench.run import REFERENCE, Measurement
from chai_cli.bench.statistics import Frontier, Setting, interval, upper_bound
from chai_cli.bench.workload import Workload
from chai_cli.embedded.world import ATTRIBUTES, Scene


@dataclass(frozen=True)
class Difference:
    """A mean over requests, paired, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Difference:
        paired = [a - b for a, b in zip(ours, theirs, strict=True)]
        return cls(statistics.fmean(paired) if paired else float("nan"), *interval(paired))


@dataclass(frozen=True)
class Figures:
    """What a row did on some requests: those that it hit, or all.

    Attributes:
        count: Requests.
        steps, calls: Medians.
        seconds: Of a request: the medians of hits and of misses, weighted by how many there are.
        speedup: Seconds of dense over those of the row.
        attributes: Share of clips with each attribute right; empty where no judge reads.
        fidelity: Mean score: background, colour, shape and motion all right, or CLIP-T where no judge reads.
        to_dense, to_control, to_frontier: Its difference to full dense, to plain sampling with as many model calls, and to the best that
            plain sampling gives at the row's seconds.
        control: The row taken as the control.
        worth: Seconds that the best plain setting needs for this fidelity, over the row's; None if plain sampling never reaches it.
        unsafe: Requests that lost an attribute which dense shows.
        unsafe_bound: What the true share stays below, with 95 % confidence.
        drift: Requests that show an attribute of the donor where it differs, of those with a donor.
    """

    count: int
    steps: float
    calls: float
    seconds: float
    speedup: float
    attributes: dict[str, float]
    fidelity: float
    clip_t: float
    psnr: float
    ssim: float
    flicker: float
    peak_memory_mib: float
    to_dense: Difference
    to_control: Difference | None
    control: str
    to_frontier: Difference
    worth: float | None
    unsafe: int | None
    unsafe_bound: float | None
    drift: int | None


@dataclass(frozen=True)
class Summary:
    """A row.

    Attributes:
        hits: Figures over the requests it hit; for rows that reuse nothing, None.
        all: Figures over all requests.
        expected_speedup: 1 / (h / s + 1 - h) with hit rate h and speed-up on hits s.
        entry_bytes: Of a cache entry, on disk; None for rows without a cache.
        error: Why the row was left out.
    """

    label: str
    count: int
    hit_rate: float | None
    hits: Figures | None
    all: Figures | None
    expected_speedup: float | None
    entry_bytes: float | None
    error: str = ""

    def json(self) -> dict[str, Any]:
        return asdict(self)


def typical_seconds(made: Sequence[Measurement]) -> float:
    groups = [[one.total for one in made if one.hit == hit] for hit in (True, False)]
    return sum(len(group) * statistics.median(group) for group in groups if group) / len(made)


@dataclass
class Table:
    """All measurements of a bench, by row and request."""

    workload: Workload
    rows: list[Row]
    made: dict[tuple[str, int], Measurement]
    entry_bytes: dict[str, float] = field(default_factory=dict)
    own_scheduler: str | None = None  # the model's

    def __post_init__(self) -> None:
        """Only requests that every working row has count: a bench that was stopped compares like with like."""
        errors = {m.row: m.error for m in self.made.values() if m.error}
        self.errors = errors
        working = [row.label for row in self.rows if row.label not in errors]
        indices = {index for _, index in self.made}
        self.cases = sorted(i for i in indices if all((label, i) in self.made for label in working))
        self.judged = bool(self.cases) and all(
            self.made[label, i].seen["reading"] is not None for label in working for i in self.cases
        )

    def scene(self, index: int) -> Scene:
        found = self.workload.cases[index].scene
        assert found is not None
        return found

    def right(self, label: str, index: int) -> dict[str, bool]:
        return self.made[label, index].read().right(self.scene(index))

    def score(self, label: str, index: int) -> float:
        """1 if the four main attributes are right, else 0; CLIP-T where no judge reads."""
        if self.judged:
            return float(four(self.right(label, index)))
        return float(self.made[label, index].seen["clip_t"])

    def settings(self, cases: Sequence[int]) -> list[Setting]:
        """Plain sampling on some requests."""
        return [
            Setting(
                row.label,
                typical_seconds([self.made[row.label, i] for i in cases]),
                tuple(self.score(row.label, i) for i in cases),
            )
            for row in self.rows
            if row.plain and row.label not in self.errors
        ]

    def control(self, row: Row, calls: float, cases: Sequence[int]) -> str:
        """The plain row with as many model calls and, if there is one, the same solver; empty if there is none."""
        plain = [one for one in self.rows if one.plain and one.label not in self.errors and one.label != row.label]
        same = [one for one in plain if statistics.median(self.made[one.label, i].calls for i in cases) == calls]
        wanted = row.scheduler or self.own_scheduler
        return next((one.label for one in sorted(same, key=lambda one: one.scheduler != wanted)), "")

    def donor_scene(self, made: Measurement) -> Scene | None:
        if made.donor is None:
            return None
        case = self.workload.donors[made.donor] if made.donor >= 0 else self.workload.cases[-1 - made.donor]
        return case.scene

    def figures(self, row: Row, cases: Sequence[int]) -> Figures:
        found = [self.made[row.label, i] for i in cases]
        dense = [self.made[REFERENCE, i] for i in cases]
        seen = [one.read() for one in found]
        scores = [self.score(row.label, i) for i in cases]
        seconds, calls = typical_seconds(found), statistics.median(one.calls for one in found)
        frontier = Frontier(self.settings(cases))
        control = self.control(row, calls, cases)
        needed = frontier.seconds_for(statistics.fmean(scores))
        attributes, unsafe, drift = {}, None, None
        if self.judged:
            rights = [self.right(row.label, i) for i in cases]
            attributes = {name: statistics.fmean(right[name] for right in rights) for name in ATTRIBUTES}
            unsafe = sum(lost(right, self.right(REFERENCE, i)) for right, i in zip(rights, cases, strict=True))
            donors = [(one, self.scene(i), self.donor_scene(m)) for one, i, m in zip(seen, cases, found, strict=True)]
            drift = sum(bool(drifted(one, scene, donor)) for one, scene, donor in donors if donor)
        return Figures(
            count=len(cases),
            steps=statistics.median(one.steps for one in found),
            calls=calls,
            seconds=seconds,
            speedup=typical_seconds(dense) / seconds,
            attributes=attributes,
            fidelity=statistics.fmean(scores),
            clip_t=statistics.fmean(one.clip_t for one in seen),
            psnr=statistics.median(one.psnr for one in seen),
            ssim=statistics.fmean(one.ssim for one in seen),
            flicker=statistics.median(one.flicker for one in seen),
            peak_memory_mib=max(one.peak_memory_mib for one in found),
            to_dense=Difference.of(scores, [self.score(REFERENCE, i) for i in cases]),
            to_control=Difference.of(scores, [self.score(control, i) for i in cases]) if control else None,
            control=control,
            to_frontier=Difference.of(scores, list(frontier.at(seconds).scores())),
            worth=None if needed is None else needed / seconds,
            unsafe=unsafe,
            unsafe_bound=None if unsafe is None else upper_bound(unsafe, len(cases)),
            drift=drift,
        )

    def summary(self, row: Row) -> Summary:
        if row.label in self.errors:
            return Summary(row.label, 0, None, None, None, None, None, self.errors[row.label])
        if not self.cases:
            return Summary(row.label, 0, None, None, None, None, None, "no request was rendered by every row")
        every = self.figures(row, self.cases)
        if row.reuse is None:
            return Summary(row.label, every.count, None, None, every, None, None)
        hit = [i for i in self.cases if self.made[row.label, i].hit]
        rate = len(hit) / len(self.cases)
        figures = self.figures(row, hit) if hit else None
        expected = 1 / (rate / figures.speedup + 1 - rate) if figures else 1.0
        return Summary(row.label, every.count, rate, figures, every, expected, self.entry_bytes.get(row.label))

    def summaries(self) -> list[Summary]:
        return [self.summary(row) for row in self.rows]
