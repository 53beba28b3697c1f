"""Muon for weight matrices and convolutions, AdamW for the rest, and a moving average of the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chai_cli.embedded.train.numbers import PRODUCTS


def orthogonal(matrix: Tensor, rounds: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, by the quintic Newton-Schulz iteration of Muon (Jordan et al., 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(PRODUCTS)
    x = x / (x.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(rounds):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, then an orthogonal step; filters of a convolution count as the rows of one matrix.

    `torch.optim.Muon` takes matrices only, which is why this one exists.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(state["momentum"], group["momentum"]).flatten(1))
                rows, columns = update.shape
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.view_as(p), alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def optimizers(model: nn.Module, matrices: set[str], lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """Muon on the named parameters, AdamW on all others; `base_lr` remembers each group's full learning rate."""
    hidden = [p for name, p in model.named_parameters() if name in matrices]
    rest = [p for name, p in model.named_parameters() if name not in matrices]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]
    if hidden:
        made.append(Muon(hidden, lr=muon_lr))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return made


@torch.no_grad()
def average(shadow: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Move the exponential average of the weights, with a short memory at the start."""
    rate = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(shadow.parameters()), [p.detach() for p in model.parameters()], 1 - rate)
    for mine, other in zip(shadow.buffers(), model.buffers(), strict=True):
        mine.copy_(other)
