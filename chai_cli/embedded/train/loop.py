"""The one training loop: some single-thread processes, one all-reduce a step, checkpoints that resume exactly."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from chai_cli.embedded.train.optim import average, optimizers
from chai_cli.memory import keep_freed

CHECKPOINT_SECONDS = 120


class Task(Protocol):
    """What is trained. Built once in each process."""

    @property
    def model(self) -> nn.Module: ...

    def matrices(self) -> set[str]:
        """Names of the parameters that Muon takes."""

    def loss(self, rng: torch.Generator, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of one fresh batch and figures for the log; `rng` is all the randomness there is."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Held-out figures of the averaged model."""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the averaged model as it ships."""


@dataclass(frozen=True)
class Plan:
    """How long, how fast. The learning rate warms up, stays, and falls to zero over the last `decay` steps."""

    run: Path
    steps: int
    lr: float = 1e-3
    muon_lr: float = 2e-2
    warmup: int = 100
    decay: int = 0
    ema: float = 0.997
    seed: int = 0
    workers: int = 2
    evaluate_every: int = 500
    clip_norm: float = 1.0
    out: Path | None = None
    extra: dict[str, object] = field(default_factory=dict)

    def rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        return warm * min(1.0, (self.steps - step) / self.decay) if self.decay else warm


def train(name: str, build: Callable[[Plan, int], Task], plan: Plan) -> None:
    """Train until `plan.steps`, going on from the checkpoint in `plan.run` if there is one, then export to `plan.out`."""
    plan.run.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = str(29500 + os.getpid() % 2000)
    if plan.workers == 1:
        work(0, name, build, plan)
    else:
        spawn(work, (name, build, plan), nprocs=plan.workers)


def sum_gradients(params: list[nn.Parameter], workers: int) -> None:
    """Average the gradients over the processes with one all-reduce."""
    if workers == 1:
        return
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= workers
    for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = piece.view_as(p)


def work(rank: int, name: str, build: Callable[[Plan, int], Task], plan: Plan) -> None:
    torch.set_num_threads(1)
    keep_freed()
    if plan.workers > 1:
        dist.init_process_group("gloo", rank=rank, world_size=plan.workers)
    torch.manual_seed(plan.seed)
    task = build(plan, rank)
    shadow = copy.deepcopy(task.model).eval().requires_grad_(False)
    optims = optimizers(task.model, task.matrices(), plan.lr, plan.muon_lr)
    step, seconds = 0, 0.0
    path = plan.run / f"{name}.pt"
    if path.exists():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        task.model.load_state_dict(saved["model"])
        shadow.load_state_dict(saved["shadow"])
        for optimizer, state in zip(optims, saved["optimizers"], strict=True):
            base = [group["base_lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, value in zip(optimizer.param_groups, base, strict=True):
                group["base_lr"] = value
        step, seconds = saved["step"], saved["seconds"]

    def save() -> None:
        states = [optimizer.state_dict() for optimizer in optims]
        record = {"model": task.model.state_dict(), "shadow": shadow.state_dict(), "optimizers": states}
        torch.save(record | {"step": step, "seconds": seconds}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def log(**figures: object) -> None:
        line = {"step": step, "minutes": round(seconds / 60, 2), **figures}
        with (plan.run / f"{name}.log").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    parent = os.getppid()
    params = [p for p in task.model.parameters() if p.requires_grad]
    started = saved_at = time.monotonic()
    carried = seconds
    running: dict[str, float] = {}
    while step < plan.steps and os.getppid() == parent:  # a worker ends when the process that started it is killed
        rng = torch.Generator().manual_seed((plan.seed * 1_000_003 + step) * 64 + rank)
        loss, figures = task.loss(rng, step)
        loss.backward()
        sum_gradients(params, plan.workers)
        norm = nn.utils.clip_grad_norm_(params, plan.clip_norm)
        for optimizer in optims:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * plan.rate(step)
            optimizer.step()
        for p in params:
            p.grad = None
        average(shadow, task.model, step, plan.ema)
        step += 1
        seconds = carried + time.monotonic() - started
        for key, value in {"loss": loss.item(), "norm": norm.item(), **figures}.items():
            running[key] = value if key not in running else 0.98 * running[key] + 0.02 * value
        if rank == 0:
            if step % 50 == 0:
                log(**{key: round(value, 5) for key, value in running.items()})
            if step % plan.evaluate_every == 0 or step == plan.steps:
                log(**{f"test_{k}": round(v, 4) for k, v in task.evaluate(shadow).items()})
            if time.monotonic() - saved_at > CHECKPOINT_SECONDS or step == plan.steps:
                save()
                saved_at = time.monotonic()
    if rank == 0 and plan.out is not None:
        task.export(shadow, plan.out)
    if plan.workers > 1:
        dist.barrier()
        dist.destroy_process_group()
