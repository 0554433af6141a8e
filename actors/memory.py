"""How this process's C library gives memory back."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 << 20
LARGEST_INT = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks for the next tensor instead of returning their pages.

    Thousands of tensors of a megabyte come and go in one verdict, and fresh pages cost as much as
    the arithmetic on them (seen: a fifth of its time). Other C libraries are left alone.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
