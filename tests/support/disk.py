"""A full disk for tests."""

import resource
import signal
from contextlib import contextmanager


@contextmanager
def limited_files():
    """Yields a function that lets no file grow beyond so many bytes, as a full disk would; without a number, any."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size=soft: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
