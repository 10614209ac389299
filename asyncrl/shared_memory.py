"""Memory that processes share: a file that never has a name, gone with the last descriptor and mapping, however they end."""

import errno
import mmap
import os
import shutil
import tempfile
from pathlib import Path

from asyncrl.errors import AsyncRLError

FOLDER = Path("/dev/shm")
"""Memory on Linux; elsewhere the temporary folder, whose files the page cache holds as well."""


def folder() -> str:
    return str(FOLDER) if FOLDER.is_dir() else tempfile.gettempdir()


def reserve(size: int, *, error: type[AsyncRLError], advice: str) -> int:
    """A new descriptor of `size` bytes of zeros. Raises `error`, whose message ends with `advice`, when there is no room.

    The space is taken now: a mapping of a file with holes would end the process with SIGBUS at the first write that finds none.
    """
    place = folder()
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                os.ftruncate(file.fileno(), size)
        except OSError as cause:
            if cause.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
                raise
            free = shutil.disk_usage(place).free
            raise error(
                f"no room for {size / 2**20:.1f} MiB of shared memory in {place}: {free / 2**20:.1f} MiB are free; make it larger "
                f"(in a container: docker run --shm-size) {advice}"
            ) from cause
        return os.dup(file.fileno())


def mapped(fd: int, size: int) -> mmap.mmap:
    """The whole of it, to read and write. The descriptor may be closed afterwards."""
    return mmap.mmap(fd, size)
