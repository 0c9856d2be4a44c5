"""The secret that the processes of one job share: how it is proved, and where it comes from.

Inputs: a token (bytes) on each side of a connection. Outputs: messages whose sender can be checked. The token itself is
never sent: each side sends a random challenge, and seals its message with an HMAC of the token over the other's
challenge, so that a recorded message is not accepted on another connection. This authenticates the sender only: nothing
is encrypted, and after the rendezvous the connection is trusted.

A token that was given is a secret. Without one, the launcher's job id and the coordinator's address take its place:
they keep other jobs, port scanners and health checks out, but not an attacker who knows both.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping

TOKEN_VARIABLE = "MOE_JAX_JOB_TOKEN"
# launcher -> variables that all processes of one job share; the first that is set counts
_JOB_IDS = {
    "Slurm": ("SLURM_JOB_ID",),
    "Open MPI": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
}


def derive_token(given: str | None, coordinator: str, launcher: str | None, environment: Mapping[str, str]) -> bytes:
    """Return the token of a job, 32 bytes; equal on all its processes.

    Args:
      given: the secret from a flag; else the environment's MOE_JAX_JOB_TOKEN, if that is set.
      coordinator: host:port, the same text on all processes.
      launcher: that gave this process its index, None if flags did.
    """
    secret = given or environment.get(TOKEN_VARIABLE)
    if secret:
        parts = ["given", secret]
    else:
        names = _JOB_IDS.get(launcher or "", ())
        job = next((environment[name] for name in names if environment.get(name)), "")
        parts = ["derived", coordinator, job]
    return hashlib.sha256("\0".join(parts).encode()).digest()


def new_challenge() -> str:
    """Return a text that was never used before."""
    return secrets.token_hex(16)


def seal(token: bytes, kind: str, challenge: str, content: dict) -> dict:
    """Return a message that proves to the sender of `challenge` that its own sender holds the token."""
    text = json.dumps(content)
    return {"kind": kind, "content": text, "proof": _proof(token, kind, challenge, text)}


def unseal(token: bytes, challenge: str, message: dict) -> dict | None:
    """Return the content of a message, None if it does not prove the token or is not as `seal` makes them."""
    kind, text, proof = (message.get(name) for name in ("kind", "content", "proof"))
    if not (isinstance(kind, str) and isinstance(text, str) and isinstance(proof, str) and proof.isascii()):
        return None
    if not hmac.compare_digest(proof, _proof(token, kind, challenge, text)):
        return None
    content = json.loads(text)
    return content if isinstance(content, dict) else None


def _proof(token: bytes, kind: str, challenge: str, text: str) -> str:
    said = "\0".join((kind, challenge, text))
    return hmac.new(token, said.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
