"""Files that hold either their old content or the new one, never a part of it.

Inputs: a path and the bytes or text it shall hold. Outputs: that file. A full disk, a read-only folder and the like
come out as one `UserError` line; the file then still holds its old content.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from moe_jax.errors import UserError

TEMPORARY_SUFFIX = ".tmp"

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG_KIND = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}


@contextmanager
def disk_errors_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` raised while `path` is written into one line that names the file, the cause and a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            remedy = "free space on its disk, then give the same command again"
        elif error.errno in _NOT_ALLOWED:
            remedy = "choose a --workdir that you may write to"
        elif error.errno in _WRONG_KIND:
            remedy = "a file stands where a folder is needed, or the reverse: move it away or choose another --workdir"
        else:
            remedy = "check its disk or choose another --workdir"
        raise UserError(f"cannot write {os.fspath(path)} ({error.strerror or error}); {remedy}") from error


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a file to write; it takes the place of `path` only when the block ends without an error.

    The temporary file has one fixed name beside `path`, so a kill leaves at most one, which the next write reuses:
    each path has a single writer (process 0).
    """
    target = Path(path)
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    with disk_errors_named(target):
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            # Frees space on a full disk; a temporary file that cannot be removed must not hide the first error.
            try:
                temporary.unlink(missing_ok=True)
            except OSError:
                pass
            raise


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Replace the content of `path` in one move. Text is written as UTF-8."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with atomic_file(path) as file:
        file.write(data)
    return Path(path)
