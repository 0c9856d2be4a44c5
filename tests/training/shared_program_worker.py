"""One of two processes for test_shared_program.py: programs that process 0 compiles, in each way that can go."""

import hashlib
import json
import pickle
import time
import zlib

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.tiny_run import join_job

from moe_jax.errors import HostLostError, UserError
from moe_jax.training import compiling
from moe_jax.training.compiling import compile_for_all, shared_function

OPTIONS = {"xla_embed_ir_in_executable": "False"}  # any: without options each process compiles for itself


class Bomb:
    """What is pickled of it says so when it is unpickled."""

    def __reduce__(self):
        return print, ("a stranger's code ran",)


def program_key(lowered, turn: int = 0) -> str:
    return f"moe_jax/program/{hashlib.sha256(lowered.as_text().encode()).hexdigest()}/{turn}"


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)  # a program from it cannot be handed on, on CPUs
    _, hosts = join_job(devices=2)
    with hosts:
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        devices, split = list(mesh.devices.flat), NamedSharding(mesh, P("d"))
        x_D = jax.make_array_from_callback((4,), split, lambda part: np.arange(4.0, dtype=np.float32)[part])

        def step(factor):
            def body(x_d):
                return factor * jax.lax.psum(x_d, "d")

            return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P()))

        compiled = []

        def run(name, factor, seconds=0.0):
            lowered = step(factor).lower(x_D)

            def again(_lowered, _options, text):
                time.sleep(seconds)
                compiled.append(f"{name} by {text}")
                return lowered.compile()

            compiling.compile_guided = lambda *given: (again(*given[:2], name), "process 0's text")
            compiling.compile_with_profile = again
            print(name, float(compile_for_all(lowered, OPTIONS, None, devices)(x_D)[0]), flush=True)

        compile_guided = compiling.compile_guided
        run("handed out", 2.0)
        compiling.compile_guided = compile_guided
        shared = shared_function(step(3.0), OPTIONS, devices)
        print("function", float(shared(x_D)[0]), float(shared(x_D)[0]), flush=True)
        serialize = compiling.serialize_executable.serialize
        compiling.serialize_executable.serialize = lambda executable: 1 / 0
        run("each", 4.0)
        run("once more", 2.0, seconds=0.5)  # handed out before; now each compiles it, and nobody takes the old one
        compiling.serialize_executable.serialize = serialize
        print("compiled:", compiled, flush=True)
        compiling.compile_guided = compile_guided

        if hosts.is_main:
            held = distributed.global_state.client.key_value_dir_get_bytes("moe_jax/program/")
            print("held:", len({key.rsplit("/", 2)[0] for key, _ in held if key.endswith("/head")}), flush=True)

        # What a stranger would leave in the store: its own program, another one of process 0, one with a changed byte.
        store, compiling.WAIT_SECONDS = distributed.global_state.client, 60
        earlier = store.key_value_dir_get_bytes(program_key(step(2.0).lower(x_D), turn=1))
        for factor, attack in enumerate(("pickle", "another", "changed"), 7):
            lowered = step(float(factor)).lower(x_D)
            key, bomb = program_key(lowered), pickle.dumps(Bomb())
            if hosts.is_main and attack == "changed":
                compile_for_all(lowered, OPTIONS, None, devices)
            hosts.gather_text(attack, "")
            if hosts.is_main:
                continue
            if attack == "pickle":
                head = {"kind": "executable", "parts": [1, 1], "line": ""}
                for name, content in {"head": json.dumps(head).encode(), "0/0": b"", "1/0": bomb}.items():
                    content = content if name == "head" else zlib.compress(content)
                    store.key_value_set_bytes(f"{key}/{name}", content, allow_overwrite=True)
            elif attack == "another":
                for name, content in earlier:
                    store.key_value_set_bytes(f"{key}/{name.split('/', 4)[4]}", content, allow_overwrite=True)
            else:
                held = store.blocking_key_value_get_bytes(f"{key}/1/0", 5000)
                store.key_value_set_bytes(f"{key}/1/0", held[:-1] + bytes([held[-1] ^ 1]), allow_overwrite=True)
            try:
                compile_for_all(lowered, OPTIONS, None, devices)
                print("loaded what a stranger left:", attack, flush=True)
            except HostLostError as error:
                print("refused:", attack, str(error).split(",")[0], flush=True)

        def fails(*_):
            raise UserError("the mesh (3) does not fit\nmore")

        compiling.compile_guided = fails
        for kind in (UserError, HostLostError):
            lowered = step(5.0 if kind is UserError else 6.0).lower(x_D)
            compiling.WAIT_SECONDS = 60 if kind is UserError else 0.5
            try:
                if not hosts.is_main or kind is UserError:  # process 0 never comes to the other one
                    compile_for_all(lowered, OPTIONS, None, devices)
            except (UserError, HostLostError) as error:
                print("failed:", type(error).__name__, str(error).splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
