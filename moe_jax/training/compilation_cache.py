"""Where compiled programs are kept between starts. No arrays.

Inputs: what the user asked for, and jax's platform. Outputs: jax's persistent compilation cache, switched on or off. On
GPUs it is on by default, in the user's own cache folder (jax loads its files, so no other user may write to it),
and with it XLA's cache of kernel timings: the same programs start again with the same kernels. On CPUs it is off: a
program that was compiled for another CPU's instructions may fail when it is loaded.

In a job of several processes jax lets process 0 alone write, and all read. On a file system that not all share the
others find nothing: the model's programs then still come from process 0 (`shared_program.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

import jax

from moe_jax.errors import UserError
from moe_jax.user_cache import user_cache_folder


def set_up_compilation_cache(folder: str | None, platform: str | None = None) -> str | None:
    """Switch jax's persistent compilation cache on or off, before anything is compiled.

    Args:
      folder: to keep programs in; '' for none; None for JAX_COMPILATION_CACHE_DIR where that is set, else the user's
        cache folder on GPUs, else none.
      platform: None asks jax.

    Returns:
      the folder in use, None without.

    Raises:
      UserError: the folder cannot be made, or the user's cache folder is a link or belongs to another user.
    """
    if folder == "":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if folder is None:
        if jax.config.jax_compilation_cache_dir:
            return jax.config.jax_compilation_cache_dir
        if (platform or jax.default_backend()) not in ("gpu", "cuda"):
            return None
        folder = str(user_cache_folder("compilation"))
    elif "://" not in folder:  # jax also takes gs://
        folder = os.path.abspath(os.path.expanduser(folder))
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--compilation_cache={folder} cannot be made ({error.strerror or error}); name another folder, or '' "
                "for none"
            ) from error
    jax.config.update("jax_compilation_cache_dir", folder)
    return folder
