"""Folders of this user's cache: no other user can have put anything into them."""

# What lies there is handed to a compiler or decides which kernel runs, so a link or a folder of another user is
# refused, not followed. Everything in it may be deleted at any time. Where no home folder can be written, a folder of
# the temporary directory takes its place.

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path

from moe_jax.errors import UserError

_LOG = logging.getLogger(__name__)
_said: set[Path] = set()  # cache folders that were logged as not to be written
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_root() -> Path | None:
    """Return `$XDG_CACHE_HOME/moe_jax` or `~/.cache/moe_jax`, None for a user without a home folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if root.startswith("~") else Path(root) / "moe_jax"


def user_cache_folder(name: str) -> Path:
    """Return the folder `name` of this user's cache; it exists, is no link, and only this user can write to it.

    The folder that holds it (`moe_jax`) loses its write permission for others, if it had one.

    Raises:
      UserError: something else stands there (a link, a file, a folder of another user, or one that others may write
        to), or neither the cache nor the temporary directory can be written.
    """
    temporary = Path(tempfile.gettempdir()) / f"moe_jax_{os.geteuid()}"
    for root in filter(None, (cache_root(), temporary)):
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (root, root / name):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                status, remedy = folder.lstat(), "remove it, or set XDG_CACHE_HOME to a folder of yours"
                mode, writable = stat.S_IMODE(status.st_mode), status.st_mode & _WRITABLE_BY_OTHERS
                if stat.S_ISLNK(status.st_mode):
                    target = os.readlink(folder)
                    raise UserError(f"{str(folder)!r} is a link to {target!r}, which is not followed; {remedy}")
                if not stat.S_ISDIR(status.st_mode):
                    raise UserError(f"{str(folder)!r} is not a folder; {remedy}")
                if status.st_uid != os.geteuid():
                    raise UserError(f"{str(folder)!r} belongs to user {status.st_uid}, not to {os.geteuid()}; {remedy}")
                if writable and folder != root:
                    raise UserError(
                        f"{str(folder)!r} may be written to by other users (mode {mode:o}), who could have put "
                        "anything there; delete it, and it is made again"
                    )
                if writable:  # made with a umask such as 002
                    folder.chmod(mode & ~_WRITABLE_BY_OTHERS)
            return root / name
        except OSError as error:
            why = str(error.strerror or error)
            if root != temporary and root not in _said:
                _said.add(root)
                _LOG.warning(
                    "the cache folder %r cannot be written (%s); %r is used instead", str(root), why, str(temporary)
                )
    raise UserError(
        f"no folder for {name!r}: {str(temporary)!r} cannot be made ({why}); set XDG_CACHE_HOME to a folder of yours"
    )


def write_cached(path: Path, content: str | bytes) -> None:
    """Write a file of a folder that `user_cache_folder` returned: others see the old content or the new one.

    A link at `path` is replaced, never written through.

    Raises:
      UserError: the disk is full or broken.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)  # O_EXCL, O_NOFOLLOW, 0600
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise UserError(
            f"{str(path)!r} cannot be written ({error.strerror or error}); free space there, or set XDG_CACHE_HOME to "
            "another folder of yours"
        ) from error


def read_cached(path: Path) -> bytes | None:
    """Return the content of a file of such a folder; None where it is missing, a link, or another user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not make it wait
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        return file.read()
