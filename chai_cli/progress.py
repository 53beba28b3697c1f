"""What a person sees while a batch runs: bars on a terminal, plain lines elsewhere, nothing when asked to be quiet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from chai_cli.report import Row, clip_text

if TYPE_CHECKING:
    from rich.console import Console


class Progress(Protocol):
    def start(self, total: int) -> None: ...
    def note(self, text: str) -> None: ...
    def begin(self, name: str) -> None: ...
    def step(self, done: int, total: int) -> None: ...
    def end(self, row: Row) -> None: ...
    def stop(self) -> None: ...


def outcome(row: Row) -> str:
    took = f" in {row.seconds['total']:.2f} s" if "total" in row.seconds else ""
    if row.reuse == "hit":
        took += f", hit: {clip_text(row.donor_prompt or row.why, 60)}"
    return f"{row.status}{took}" if row.status != "failed" else f"failed: {clip_text(row.why, 200)}"


class Quiet:
    """Failures and warnings only."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, name: str) -> None:
        pass

    def step(self, done: int, total: int) -> None:
        pass

    def end(self, row: Row) -> None:
        if row.status == "failed":
            self.note(f"{row.index:04d} {outcome(row)}")

    def stop(self) -> None:
        pass


class Lines(Quiet):
    """One line for each video, with the time that is left."""

    def start(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, 0.0

    def begin(self, name: str) -> None:
        self.began = self.began or time.monotonic()  # loading is not what a video takes

    def end(self, row: Row) -> None:
        self.done += 1
        left = (time.monotonic() - self.began) / self.done * (self.total - self.done) if self.began else 0.0
        estimate = f", {left:.0f} s left" if left >= 0.5 else ""  # none before the first video, nor after the last
        label = row.file or f"line {row.index}"
        self.note(f"[{self.done}/{self.total}{estimate}] {label} {outcome(row)}")


class Bars(Quiet):
    """A bar for the batch with the time left, and one for the steps of the current video."""

    def start(self, total: int) -> None:
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
        )
        self.bars = progress.Progress(*columns, console=self.console, transient=True)
        self.batch = self.bars.add_task("videos", total=total)
        self.video = self.bars.add_task("", total=1, visible=False)
        self.bars.start()

    def begin(self, name: str) -> None:
        self.bars.reset(self.video, description=clip_text(name, 40), total=1, visible=True)

    def step(self, done: int, total: int) -> None:
        self.bars.update(self.video, completed=done, total=total)

    def end(self, row: Row) -> None:
        super().end(row)
        self.bars.advance(self.batch)

    def stop(self) -> None:
        self.bars.stop()


def choose(console: Console, quiet: bool) -> Progress:
    if quiet:
        return Quiet(console)
    return Bars(console) if console.is_terminal else Lines(console)
