"""Freed memory stays with the process, and a lack of it is known however it is worded."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from chai_cli.memory import is_out_of_memory

CODE = """
import resource, torch
from chai_cli.memory import keep_freed
told = keep_freed()
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        held = [torch.ones(2_000_000) for _ in range(8)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(told, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_blocks_are_not_handed_back_and_cleared_again() -> None:
    def run(**more: str) -> tuple[str, int]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        out = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=environment | more
        ).stdout
        told, faults = out.split()
        return told, int(faults)

    kept, by_hand = run(), run(MALLOC_MMAP_THRESHOLD_="65536")  # every block is mapped anew there
    assert kept[0] == "True"
    assert by_hand[0] == "False"
    assert kept[1] < by_hand[1] / 10 > 1000, (kept, by_hand)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        MemoryError(),
    ],
)
def test_out_of_memory_in_all_its_words(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory"), KeyboardInterrupt()])
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)
