"""All vectors of one namespace as one matrix in memory: exact search is one product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIRST = 1024  # rows allocated at first; doubled when full


@dataclass(frozen=True)
class Match:
    """An entry's vector near a query: its entry, what the vector stands for, and the cosine similarity."""

    id: str
    label: str
    similarity: float


class Index:
    """Rows are unit vectors; a removed row is overwritten by the last one, so the matrix has no holes."""

    def __init__(self, width: int) -> None:
        self.matrix = np.zeros((FIRST, width), np.float32)
        self.keys: list[tuple[str, str]] = []
        self.rows: dict[str, list[int]] = {}

    def add(self, entry: str, label: str, vector: np.ndarray) -> None:
        if len(self.keys) == len(self.matrix):
            self.matrix = np.concatenate([self.matrix, np.zeros_like(self.matrix)])
        self.matrix[len(self.keys)] = vector
        self.rows.setdefault(entry, []).append(len(self.keys))
        self.keys.append((entry, label))

    def remove(self, entry: str) -> None:
        for row in sorted(self.rows.pop(entry, []), reverse=True):
            last = len(self.keys) - 1
            if row != last:
                self.matrix[row] = self.matrix[last]
                self.keys[row] = self.keys[last]
                moved = self.rows[self.keys[row][0]]
                moved[moved.index(last)] = row
            self.keys.pop()

    def search(self, queries: np.ndarray, count: int) -> list[list[Match]]:
        """The `count` nearest rows of each query, best first.

        Args:
            queries: Unit vectors [Q, D].
        """
        if not self.keys:
            return [[] for _ in queries]
        similarity = queries.astype(np.float32) @ self.matrix[: len(self.keys)].T
        count = min(count, len(self.keys))
        found = []
        for row in similarity:
            best = np.argpartition(-row, count - 1)[:count]
            best = best[np.argsort(-row[best], kind="stable")]
            found.append([Match(self.keys[i][0], self.keys[i][1], float(row[i])) for i in best])
        return found
