"""When does reuse fail? What retrieval knows of a hit, against the attributes that the hit lost.

A gate accepts hits above a threshold on such a figure. Its threshold is chosen on half of the hits, as the lowest for which the bound
on the unsafe share holds, and judged on the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from chai_cli.bench.fidelity import lost
from chai_cli.bench.run import REFERENCE, Measurement
from chai_cli.bench.statistics import upper_bound
from chai_cli.bench.summary import Table
from chai_cli.bench.workload import value
from chai_cli.embedded.world import ATTRIBUTES
from chai_cli.reuse.base import Learner

ALLOWED = 0.05  # unsafe hits, at most
LEAST = 20  # hits in each half
RIDGE = 1.0

KNOWN: dict[str, Callable[[Measurement], float]] = {
    "prompt similarity": lambda hit: hit.similarity,
    "coverage": lambda hit: hit.coverage,
    "shared entities": lambda hit: float(len(hit.shared)),
}
COMBINED = "all of these, as minus the risk"


@dataclass(frozen=True)
class Gate:
    """One figure as a gate for one row.

    Attributes:
        threshold: The least value that is accepted; None if no threshold keeps the bound on the first half.
        accepted, of: Hits of the second half that it accepts, and all of them.
        unsafe: Of the accepted.
        bound: What their true share stays below, with 95 % confidence.
        control: Hits of the second half in which plain sampling with as many calls loses something; None if no row has as many.
    """

    row: str
    figure: str
    threshold: float | None
    accepted: int
    of: int
    unsafe: int
    bound: float
    control: int | None


@dataclass(frozen=True)
class Change:
    """How often hits lose something when an attribute differs between request and donor, and when it does not."""

    row: str
    attribute: str
    differs: int
    unsafe_if_differs: int
    same: int
    unsafe_if_same: int


def gates(table: Table) -> list[Gate]:
    """For every row that reuses and has enough hits; nothing where no judge reads."""
    found = []
    for row in table.rows:
        hits = hit_cases(table, row.label)
        if row.reuse is None or isinstance(row.reuse, Learner) or len(hits) < 2 * LEAST:
            continue
        made = [table.made[row.label, i] for i in hits]
        unsafe = np.array([is_unsafe(table, row.label, i) for i in hits])
        plain = [table.exact_control(row, i) for i in hits]
        losses = np.array([is_unsafe(table, label, i) for label, i in zip(plain, hits, strict=True) if label])
        known = {name: np.array([figure(one) for one in made]) for name, figure in KNOWN.items()}
        first = np.arange(len(hits)) % 2 == 0
        known[COMBINED] = -risk(np.stack(list(known.values()), 1), unsafe, first)
        for name, figures in known.items():
            threshold = fit(figures[first], unsafe[first])
            accepts = ~first & (figures >= threshold) if threshold is not None else np.zeros(len(hits), bool)
            bad = int(unsafe[accepts].sum())
            found.append(
                Gate(
                    row.label,
                    name,
                    threshold,
                    int(accepts.sum()),
                    int((~first).sum()),
                    bad,
                    upper_bound(bad, int(accepts.sum())),
                    int(losses[~first].sum()) if all(plain) else None,
                )
            )
    return found


def hit_cases(table: Table, label: str) -> list[int]:
    if not table.judged or label in table.errors:
        return []
    return [i for i in table.cases if table.made[label, i].hit]


def is_unsafe(table: Table, label: str, index: int) -> bool:
    return lost(table.right(label, index), table.right(REFERENCE, index))


def fit(figures: np.ndarray, unsafe: np.ndarray) -> float | None:
    """The lowest threshold above which the unsafe share is bounded by `ALLOWED`."""
    best = None
    for threshold in np.unique(figures)[::-1]:
        accepted = figures >= threshold
        if upper_bound(int(unsafe[accepted].sum()), int(accepted.sum())) <= ALLOWED:
            best = float(threshold)
    return best


def risk(figures: np.ndarray, unsafe: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    """The chance of a loss by ridge-penalised logistic regression on the fitted rows, for all of them.

    Args:
        figures: [N, F].
        unsafe, fitted: bool [N].
    """
    from scipy.optimize import minimize

    middle, spread = figures[fitted].mean(0), figures[fitted].std(0)
    x = np.concatenate([(figures - middle) / np.where(spread > 0, spread, 1), np.ones((len(figures), 1))], 1)
    y = unsafe.astype(np.float64)

    def loss(weights: np.ndarray) -> float:
        logits = x[fitted] @ weights
        return float(np.logaddexp(0, logits).sum() - y[fitted] @ logits + RIDGE / 2 * (weights[:-1] ** 2).sum())

    logits = x @ minimize(loss, np.zeros(x.shape[1])).x
    return np.asarray(1 / (1 + np.exp(-logits)))


def changes(table: Table) -> list[Change]:
    """For every row that reuses, which differing attribute goes with losses."""
    found = []
    for row in table.rows:
        if row.reuse is None:
            continue
        pairs = [
            (i, donors[0]) for i in hit_cases(table, row.label) if (donors := table.donor_scenes(table.made[row.label, i]))
        ]
        for name in ATTRIBUTES:
            differs = [i for i, donor in pairs if value(table.scene(i), name) != value(donor, name)]
            same = [i for i, _ in pairs if i not in differs]
            counts = [sum(is_unsafe(table, row.label, i) for i in some) for some in (differs, same)]
            if pairs:
                found.append(Change(row.label, name, len(differs), counts[0], len(same), counts[1]))
    return found


def words(found: Sequence[Gate], changed: Sequence[Change]) -> str:
    """Both as Markdown tables."""
    lines = [
        f"Gates for at most {100 * ALLOWED:.0f} % unsafe (95 % bound), threshold from one half of the hits, judged on the other (no half",
        "of fewer than 59 hits can show that bound):",
        "",
        "| row | accepts from | threshold | accepted | unsafe | bound | unsafe in the control |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        threshold = "none" if one.threshold is None else f"{one.threshold:.3f}"
        bound = "-" if not one.accepted else f"{100 * one.bound:.1f} %"
        control = "-" if one.control is None else f"{one.control} of {one.of}"
        lines.append(
            f"| {one.row} | {one.figure} | {threshold} | {one.accepted} of {one.of} | {one.unsafe} | {bound} | {control} |"
        )
    lines += [
        "",
        "Unsafe hits by what differs between request and donor, with the 95 % bound:",
        "",
        "| row | attribute | where it differs | where it is shared |",
        "| --- | --- | ---: | ---: |",
    ]
    for change in changed:
        counts = (change.unsafe_if_differs, change.differs), (change.unsafe_if_same, change.same)
        cells = [f"{bad} of {of} (< {100 * upper_bound(bad, of):.0f} %)" if of else "-" for bad, of in counts]
        lines.append(f"| {change.row} | {change.attribute} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)
