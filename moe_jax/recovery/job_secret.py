"""The secret of a job of several processes, and messages that prove that their sender holds it. No arrays, no jax.

Inputs: the environment, or a file that it names. Outputs: a key of 32 bytes; sealed messages, and their contents.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping

from moe_jax.errors import UserError

VARIABLE, FILE_VARIABLE = "MOE_JAX_JOB_TOKEN", "MOE_JAX_JOB_TOKEN_FILE"
_SHORTEST = 16  # characters; a secret that is guessed is none
_LONGEST = 4096
_READABLE_BY_OTHERS = stat.S_IROTH | stat.S_IWOTH
_HOW = "scripts/launch makes one; by hand, openssl rand -hex 32, the same for all processes"


def read_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key of this job, 32 bytes, equal on all its processes.

    Raises:
      UserError: neither MOE_JAX_JOB_TOKEN nor MOE_JAX_JOB_TOKEN_FILE is set, the file cannot be read or others may read
        it, or the secret is too short.
    """
    secret, path, where = environment.get(VARIABLE, "").strip(), environment.get(FILE_VARIABLE), VARIABLE
    if not secret and not path:
        raise UserError(
            f"a job of several processes needs a secret, in {VARIABLE} or in a file that {FILE_VARIABLE} names ({_HOW})"
        )
    if not secret:
        where = f"{FILE_VARIABLE} ({path!r})"
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as file:
                mode = os.fstat(file.fileno()).st_mode
                secret = file.read(_LONGEST).strip() if stat.S_ISREG(mode) else None
        except (OSError, ValueError) as error:
            raise UserError(f"{where} cannot be read ({getattr(error, 'strerror', None) or error}); {_HOW}") from None
        if secret is None or mode & _READABLE_BY_OTHERS:
            raise UserError(f"{where} must be a file that other users cannot read; chmod 600 it, and change the secret")
    if len(secret) < _SHORTEST:
        raise UserError(f"{where} holds {len(secret)} characters and must have at least {_SHORTEST} ({_HOW})")
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def derive_key(key: bytes, purpose: str) -> bytes:
    """Return a key of its own for a purpose, 32 bytes."""
    return hmac.digest(key, purpose.encode(), "sha256")


def seal(key: bytes, kind: str, challenge: str, content: dict) -> dict:
    """Return a message that proves to who knows `challenge` that its sender holds the key, and meant this content."""
    text = json.dumps(content)
    return {"kind": kind, "content": text, "proof": _proof(key, kind, challenge, text)}


def unseal(key: bytes, challenge: str, message: dict) -> dict | None:
    """Return the content of a message, None if it does not prove the key or is not as `seal` makes them."""
    kind, text, proof = (message.get(name) for name in ("kind", "content", "proof"))
    if not (isinstance(kind, str) and isinstance(text, str) and isinstance(proof, str) and proof.isascii()):
        return None
    if not hmac.compare_digest(proof, _proof(key, kind, challenge, text)):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # sealed, and no JSON: not by this program
        return None
    return content if isinstance(content, dict) else None


def _proof(key: bytes, kind: str, challenge: str, text: str) -> str:
    said = "\0".join((kind, challenge, text))
    return hmac.new(key, said.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
