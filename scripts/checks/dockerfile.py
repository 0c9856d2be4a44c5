"""Carry out a Dockerfile without Docker: its RUN lines in a tree of plain Debian, by chroot, and then one command.

    sudo python scripts/checks/dockerfile.py --tree=/tmp/image [--extras=all] [--bind=/opt/wheels ...]

Needs root and debootstrap. Understands what scripts/launch/Dockerfile uses: FROM, ARG, ENV, WORKDIR, COPY . ., RUN,
ENTRYPOINT. Ends with `moe-jax train --dry_run` on the demo, whose exit code it returns. Paths of --bind, of mirrors or
certificates, are seen in the tree, read-only; variables PIP_..., SSL_... and REQUESTS_... are handed on.
"""

import argparse
import os
import shlex
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANDED_ON = ("PIP_", "SSL_", "REQUESTS_")  # variables of mirrors and their certificates
DRY_RUN = "train --dry_run --gin_file=configs/run/demo.gin --host_devices=8"


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return (keyword, rest) of each instruction, with continued lines joined."""
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#"))
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in whole.splitlines() if line.strip()]


def main() -> int:
    """Build the tree and run the command in it."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--tree", type=Path, required=True)
    flags.add_argument("--extras", default="all")
    flags.add_argument("--bind", action="append", default=[])
    given = flags.parse_args()
    variables = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
    folder, entry, mounted = "/", "", []

    def run(line: str) -> int:
        script = f"cd {shlex.quote(folder)} && {line}"
        command = ["chroot", given.tree, "/usr/bin/env", "-i", *(f"{k}={v}" for k, v in variables.items())]
        return subprocess.run([*command, "/bin/sh", "-c", script], check=False).returncode

    try:
        for keyword, rest in instructions(ROOT / "scripts" / "launch" / "Dockerfile"):
            print(f"{keyword} {rest}", flush=True)
            if keyword == "FROM":
                suite = rest.partition(":")[2].removesuffix("-slim")
                if not (given.tree / "bin").exists():
                    subprocess.run(["debootstrap", "--variant=minbase", suite, given.tree], check=True)
                for path in ("/proc", "/dev", *given.bind):
                    target = given.tree / path.lstrip("/")
                    target.mkdir(parents=True, exist_ok=True)
                    subprocess.run(["mount", "--bind", path, target], check=True)
                    mounted.append(target)
                    if path in given.bind:  # packages of the tree must not write to this machine
                        subprocess.run(["mount", "-o", "remount,ro,bind", target], check=True)
            elif keyword == "ARG":
                name, _, value = rest.partition("=")
                variables[name] = given.extras if name == "EXTRAS" else value
            elif keyword == "ENV":
                variables |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            elif keyword == "WORKDIR":
                folder = rest
                (given.tree / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif keyword == "COPY":
                files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
                for name in files.decode().split("\0")[:-1]:
                    target = given.tree / folder.lstrip("/") / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(ROOT / name, target)
            elif keyword == "RUN":
                if code := run(rest):
                    return code
            elif keyword == "ENTRYPOINT":
                entry = " ".join(shlex.quote(word.strip(' "')) for word in rest.strip("[]").split(","))
        folder = "/"  # installed, it needs no checkout
        return run(f"{entry} {DRY_RUN}")
    finally:
        for target in reversed(mounted):
            subprocess.run(["umount", target], check=False)


if __name__ == "__main__":
    raise SystemExit(main())
