"""Training resumes exactly."""

from __future__ import annotations

from pathlib import Path

import torch

from chai_cli.embedded.train.loop import Plan, train


class Slope:
    """A task small enough to train in a blink."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

    def matrices(self) -> set[str]:
        return {"0.weight"}

    def loss(self, rng: torch.Generator, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        x = torch.randn(16, 4, generator=rng)
        return (self.model(x)[:, 0] - x.sum(1)).square().mean(), {}

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        return {}

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        torch.save(model.state_dict(), folder / "slope.pt")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "slope.pt", weights_only=True)["shadow"]


def test_stopped_and_resumed_training_equals_one_run(tmp_path: Path) -> None:
    def plan(run: str, steps: int) -> Plan:
        return Plan(tmp_path / run, steps, lr=1e-2, muon_lr=1e-2, warmup=5, workers=1, out=tmp_path / f"{run}-out")

    train("slope", Slope, plan("whole", 30))
    train("slope", Slope, plan("parts", 12))
    train("slope", Slope, plan("parts", 30))
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "parts")[name]), name
    assert (tmp_path / "parts-out" / "slope.pt").exists()


def test_training_lowers_the_loss_and_depends_on_the_seed(tmp_path: Path) -> None:
    for seed in (1, 2):
        train("slope", Slope, Plan(tmp_path / str(seed), 400, lr=3e-2, muon_lr=3e-2, workers=1, seed=seed))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model.load_state_dict(torch.load(tmp_path / "1" / "slope.pt", weights_only=True)["model"])
    x = torch.randn(64, 4)
    assert (model(x)[:, 0] - x.sum(1)).square().mean() < 0.5
    assert not torch.equal(weights(tmp_path / "1")["0.weight"], weights(tmp_path / "2")["0.weight"])
