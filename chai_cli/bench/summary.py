"""From measurements to the figures of each row, beside the frontier of plain sampling."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from chai_cli.bench.fidelity import drifted, four, lost
from chai_cli.bench.rows import Row
from chai_cli.bench.run import REFERENCE, Measurement
from chai_cli.bench.statistics import Frontier, Setting, interval, upper_bound
from chai_cli.bench.workload import Workload
from chai_cli.embedded.world import ATTRIBUTES, Scene

TIMED = 20  # requests, under which a median of seconds says little


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
    """What a row did on some requests.

    Attributes:
        count: Requests.
        steps, calls: Medians; calls of in-request caches count skipped blocks as well.
        seconds: Median, or the mean where hits and misses are mixed.
        speedup: Median of the requests' own ratios to dense, or the ratio of sums where hits and misses are mixed.
        attributes: Share of clips with each attribute right; empty where no judge reads.
        fidelity: Mean score: background, colour, shape and motion all right, or CLIP-T where no judge reads.
        to_dense, to_control, to_frontier: Its difference to full dense, to plain sampling with as many model calls, and to the best that
            plain sampling gives at the row's seconds.
        control: The row, or the rows, taken as the control; empty if there is none.
        worth: Seconds that the best plain setting needs for this fidelity, over the row's; None if plain sampling never reaches it.
        unsafe: Requests that lost an attribute which dense shows.
        unsafe_bound: What the true share stays below, with 95 % confidence.
        drift, with_donor: Requests that show an attribute of a donor where it differs, of those whose donor's scene is known.
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
    with_donor: int


@dataclass(frozen=True)
class Summary:
    """A row.

    Attributes:
        hits: Figures over the requests it hit; for rows that reuse nothing, None.
        common: Figures over the requests that all rows hit which reuse.
        all: Figures over all requests.
        expected_speedup: 1 / (h / s + 1 - h) with hit rate h and speed-up on hits s.
        entry_bytes: Of a cache entry, on disk; None for rows without a cache.
        error: Why the row was left out.
    """

    label: str
    hit_rate: float | None
    hits: Figures | None
    common: Figures | None
    all: Figures | None
    expected_speedup: float | None
    entry_bytes: float | None
    error: str = ""

    @property
    def shown(self) -> Figures | None:
        """The figures that speak for a row: over its hits, or over all requests where it reuses nothing."""
        return self.all if self.hit_rate is None else self.hits

    def why_not(self) -> str:
        """Why there are no figures."""
        return f"not run: {self.error}" if self.error else "no hits"


@dataclass
class Table:
    """All measurements of a bench, by row and request.

    Attributes:
        cases: The requests that every working row rendered: only these count, so that like is compared with like.
        dropped: How many were left out because some row failed on them.
        together: Of the cases, those on which all working rows were timed in one run, if rows were added in a later one.
        errors: Of rows that never worked.
    """

    workload: Workload
    rows: list[Row]
    made: dict[tuple[str, int], Measurement]
    entry_bytes: dict[str, float] = field(default_factory=dict)
    own_scheduler: str | None = None  # the model's

    def __post_init__(self) -> None:
        good = {key for key, one in self.made.items() if not one.error}
        worked = {label for label, _ in good}
        self.errors = {row.label: "not measured yet" for row in self.rows if row.label not in worked}
        self.errors |= {one.row: one.error for one in self.made.values() if one.row in self.errors}
        working = [row.label for row in self.rows if row.label in worked]
        indices = sorted({index for _, index in self.made})
        tried = [i for i in indices if all((label, i) in self.made for label in working)]
        self.cases = [i for i in tried if all((label, i) in good for label in working)]
        self.dropped = len(tried) - len(self.cases)
        self.together = {i for i in self.cases if len({self.made[label, i].session for label in working}) == 1}
        self.judged = bool(self.cases) and all(
            self.made[label, i].seen["reading"] is not None for label in working for i in self.cases
        )
        self.rights: dict[tuple[str, int], dict[str, bool]] = {}

    def scene(self, index: int) -> Scene:
        found = self.workload.cases[index].scene
        assert found is not None
        return found

    def right(self, label: str, index: int) -> dict[str, bool]:
        if (label, index) not in self.rights:
            self.rights[label, index] = self.made[label, index].read().right(self.scene(index))
        return self.rights[label, index]

    def score(self, label: str, index: int) -> float:
        """1 if the four main attributes are right, else 0; CLIP-T where no judge reads."""
        if self.judged:
            return float(four(self.right(label, index)))
        return float(self.made[label, index].seen["clip_t"])

    def plain(self) -> list[Row]:
        return [row for row in self.rows if row.plain and row.label not in self.errors]

    def timed(self, cases: Sequence[int]) -> list[int]:
        """The requests whose seconds count: those timed in one run, unless they are few or come from a cache that grew."""
        if self.workload.grows or len(self.together) < TIMED:
            return list(cases)
        return [i for i in cases if i in self.together] or list(cases)

    def settings(self, cases: Sequence[int], seconds: Callable[[Iterable[float]], float]) -> list[Setting]:
        """Plain sampling on some requests."""
        return [
            Setting(
                row.label,
                seconds(self.made[row.label, i].total for i in self.timed(cases)),
                tuple(self.score(row.label, i) for i in cases),
            )
            for row in self.plain()
        ]

    def rungs(self, row: Row, index: int) -> list[tuple[int, str]]:
        """Calls and labels of plain sampling for a request with the row's solver, fewest first."""
        wanted = row.scheduler or self.own_scheduler
        same = [one for one in self.plain() if (one.scheduler or self.own_scheduler) == wanted and one.label != row.label]
        return sorted((self.made[one.label, index].calls, one.label) for one in same)

    def exact_control(self, row: Row, index: int) -> str:
        """The plain row with the same solver and as many model calls on a request; empty if there is none."""
        calls = self.made[row.label, index].calls
        return next((label for rung, label in self.rungs(row, index) if rung == calls), "")

    def control_score(self, row: Row, index: int) -> tuple[float, str] | None:
        """What plain sampling with as many calls scores on a request, between its two neighbours if no row has as many."""
        calls, exact = self.made[row.label, index].calls, self.exact_control(row, index)
        if exact:
            return self.score(exact, index), exact
        rungs = self.rungs(row, index)
        below, above = ([rung for rung in rungs if (rung[0] - calls) * side > 0] for side in (-1, 1))
        if not below or not above:
            return None
        (low, cheap), (high, dear) = below[-1], above[0]
        share = (calls - low) / (high - low)
        return (1 - share) * self.score(cheap, index) + share * self.score(dear, index), "between plain rows"

    def donor_scenes(self, made: Measurement) -> list[Scene]:
        cases = [self.workload.donors[at] if at >= 0 else self.workload.cases[-1 - at] for at in made.donors]
        return [case.scene for case in cases if case.scene is not None]

    def figures(self, row: Row, cases: Sequence[int], mixed: bool = False) -> Figures:
        """A row on some requests.

        Args:
            mixed: Hits and misses are among them.
        """
        found = [self.made[row.label, i] for i in cases]
        seen = [one.read() for one in found]
        scores = [self.score(row.label, i) for i in cases]
        middle: Callable[[Iterable[float]], float] = statistics.fmean if mixed else statistics.median
        ours, theirs = ([self.made[label, i].total for i in self.timed(cases)] for label in (row.label, REFERENCE))
        seconds = middle(ours)
        ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
        frontier = Frontier(self.settings(cases, middle))
        needed = frontier.seconds_for(statistics.fmean(scores))
        controls = [] if mixed or row.peer else [self.control_score(row, i) for i in cases]
        known = [control for control in controls if control]
        complete = len(known) == len(cases)
        attributes, unsafe, drift, with_donor = {}, None, None, 0
        if self.judged:
            rights = [self.right(row.label, i) for i in cases]
            attributes = {name: statistics.fmean(right[name] for right in rights) for name in ATTRIBUTES}
            unsafe = sum(lost(right, self.right(REFERENCE, i)) for right, i in zip(rights, cases, strict=True))
            donors = [(one, self.scene(i), self.donor_scenes(made)) for one, i, made in zip(seen, cases, found, strict=True)]
            with_donor = sum(bool(scenes) for _, _, scenes in donors)
            copies = [any(drifted(one, scene, donor) for donor in scenes) for one, scene, scenes in donors if scenes]
            drift = sum(copies) if with_donor else None
        return Figures(
            count=len(cases),
            steps=statistics.median(one.steps for one in found),
            calls=statistics.median(one.calls for one in found),
            seconds=seconds,
            speedup=sum(theirs) / sum(ours) if mixed else statistics.median(ratios),
            attributes=attributes,
            fidelity=statistics.fmean(scores),
            clip_t=statistics.fmean(one.clip_t for one in seen),
            psnr=statistics.median(one.psnr for one in seen),
            ssim=statistics.fmean(one.ssim for one in seen),
            flicker=statistics.median(one.flicker for one in seen),
            peak_memory_mib=max(one.peak_memory_mib for one in found),
            to_dense=Difference.of(scores, [self.score(REFERENCE, i) for i in cases]),
            to_control=Difference.of(scores, [score for score, _ in known]) if complete else None,
            control=", ".join(dict.fromkeys(label for _, label in known)) if complete else "",
            to_frontier=Difference.of(scores, list(frontier.at(seconds).scores())),
            worth=None if needed is None else needed / seconds,
            unsafe=unsafe,
            unsafe_bound=None if unsafe is None else upper_bound(unsafe, len(cases)),
            drift=drift,
            with_donor=with_donor,
        )

    def hits(self, row: Row) -> list[int]:
        return [i for i in self.cases if self.made[row.label, i].hit]

    def common_hits(self) -> list[int]:
        """Requests that every row hit which reuses and hit anything at all."""
        sets = [set(self.hits(row)) for row in self.rows if row.reuse and row.label not in self.errors]
        return sorted(set.intersection(*(some for some in sets if some))) if any(sets) else []

    def summary(self, row: Row) -> Summary:
        if row.label in self.errors or not self.cases:
            why = self.errors.get(row.label, "no request was rendered by every row")
            return Summary(row.label, None, None, None, None, None, None, why)
        common = self.common_hits()
        if row.reuse is None:
            shared = self.figures(row, common) if common else None
            return Summary(row.label, None, None, shared, self.figures(row, self.cases), None, None)
        hit = self.hits(row)
        rate = len(hit) / len(self.cases)
        figures = self.figures(row, hit) if hit else None
        shared = self.figures(row, common) if common and hit else None
        every = self.figures(row, self.cases, mixed=True)
        expected = 1 / (rate / figures.speedup + 1 - rate) if figures else 1.0
        return Summary(row.label, rate, figures, shared, every, expected, self.entry_bytes.get(row.label))

    def summaries(self) -> list[Summary]:
        return [self.summary(row) for row in self.rows]

    def sessions(self) -> dict[str, int]:
        """Rows whose seconds count though they were taken in another run than dense's, and on how many requests."""
        found, timed = {}, self.timed(self.cases)
        for row in self.rows:
            if row.label not in self.errors:
                other = sum(self.made[row.label, i].session != self.made[REFERENCE, i].session for i in timed)
                if other:
                    found[row.label] = other
        return found
