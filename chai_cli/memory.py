"""Memory of the process and of the device: what there is too little of, and what is kept for the next tensors."""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of glibc's mallopt
KEPT = 2**30  # bytes of free memory at the end of the heap that stay with the process
# How libraries say it that do not raise torch's own error: its CPU allocator, cuBLAS, cuDNN.
LACKS = ("out of memory", "can't allocate memory", "alloc_failed", "unable to find an engine", "unable to find a valid cudnn")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or beside it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in said for words in LACKS)


def keep_freed() -> bool:
    """Keep freed memory for the next tensors, in the whole process.

    On a CPU a render otherwise hands its big blocks back to Linux at each step, which clears them page by page before it gives
    them out again. False where glibc is told by hand what to do (`MALLOC_…`), or there is no glibc.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, KEPT))
