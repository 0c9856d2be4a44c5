"""`python -m moe_jax.generate`: continue prompts with the model of a run folder.

    python -m moe_jax.generate --workdir=runs/demo --prompt='def main(' --max_new_tokens=64 --host_devices=8

Each prompt and its text stream to the terminal; several follow one another, each when it has ended. With --out a JSON
file gets {"prompt_ids", "token_ids", "text", "stopped"}, a list of each with an entry per prompt. With --chat a prompt
is a question, put by the tokenizer's chat template; without any, each line of the standard input is one, and goes in
with the talk so far. The mesh is the run's own unless bindings say otherwise, such as
--gin_bindings='MeshConfig.model = 2'. Several processes are started as those of moe_jax.train. Exit codes: 0, 2 a
user's mistake, 4 a process of the job that was lost.
"""

from __future__ import annotations

import json
import pathlib
import sys

from absl import flags, logging

from moe_jax.config.command_line import define_job_flags, parse_flags, run_command
from moe_jax.errors import UserError
from moe_jax.storage.run_folder import write_atomically

_WORKDIR = flags.DEFINE_string("workdir", "", "Run folder whose newest checkpoint generates.")
_STEP = flags.DEFINE_integer("step", None, "Another checkpoint of it, by its step.")
_AVERAGED = flags.DEFINE_bool("averaged", False, "Take the moving average of its parameters.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue; may repeat.")
_CHAT = flags.DEFINE_bool("chat", False, "Prompts are questions; without one they are read line by line, as a talk.")
_PROMPT_IDS = flags.DEFINE_string("prompt_ids", "", "JSON file with a list of lists of token ids to continue.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "New tokens of each prompt at most.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Logits are divided by it; 0 takes the most probable token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Draw among the most probable tokens, so many; 0 = all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw among the most probable tokens that sum to this probability; 1 = all.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on past the end of a text.")
_OUT = flags.DEFINE_string("out", "", "JSON file for prompts and continuations.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Wins over the run's config; may repeat.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", None, "Run on the CPU, split into this many devices.")
_PLACE = define_job_flags()


def command(argv: list[str]) -> int:
    """Carry out the command line and return the exit code 0; errors are raised."""
    parse_flags(argv, "moe_jax.generate", "prompt")
    logging.set_verbosity(logging.WARNING)
    out, prompts, file = _OUT.value, _PROMPT.value, _PROMPT_IDS.value
    if not _WORKDIR.value:
        raise UserError("--workdir is needed: the folder of a run that has trained, such as --workdir=runs/demo")
    if bool(prompts) == bool(file) and (file or not _CHAT.value):
        raise UserError("give either --prompt (text, may repeat) or --prompt_ids (a JSON file of id lists)")
    if _CHAT.value and (file or out and not prompts):
        raise UserError("--chat takes no --prompt_ids, and --out only with --prompt; leave one of them out")
    if out and not pathlib.Path(out).absolute().parent.is_dir():
        raise UserError(f"--out={out} cannot be written: its folder does not exist; name a file in one that does")
    from moe_jax.inference import Sampling
    from moe_jax.jobs.start import start_hosts
    from moe_jax.parallel.mesh import set_up_devices

    # before a model is read
    sampling = Sampling(temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value, seed=_SEED.value)
    if file:
        try:
            prompts = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
            lists = isinstance(prompts, list) and all(isinstance(row, list) for row in prompts)
            if not lists or not all(type(value) is int for row in prompts for value in row):
                raise ValueError("it holds no list of lists of whole numbers")
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"--prompt_ids={file} cannot be read ({error}); give a JSON file such as [[5, 17], [8]]"
            ) from error
    set_up_devices(_HOST_DEVICES.value)
    with start_hosts(**{flag.name: flag.value for flag in _PLACE}) as hosts:
        generate(prompts, sampling, hosts)
    return 0


def generate(prompts, sampling, hosts) -> None:
    """Load the model that the flags name, print what becomes of the prompts, and write --out."""
    import jax

    from moe_jax.data.chat import ChatTemplate
    from moe_jax.inference import load
    from moe_jax.parallel.mesh import node_size
    from moe_jax.storage.checkpoint import run_config

    config, bindings = run_config(_WORKDIR.value, _GIN_BINDINGS.value), list(_GIN_BINDINGS.value)
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if not config.mesh.devices_per_node:
        bindings.append(f"MeshConfig.devices_per_node = {node_size(jax.devices(), hosts.machines)}")
    generator = load(_WORKDIR.value, step=_STEP.value, averaged=_AVERAGED.value, bindings=bindings)
    if not _CHAT.value:
        answer(generator, prompts, sampling, hosts.is_main)
        return
    if generator.tokenizer is None:
        raise UserError("--chat needs the tokenizer of the run, and its folder has none; put tokenizer.json back")
    template = ChatTemplate(generator.tokenizer)
    generator.end_ids = tuple(dict.fromkeys((*generator.end_ids, *template.end_ids())))
    if prompts:
        chats = [template.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        answer(generator, chats, sampling, hosts.is_main)
        return
    if hosts.process_count > 1:
        raise UserError("only one process can read a talk from its input; give questions with --prompt")
    messages, asks = [], "> " if sys.stdin.isatty() else ""
    print(asks, end="", flush=True)
    for line in sys.stdin:
        if question := line.strip():
            messages.append({"role": "user", "content": question})
            found = answer(generator, [template.prompt(messages)], sampling, True)
            messages.append({"role": "assistant", "content": found.text[0]})
        print(asks, end="", flush=True)


def answer(generator, prompts, sampling, is_main: bool):
    """Print what becomes of the prompts where `is_main`, write --out, and return it."""
    ends = () if _IGNORE_EOS.value else generator.end_ids
    before = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
    printed = ""

    def on_token(index: int, prompt: list[int], said: list[int]) -> None:
        nonlocal printed
        if index:  # the first prompt's text appears while it comes
            return
        if len(said) == 1:
            print(before[0], end="")
        text = " ".join(map(str, said)) if generator.tokenizer is None else generator.text_of(said, prompt, ends)
        stable = text.rstrip("\ufffd")  # bytes of a character that is not whole yet
        if stable.startswith(printed):
            print(stable[len(printed) :], end="", flush=True)
            printed = stable

    shown = on_token if is_main else None
    found = generator.generate(prompts, _MAX_NEW_TOKENS.value, sampling, ignore_eos=_IGNORE_EOS.value, on_token=shown)
    if not is_main:
        return found
    first, *others = found.text or [" ".join(map(str, ids)) for ids in found.token_ids]
    rest = first[len(printed) :] if first.startswith(printed) else ""
    print("\n---\n".join([rest, *(a + b for a, b in zip(before[1:], others, strict=True))]), flush=True)
    for index, why in enumerate(found.stopped):
        if why == "max_length":
            print(f"prompt {index} ends at the model's length, {generator.longest} tokens", file=sys.stderr)
    if _OUT.value:
        record = {name: getattr(found, name) for name in ("prompt_ids", "token_ids", "text", "stopped")}
        write_atomically(_OUT.value, json.dumps(record))
    return found


if __name__ == "__main__":
    run_command(command)
