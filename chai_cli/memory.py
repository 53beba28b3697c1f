"""Freed memory kept for the next tensors: on a CPU a render otherwise hands its big blocks back to Linux at each step, which clears
them page by page before it gives them out again."""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of glibc's mallopt
KEPT = 2**30  # bytes of free memory at the end of the heap that stay with the process


def keep_freed() -> bool:
    """Tell glibc to do so, for the whole process. False where it is set by hand (`MALLOC_…`), or there is no glibc."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, KEPT))
