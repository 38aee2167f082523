"""What a pass frees stays with the process, for the next pass to take.

glibc hands memory back to the system as soon as some megabytes at the end of its heap are free, and asks for large
pieces one by one. So every pass of a network may pay anew for its hidden layers: the system maps and clears each page
again, which on a virtual machine takes as long as small products do, and in one process but not in the next.

Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
_NEVER, _LARGEST = 2**31 - 1, 32 * 2**20  # glibc takes no threshold above 32 MB
_SET_BY_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed() -> bool:
    """Keeps what this process frees, in pieces of up to 32 MB, and says whether it does.

    It does not where the C library is another, or where a user has set its thresholds. Larger pieces go back as ever.
    """
    is_set = any(name in os.environ for name in _SET_BY_USERS) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if is_set or not _is_glibc():
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(library.mallopt(_TRIM_THRESHOLD, _NEVER))


def _is_glibc() -> bool:
    with suppress(AttributeError, ValueError, OSError):  # no such name on other systems
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    return False
