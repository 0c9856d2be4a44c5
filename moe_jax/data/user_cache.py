"""Folders of this user's cache: no other user can have put anything into them. Host only; no jax.

Inputs: the name of a folder, such as 'profiles'. Outputs: `$XDG_CACHE_HOME/moe_jax/<name>` or else
`~/.cache/moe_jax/<name>`, made if it is missing, and files in it that are written whole or not at all. What lies there
is handed to a compiler or decides which kernel runs, so a link or a folder of another user is refused, not followed.
Everything in it may be deleted at any time. Where no home folder can be written, a folder of the temporary directory
takes its place.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

from moe_jax.errors import UserError

_LOG = logging.getLogger(__name__)
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
    root = cache_root()
    if root is not None:
        try:
            return _own_folder(root, name)
        except OSError as error:
            _say_elsewhere(str(root), str(error.strerror or error), str(temporary))
    try:
        return _own_folder(temporary, name)
    except OSError as error:
        raise UserError(
            f"no folder for {name!r}: {str(temporary)!r} cannot be made ({error.strerror or error}); set "
            "XDG_CACHE_HOME to a folder of yours"
        ) from error


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
        held = os.fstat(descriptor)
        if not stat.S_ISREG(held.st_mode) or held.st_uid != os.geteuid():
            return None
        return file.read()


def _own_folder(root: Path, name: str) -> Path:
    """Return root / name, both folders of this user.

    Raises:
      UserError: another thing stands there.
      OSError: they cannot be made.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    for folder in (root, root / name):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        held = folder.lstat()
        _check_owned(folder, held)
        if not held.st_mode & _WRITABLE_BY_OTHERS:
            continue
        if folder != root:
            raise UserError(
                f"{str(folder)!r} may be written to by other users (mode {stat.S_IMODE(held.st_mode):o}), who could "
                "have put anything there; delete it, and it is made again"
            )
        folder.chmod(stat.S_IMODE(held.st_mode) & ~_WRITABLE_BY_OTHERS)  # made with a umask such as 002
    return root / name


def _check_owned(folder: Path, held: os.stat_result) -> None:
    remedy = "remove it, or set XDG_CACHE_HOME to a folder of yours"
    if stat.S_ISLNK(held.st_mode):
        raise UserError(f"{str(folder)!r} is a link to {os.readlink(folder)!r}, which is not followed; {remedy}")
    if not stat.S_ISDIR(held.st_mode):
        raise UserError(f"{str(folder)!r} is not a folder; {remedy}")
    if held.st_uid != os.geteuid():
        raise UserError(f"{str(folder)!r} belongs to user {held.st_uid}, not to {os.geteuid()}; {remedy}")


@functools.cache
def _say_elsewhere(root: str, why: str, instead: str) -> None:
    _LOG.warning("the cache folder %r cannot be written (%s); %r is used instead", root, why, instead)
