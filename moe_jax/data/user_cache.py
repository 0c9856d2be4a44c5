"""Folders of this user's cache: no other user can have put anything into them."""

# What lies there is handed to a compiler, so a link or a folder of another user is refused, not followed. Everything in
# it may be deleted at any time.

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import uuid
from pathlib import Path

from moe_jax.errors import UserError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_root() -> Path | None:
    """Return `$XDG_CACHE_HOME/moe_jax` or `~/.cache/moe_jax`, None for a user without a home folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if root.startswith("~") else Path(root) / "moe_jax"


def user_cache_folder(name: str) -> Path:
    """Return the folder `name` of this user's cache; it exists, is no link, and only this user can write to it.

    The folder that holds it (`moe_jax`) loses its write permission for others, if it had one. Where it cannot be made,
    one of the temporary directory takes its place.

    Raises:
      UserError: something else stands there (a link, a file, a folder of another user, or one that others may write
        to), or neither can be made.
    """
    temporary = Path(tempfile.gettempdir()) / f"moe_jax_{os.geteuid()}"
    remedy = "set XDG_CACHE_HOME to a folder of yours"
    for root in filter(None, (cache_root(), temporary)):
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (root, root / name):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                status = folder.lstat()
                mode, writable = stat.S_IMODE(status.st_mode), status.st_mode & _WRITABLE_BY_OTHERS
                if not stat.S_ISDIR(status.st_mode):
                    raise UserError(f"{str(folder)!r} is a link or a file and is not followed; remove it, or {remedy}")
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
            why = error.strerror or error
    raise UserError(f"no folder for {name!r}: {str(temporary)!r} cannot be made ({why}); {remedy}")


def write_cached(path: Path, content: str) -> None:
    """Write a file of a folder that `user_cache_folder` returned: others see the old content or the new one.

    A link at `path` is replaced, never written through.

    Raises:
      UserError: the disk is full or broken.
    """
    temporary = path.with_name(f".writing-{uuid.uuid4().hex}")  # several processes may write the same file
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"{str(path)!r} cannot be written ({error.strerror or error}); free space there, or set XDG_CACHE_HOME to "
            "another folder of yours"
        ) from error
