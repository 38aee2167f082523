"""What torch has to be told about the machine: half precision that kills, and memory that is freed too soon.

Some virtual Xeons announce AMX and trap it: the first product in bfloat16 or float16 ends Python with "Illegal
instruction". oneDNN, which multiplies for torch, leaves AMX alone if ``ONEDNN_MAX_CPU_ISA`` says so before torch is
imported. Whether that is needed is tried out in a child process, once a machine, and only where AMX is announced.

glibc hands memory back to the system as soon as some megabytes at the end of its heap are free, and asks for large
pieces one by one. So every pass of a network may pay anew for its hidden layers: the system maps and clears each page
again, which on a virtual machine takes as long as small products do, and in one process but not in the next.

Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from ermoe.errors import UserError
from ermoe.files import cache_folder, replacing

LIMIT, LIMITED = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
PROBE = "ERMOE_CPU_PROBE"
"""Set to anything, it has every CPU probed; set to "dies", the probe dies unless ``LIMIT`` is set."""

_TRAPS = "half-precision products end Python on this CPU, which announces AMX and traps it"
_CPU_INFO = Path("/proc/cpuinfo")
_DEADLY = (-signal.SIGILL, -signal.SIGSEGV, -signal.SIGBUS)
_LONGEST_SECONDS = 300
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
_NEVER, _LARGEST = 2**31 - 1, 32 * 2**20  # glibc takes no threshold above 32 MB
_SET_BY_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")

# A program of its own, so that it needs torch and nothing else. It leaves no core file behind when it dies.
_PROGRAM = f"""
import os, resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if os.environ.get("{PROBE}") == "dies" and not os.environ.get("{LIMIT}"):
    os.kill(os.getpid(), signal.SIGILL)
import torch
from torch.nn import functional as F
for dtype in (torch.bfloat16, torch.float16):
    w = torch.ones(64, 64, dtype=dtype, requires_grad=True)
    for rows in (2, 64):
        x = torch.ones(rows, 64, dtype=dtype, requires_grad=True)
        heads, image = x.view(1, 1, rows, 64), x.view(1, rows, 8, 8)
        products = (
            F.linear(x, w), torch.mm(x, w), torch.matmul(heads, w), torch.bmm(heads[0], w[None]),
            F.scaled_dot_product_attention(heads, heads, heads), F.conv2d(image, w.view(64, 64, 1, 1)[:, :rows]),
        )
        for product in products:
            product.float().sum().backward()
"""


def limit() -> str | None:
    """Keeps oneDNN, here and in child processes, from what would end them; the sentence to say about it, if it did.

    It works before torch is imported; afterwards it does nothing. What a user or the parent process has set stays.
    """
    if "torch" in sys.modules or os.environ.get(LIMIT) or problem() is None:
        return None
    os.environ[LIMIT] = LIMITED
    return problem() or f"{_TRAPS}: {LIMIT}={LIMITED} is set for this run, and they work"


def limit_to_avx2() -> None:
    """Keeps oneDNN, MKL and torch's own kernels from anything wider than AVX2, here and in child processes.

    Each of the three multiplies somewhere; limiting one of them alone measures a CPU that does not exist.
    """
    if "torch" in sys.modules:
        raise UserError("torch is loaded, and keeps the instructions it found: run this in a process of its own")
    os.environ.update({LIMIT: "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"})


def keep_freed() -> bool:
    """Keeps what this process frees, in pieces of up to 32 MB, and says whether it does.

    It does not where the C library is another, or where a user has set its thresholds. Larger pieces go back as ever.
    """
    is_set = any(name in os.environ for name in _SET_BY_USERS) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if is_set or not _is_glibc():
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(library.mallopt(_TRIM_THRESHOLD, _NEVER))


def problem() -> str | None:
    """What to say before the first product in half precision on this CPU; None where there is nothing to fear."""
    if not _dies():
        return None
    if os.environ.get(LIMIT) == LIMITED:
        return f"{_TRAPS}, even with {LIMIT}={LIMITED}: use fp32"
    return f"{_TRAPS}: set {LIMIT}={LIMITED} before Python starts, or use fp32"


def _dies() -> bool:
    """Whether products in half precision end a process with this environment, as the probe or its last verdict says."""
    cpu = described()
    if not (os.environ.get(PROBE) or " amx" in cpu["flags"]):
        return False
    known = b""
    with suppress(OSError, RuntimeError):  # no verdict yet, or no home to keep it in
        known = _verdict_file(cpu).read_bytes()
    if known in (b"dies", b"works"):
        return known == b"dies"
    code = _run_probe()
    if code == 0 or code in _DEADLY:  # anything else, such as a torch that is missing, says nothing about the CPU
        with suppress(OSError, RuntimeError, UserError), replacing(_verdict_file(cpu)) as draft:
            draft.write_bytes(b"works" if code == 0 else b"dies")
    return code in _DEADLY


def _is_glibc() -> bool:
    with suppress(AttributeError, ValueError, OSError):  # no such name on other systems
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    return False


def described() -> dict[str, str]:
    """Model and flags of the first processor; empty where the system does not tell."""
    lines: list[str] = []
    with suppress(OSError), _CPU_INFO.open(encoding="utf-8", errors="replace") as file:
        lines.extend(takewhile(str.strip, file))  # an empty line ends a processor
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {name: told.get(name, "") for name in ("model name", "flags")}


def _verdict_file(cpu: dict[str, str]) -> Path:
    """Where the verdict on this CPU with this torch and this environment is kept."""
    from importlib.metadata import PackageNotFoundError, version  # needless where AMX is not announced

    torch = ""
    with suppress(PackageNotFoundError):
        torch = version("torch")
    parts = (*cpu.values(), torch, os.environ.get(LIMIT, ""), os.environ.get(PROBE, ""))
    return cache_folder("cpu") / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _run_probe() -> int | None:
    """The exit code of the probe, negative for the signal that ended it; None if there was none."""
    import subprocess  # needless where AMX is not announced

    program = [sys.executable, "-P", "-c", _PROGRAM]
    try:
        done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_SECONDS)
        return done.returncode
    except (OSError, subprocess.TimeoutExpired):
        return None
