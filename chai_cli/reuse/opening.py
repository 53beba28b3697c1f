"""What the model says first, guessed from the prompt.

At the highest noise level the latents show nothing yet: the model's clean estimate hangs on the prompt nearly alone. From the
estimates of prompts that were rendered before, kernel ridge regression (a linear kernel on the prompts' embeddings, with a free
mean) foretells it for another prompt, and a hit saves the model calls of its first step. How well that goes is known beforehand:
for each prompt what all others foretell follows from the one fit (the leave-one-out identity of ridge regression).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0)  # against the mean of the kernel's diagonal
FEW = 12  # prompts with fewer tell nothing of how well the guess goes
PART = 2**16  # numbers of each estimate that are made wide at a time
SAME = 1 - 1e-5  # cosine from which two prompts are one


@dataclass(frozen=True)
class Opening:
    """A fit of first estimates.

    Attributes:
        mean: Of the prompts' embeddings, [D], float64.
        rows: The embeddings less their mean, [M, D].
        inverse: Of the kernel with its penalty, [M, M].
        left: One less the weight that each prompt has in its own answer, [M].
        estimates: Clean estimates of the first step, [M, N], half precision.
        shape: Of one of them.
        share: How much of the estimates' variance is foretold for prompts that were left out; 1 is all, below 0 worse than the mean.
    """

    mean: Tensor
    rows: Tensor
    inverse: Tensor
    left: Tensor
    estimates: Tensor
    shape: torch.Size
    share: float

    @classmethod
    def of(cls, known: Iterable[tuple[np.ndarray, Tensor]]) -> Opening | None:
        """Fit, with the penalty that serves prompts best which are left out; None where there are too few.

        Args:
            known: Unit embeddings [D] of prompts, and the first estimates [1, C, T, H, W]. Of one prompt only the first counts.
        """
        vectors: list[np.ndarray] = []
        flat: list[Tensor] = []
        shape = torch.Size()
        for vector, estimate in known:
            if vectors and float((np.stack(vectors) @ vector).max()) > SAME:
                continue
            vectors.append(vector)
            flat.append(estimate.cpu().flatten().bfloat16())
            shape = estimate.shape
        count = len(vectors)
        if count < FEW:
            return None
        embedded, estimates = torch.from_numpy(np.stack(vectors)).double(), torch.stack(flat)
        mean = embedded.mean(0)
        rows = embedded - mean
        kernel = rows @ rows.T
        inner = products(estimates)
        centred = inner - inner.mean(0) - inner.mean(1)[:, None] + inner.mean()
        best: tuple[float, Tensor, Tensor] | None = None
        for penalty in PENALTIES:
            added = penalty * kernel.diagonal().mean()
            inverse = torch.linalg.inv(kernel + added * torch.eye(count, dtype=torch.float64))
            left = added * inverse.diagonal() - 1 / count  # what a prompt's own estimate does not decide of its answer
            missed = added**2 * ((inverse @ centred) * inverse).sum(1) / left.square()
            share = 1 - float(missed.sum() / centred.diagonal().sum().clamp(min=1e-12))
            if best is None or share > best[0]:
                best = share, inverse, left
        assert best is not None
        share, inverse, left = best
        return cls(mean, rows, inverse, left, estimates, shape, share)

    def guess(self, vector: np.ndarray) -> Tensor:
        """The first estimate of a prompt, [1, C, T, H, W], float32, on the CPU."""
        return self.mixed(self.weights(torch.tensor(vector, dtype=torch.float64)))

    def left_out(self, vector: np.ndarray) -> Tensor:
        """What a prompt of the fit would be told if it had not been there; of another, its guess."""
        seen = torch.tensor(vector, dtype=torch.float64)
        same = (self.rows + self.mean) @ seen
        place = int(same.argmax())
        weights = self.weights(seen)
        if float(same[place]) > SAME:
            own = weights[place]
            weights = weights / self.left[place]
            weights[place] = 1 - (1 - own) / self.left[place]
        return self.mixed(weights)

    def weights(self, vector: Tensor) -> Tensor:
        """How much each known estimate has in a prompt's answer, [M]."""
        spread = self.inverse @ (self.rows @ (vector - self.mean))
        return spread - spread.mean() + 1 / len(self.rows)

    def mixed(self, weights: Tensor) -> Tensor:
        parts = [weights.float() @ part.float() for part in self.estimates.split(PART, dim=1)]
        return torch.cat(parts).view(self.shape)


def products(rows: Tensor) -> Tensor:
    """All inner products, float64; without a copy of everything in it."""
    found = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part in rows.split(PART, dim=1):
        wide = part.double()
        found += wide @ wide.T
    return found
