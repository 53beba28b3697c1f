"""Methods: what happens around each step of a render. One file and one entry here for each."""

from __future__ import annotations

from collections.abc import Callable

from chai_cli.reuse.base import Method


def dense() -> Method:
    from chai_cli.reuse.dense import Dense

    return Dense()


METHODS: dict[str, Callable[[], Method]] = {"dense": dense}
