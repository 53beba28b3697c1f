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

ALLOWED = 0.05  # unsafe hits, at most
LEAST = 20  # hits in each half
RIDGE = 1.0

KNOWN: dict[str, Callable[[Measurement], float]] = {
    "prompt similarity": lambda hit: hit.similarity,
    "coverage": lambda hit: hit.coverage,
    "shared entities": lambda hit: float(len(hit.shared)),
}


@dataclass(frozen=True)
class Gate:
    """One figure as a gate for one row.

    Attributes:
        threshold: The least value that is accepted; None if no threshold keeps the bound on the first half.
        accepted, of: Hits of the second half that it accepts, and all of them.
        unsafe: Of the accepted.
        bound: What their true share stays below, with 95 % confidence.
        dense: Hits of the second half that plain sampling with as many calls would have lost something in: the control's own rate.
    """

    row: str
    figure: str
    threshold: float | None
    accepted: int
    of: int
    unsafe: int
    bound: float
    dense: int | None


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
        if row.reuse is None or len(hits) < 2 * LEAST:
            continue
        made = [table.made[row.label, i] for i in hits]
        unsafe = np.array([is_unsafe(table, row.label, i) for i in hits])
        control = table.control(row, float(np.median([one.calls for one in made])), hits)
        plain = np.array([is_unsafe(table, control, i) for i in hits]) if control else None
        known = {name: np.array([figure(one) for one in made]) for name, figure in KNOWN.items()}
        first = np.arange(len(hits)) % 2 == 0
        known["all of these"] = -risk(np.stack(list(known.values()), 1), unsafe, first)
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
                    None if plain is None else int(plain[~first].sum()),
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
        pairs = [(i, donor) for i in hit_cases(table, row.label) if (donor := table.donor_scene(table.made[row.label, i]))]
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
        f"Gates for at most {100 * ALLOWED:.0f} % unsafe (95 % bound), threshold from one half of the hits, judged on the other:",
        "",
        "| row | accepts from | threshold | accepted | unsafe | bound | control unsafe, all |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        threshold = "none" if one.threshold is None else f"{one.threshold:.3f}"
        bound = "-" if not one.accepted else f"{100 * one.bound:.1f} %"
        dense = "-" if one.dense is None else f"{one.dense} of {one.of}"
        lines.append(
            f"| {one.row} | {one.figure} | {threshold} | {one.accepted} of {one.of} | {one.unsafe} | {bound} | {dense} |"
        )
    lines += [
        "",
        "Unsafe hits by what differs between request and donor:",
        "",
        "| row | attribute | where it differs | where it is shared |",
        "| --- | --- | ---: | ---: |",
    ]
    for change in changed:
        differs = f"{change.unsafe_if_differs} of {change.differs}"
        lines.append(f"| {change.row} | {change.attribute} | {differs} | {change.unsafe_if_same} of {change.same} |")
    return "\n".join(lines)
