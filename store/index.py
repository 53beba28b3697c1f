"""All vectors of one kind in one namespace: a matrix of bytes that finds the few rows which can be among the nearest.

A row x is kept as centre + scale * code, with code in int8, and |x - centre - scale * code| <= error for every row. A product of
bytes then tells each similarity up to a margin that is computed, not guessed; the rows within the margin of the k-th best are
read in full and compared in float64. So the answer is exact, at a quarter of the memory and of the time of float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

FIRST = 1024  # rows allocated at first; doubled when full
SMALL = 4096  # rows up to which numpy is as fast as torch's product of bytes
KEY = np.dtype([("entry", ">u8"), ("number", ">u2")])  # of a row: its entry's, and which of the entry's vectors it is
ROUNDING = 2.0**-8  # bfloat16, relative


class Index:
    """Rows in no particular order; a removed row is overwritten by one of the last, so the matrix has no holes.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 0
        self.codes = np.zeros((FIRST, width), np.int8)
        self.scales = np.zeros(FIRST, np.float32)
        self.keys = np.zeros(FIRST, KEY)
        self.centre: np.ndarray | None = None  # what the first rows have in common, which would cost them precision
        self.error = 0.0  # no row is farther from its code than this
        self.reach = 0.0  # no coded row is longer than this, seen from the centre

    def extend(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Add rows.

        Args:
            keys: [N] of KEY.
            rows: [N, D], float32.
        """
        if self.centre is None:
            self.centre = rows.mean(0)
        begin, end = self.count, self.count + len(rows)
        self.grow(end)
        apart = rows - self.centre
        scales = np.maximum(np.abs(apart).max(1), np.float32(1e-30)) / np.float32(127)
        codes = np.rint(apart / scales[:, None])
        coded = codes * scales[:, None]
        self.error = max(self.error, float(np.linalg.norm(apart - coded, axis=1).max()))
        self.reach = max(self.reach, float(np.linalg.norm(coded, axis=1).max()))
        self.codes[begin:end], self.scales[begin:end], self.keys[begin:end] = codes, scales, keys
        self.count = end

    def grow(self, rows: int) -> None:
        room = len(self.codes)
        while room < rows:
            room *= 2
        for name in ("codes", "scales", "keys"):
            old = getattr(self, name)
            if len(old) < room:
                new = np.zeros((room, *old.shape[1:]), old.dtype)
                new[: self.count] = old[: self.count]
                setattr(self, name, new)

    def keep(self, entries: np.ndarray) -> None:
        """Forget the rows of all other entries.

        Args:
            entries: Their keys [E], integers.
        """
        stays = np.isin(self.keys["entry"][: self.count], entries)
        left = int(stays.sum())
        holes = np.flatnonzero(~stays[:left])
        movers = left + np.flatnonzero(stays[left:])
        for array in (self.codes, self.scales, self.keys):
            array[holes] = array[movers]
        self.count = left

    def candidates(self, queries: np.ndarray, count: int) -> list[np.ndarray]:
        """For each query the keys [C] of the rows among which its `count` nearest surely are.

        With q' the query in bfloat16 and c the code of a row x, the coarse product r obeys

            |q(x - centre) - r| <= |q| error + |q - q'| reach + |q| (reach + error) (D + 8) 2^-23 + 2^-8 |r|

        by Cauchy and Schwarz: the coding, the rounding of the query, that of the sums in float32, and that of the result. Both
        ends of the interval rise with r, so that of the k-th largest r bounds the k-th nearest row, and one threshold on r
        leaves out only rows that lie below it.

        Args:
            queries: [Q, D].
        """
        if not self.count:
            return [self.keys[:0] for _ in queries]
        queries = queries.astype(np.float32)
        rounded = to_bfloat16(queries)
        length, lost = np.linalg.norm(queries, axis=1), np.linalg.norm(queries - rounded, axis=1)
        coarse = self.products(rounded)
        found = []
        for row, q, dq in zip(coarse, length.tolist(), lost.tolist(), strict=True):
            margin = q * self.error + dq * self.reach + q * (self.reach + self.error) * (self.width + 8) * 2.0**-23
            place = max(self.count - count, 0)
            worst = float(np.partition(row, place)[place])
            bound = worst - ROUNDING * abs(worst) - 2 * margin
            threshold = bound / (1 + ROUNDING) if bound > 0 else bound / (1 - ROUNDING)
            found.append(self.keys[: self.count][row >= np.nextafter(np.float32(threshold), np.float32(-np.inf))])
        return found

    def products(self, queries: np.ndarray) -> np.ndarray:
        """Queries [Q, D] that bfloat16 holds exactly, times the scaled codes: [Q, N], float32."""
        fast = byte_product(self.width) if self.count > SMALL else None
        product, rows = (fast, 2**30 // self.width) if fast else (plain_product, SMALL)  # its own indices are 32 bits
        result = np.empty((len(queries), self.count), np.float32)
        for begin in range(0, self.count, rows):
            part = slice(begin, min(begin + rows, self.count))
            np.multiply(product(queries, self.codes[part]), self.scales[part], out=result[:, part])
        return result


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 numbers rounded to those that bfloat16 has."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


Product = Callable[[np.ndarray, np.ndarray], np.ndarray]  # bfloat16 in float32 [Q, D], int8 [N, D] -> [Q, N]


def plain_product(queries: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return queries @ codes.T.astype(np.float32)


def byte_product(width: int) -> Product | None:
    """torch's product of bfloat16 with int8, summed in float32 and rounded to bfloat16. None where it cannot be used.

    Its vector loads need whole and aligned groups of 16.
    """
    import torch

    if not hasattr(torch, "_weight_int8pack_mm") or width % 16:
        return None

    def product(queries: np.ndarray, codes: np.ndarray) -> np.ndarray:
        ones = torch.ones(len(codes), dtype=torch.bfloat16)
        with torch.inference_mode():
            return (
                torch._weight_int8pack_mm(torch.from_numpy(queries).bfloat16(), torch.from_numpy(codes), ones).float().numpy()
            )

    return product
