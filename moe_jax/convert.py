"""Turn a checkpoint of Hugging Face transformers into a run folder, or a run into such a checkpoint.

    python -m moe_jax.convert --from_hf=DIR --workdir=RUN
    python -m moe_jax.convert --to_hf=DIR --workdir=RUN
    python -m moe_jax.convert --to_peft=DIR --workdir=RUN
    python -m moe_jax.convert --from_hf=DENSE --workdir=RUN --upcycle=8

With --to_hf the adapters of a LoRA run are added to the model under them; --to_peft writes them alone. DIR holds
config.json and safetensors files, in one piece or sharded, of Mixtral, OLMoE, Qwen3-MoE, DeepSeek-MoE, V2 or
V3, Moonlight, Kimi K2 or dots1; tokenizer.json and generation_config.json are carried along. The folder that is written
must not be there yet. No torch is needed, and no more memory than for the largest tensor and one file. A user's mistake
is one line, exit code 2.
With --upcycle a dense checkpoint (Llama, Mistral, Qwen3) becomes a mixture of experts. See docs/huggingface.md.
"""

from __future__ import annotations

from absl import flags, logging

from moe_jax.config.command_line import parse_flags, run_command
from moe_jax.errors import UserError

_FROM_HF = flags.DEFINE_string("from_hf", "", "Folder of a checkpoint of transformers, from which --workdir is made.")
_TO_HF = flags.DEFINE_string("to_hf", "", "Folder to be made from the last checkpoint of --workdir.")
_TO_PEFT = flags.DEFINE_string("to_peft", "", "Folder to be made for peft from the adapters of --workdir.")
_WORKDIR = flags.DEFINE_string("workdir", "", "Run folder, made with --from_hf and read with the others.")
_DTYPE = flags.DEFINE_string("dtype", "", "With --to_hf: float32, bfloat16 or float16; '' takes ModelConfig.dtype.")
_ALLOW_NONFINITE = flags.DEFINE_bool("allow_nonfinite", False, "Convert tensors that hold NaN or infinity too.")
_UPCYCLE = flags.DEFINE_integer("upcycle", 0, "With --from_hf of a dense checkpoint: experts that each FFN becomes.")
_UPCYCLE_TOP_K = flags.DEFINE_integer("upcycle_top_k", 2, "Experts of a token then.")
_UPCYCLE_NOISE = flags.DEFINE_float("upcycle_noise", 0.0, "Noise on each copy, over the spread of its matrix.")
_UPCYCLE_SEED = flags.DEFINE_integer("upcycle_seed", 0, "Of the fresh routers and the noise.")


def command(argv: list[str]) -> None:
    """Carry out the command line."""
    parse_flags(argv, "moe_jax.convert", "from_hf")
    logging.set_verbosity(logging.WARNING)  # orbax says much at INFO
    target = _TO_HF.value or _TO_PEFT.value
    if sum(map(bool, (_FROM_HF.value, _TO_HF.value, _TO_PEFT.value))) != 1:
        raise UserError("give one of --from_hf=DIR and --to_hf=DIR, a checkpoint of transformers, and --to_peft=DIR")
    if not _WORKDIR.value:
        raise UserError("--workdir is needed: the run folder, such as --workdir=runs/mixtral")
    import jax

    jax.config.update("jax_platforms", "cpu")  # files to files: no GPU is taken
    from moe_jax.inference.conversion import Upcycling, export_folder, import_folder
    from moe_jax.models.counts import parameter_counts

    for flag, fits, needed in (
        (_DTYPE, bool(_TO_HF.value), "--to_hf: a run folder and adapters hold parameters as they were trained"),
        (_UPCYCLE, bool(_FROM_HF.value), "--from_hf, a dense checkpoint"),
        *((flag, _UPCYCLE.value, "--upcycle") for flag in (_UPCYCLE_TOP_K, _UPCYCLE_NOISE, _UPCYCLE_SEED)),
    ):
        if flag.present and not fits:
            raise UserError(f"--{flag.name}={flag.value} needs {needed}")
    if target:
        adapter, nonfinite = bool(_TO_PEFT.value), _ALLOW_NONFINITE.value
        family = export_folder(_WORKDIR.value, target, _DTYPE.value, adapter=adapter, allow_nonfinite=nonfinite)
        print(f"{target}: {family.architecture}")
        return
    upcycling = None
    if _UPCYCLE.value:
        upcycling = Upcycling(
            experts=_UPCYCLE.value, top_k=_UPCYCLE_TOP_K.value, noise=_UPCYCLE_NOISE.value, seed=_UPCYCLE_SEED.value
        )
    run = import_folder(_FROM_HF.value, _WORKDIR.value, upcycling, _ALLOW_NONFINITE.value)
    count, *_ = parameter_counts(run.model, run.moe, run.model.vocab_size)
    print(f"{_WORKDIR.value}: {count:,} parameters, step 0")
    print(
        f"train on: python -m moe_jax.train --gin_file={_WORKDIR.value}/config.gin --init_from={_WORKDIR.value} "
        "--gin_bindings='DataConfig.path = \"my_texts\"' --workdir=..."
    )


if __name__ == "__main__":
    run_command(command)
