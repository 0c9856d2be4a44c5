"""Two real processes whose programs process 0 compiles: handed out, not to be handed out, failed, never done."""

import re
import sys
import types
from pathlib import Path

from support.tiny_run import finish_pair, start_pair

from moe_jax.training.program import Session

REFUSED = "what lies in jax's key-value store as process 0's program is not by process 0 of this job"


def test_one_process_compiles_for_two():
    worker = Path(__file__).with_name("shared_program_worker.py")
    done = finish_pair(start_pair([sys.executable, str(worker), ""]))
    gloo = re.compile(r"\[Gloo\]|.* peer ranks")  # its threads break each other's lines
    said = [[line for line in out.splitlines() if line and not gloo.match(line)] for _, out, _ in done]
    assert [code for code, *_ in done] == [0, 0], done
    ran = ["handed out 12.0", "function 18.0 18.0", "each 24.0", "once more 12.0"]  # 2, 3, 4, 2 times 0 + 1 + 2 + 3
    assert said[0] == [
        *ran,
        "compiled: ['handed out by handed out', 'each by each', 'once more by once more']",
        "held: 1",  # all that both have read are deleted
        "failed: UserError the mesh (3) does not fit",
    ]
    assert said[1] == [
        *ran,
        'compiled: ["each by process 0\'s text", "once more by process 0\'s text"]',
        *(f"refused: {attack} {REFUSED}" for attack in ("pickle", "another", "changed")),
        "failed: UserError process 0 could not compile this program: the mesh (3) does not fit",
        "failed: HostLostError process 0 did not hand out its compiled program within 0.5 s; see its log",
    ]
    assert "cannot be handed to the other processes (ZeroDivisionError: division by zero)" in done[0][2]


def test_what_a_session_shares_is_compiled_with_its_options(monkeypatch):
    """Options, as GPUs have them, say that a program is shared."""
    monkeypatch.setattr("moe_jax.training.program.shared_function", lambda *given: given)
    session = types.SimpleNamespace(compiler_options=lambda: {"xla_a": "1"}, devices=["gpu"])
    assert Session.shared(session, len) == (len, {"xla_a": "1"}, ["gpu"])
