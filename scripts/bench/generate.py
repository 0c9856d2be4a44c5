"""Time generation: tokens a second, and how long the first and every further token takes, at several batches.

What it says: what a user waits for. A prompt's first token waits for the whole prompt (prefill), every further one for
a pass over the weights that its batch activates; so per-token time grows slowly with the batch and tokens a second grow
with it, until the cores are full. Parameters are fresh ones, or those of --workdir; rounds are interleaved over the
batches, and programs are compiled before the clock starts. Ends in one JSON line. Run it as

    python scripts/bench/generate.py --gin_file=configs/run/demo.gin --host_devices=1

With --modelled it prints instead what one all-to-all of each kind takes on a described cluster, from 8 to 256 devices;
with --held_out_windows the loss of --workdir on its held-out text with the experts as trained and as int8. Beside
transformers it is timed by generate_transformers.py.
"""

from __future__ import annotations

import dataclasses
import json

from absl import app, flags

_GIN_FILES = flags.DEFINE_multi_string("gin_file", ["configs/run/demo.gin"], "Config file.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding.")
_WORKDIR = flags.DEFINE_string("workdir", "", "Run folder to take config and parameters of.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 1, "Devices that the CPU is split into.")
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "Prompts generated together.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Tokens of a prompt.")
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "Tokens that follow each.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds.")
_MODELLED = flags.DEFINE_string("modelled", "", "Cluster file, such as configs/cluster/h200.gin.")
_LATENCIES = flags.DEFINE_list(
    "latencies", [], "With --modelled: assumed seconds of a start in a node and across, then of a step in each."
)
_HELD_OUT = flags.DEFINE_integer("held_out_windows", 0, "Windows of held-out text; 0 = times are measured.")
_QUANTIZE = flags.DEFINE_string("quantize", "none", "Experts' weights: 'none' or 'int8'.")


def fresh_generator(devices):
    """Return a generator of the config with fresh parameters."""
    import jax

    from moe_jax.config import parse_run_config
    from moe_jax.data import build_tokenizer
    from moe_jax.inference import Generator
    from moe_jax.inference.load import build_model

    config = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value)[0]
    tokenizer = build_tokenizer(config.data)
    model = build_model(config, devices, tokenizer)
    shardings = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(model.roles.mesh, spec),
        model.layout().params,
        is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec),
    )
    params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
    return Generator(model, params, tokenizer=tokenizer, vocabulary=tokenizer.vocab_size, quantize=_QUANTIZE.value)


def measure(generator, batches, rounds):
    """Return {batch: (seconds of first tokens, of further ones, tokens a second)}, a list of each over the rounds."""
    import numpy as np

    from moe_jax.inference import Sampling

    rng = np.random.default_rng(0)
    prompts = rng.integers(0, generator.vocabulary, (max(batches), _PROMPT_TOKENS.value)).tolist()
    found = {batch: ([], [], []) for batch in batches}
    for index in range(rounds + 1):
        for batch in batches:
            made = generator.generate(prompts[:batch], _NEW_TOKENS.value, Sampling(temperature=0), ignore_eos=True)
            if index:  # the first round compiles
                first, further, rate = found[batch]
                first.append(made.seconds[0])
                further.extend(np.diff(made.seconds))
                rate.append(batch * len(made.seconds) / made.seconds[-1])
    return found


def print_measured():
    import jax
    import numpy as np

    from moe_jax.inference import load
    from moe_jax.parallel.host_devices import set_up_devices

    set_up_devices(_HOST_DEVICES.value)
    if _WORKDIR.value:
        generator = load(_WORKDIR.value, bindings=_GIN_BINDINGS.value, quantize=_QUANTIZE.value)
    else:
        generator = fresh_generator(jax.devices())
    batches = [int(text) for text in _BATCHES.value]
    print(f"{_PROMPT_TOKENS.value} tokens a prompt, {_NEW_TOKENS.value} new ones, {_HOST_DEVICES.value} device(s)\n")
    print("| batch | tokens/s | first token, ms: median, 90%, 99% | further token, ms: median, 90%, 99% |")
    print("|---|---|---|---|")
    record = []
    for batch, (first, further, rate) in measure(generator, batches, _ROUNDS.value).items():
        parts = [np.percentile(np.asarray(seconds) * 1e3, (50, 90, 99)) for seconds in (first, further)]
        shown = (", ".join(f"{value:.2f}" for value in part) for part in parts)
        tokens = float(np.median(rate))
        print(f"| {batch} | {tokens:.0f} | {' | '.join(shown)} |")
        record.append({"batch": batch, "tokens_per_second": tokens, "first_ms": parts[0].tolist(),
                       "further_ms": parts[1].tolist()})  # fmt: skip
    print(f"\n{json.dumps(record)}")


def print_modelled():
    """Print seconds of one exchange of decode's rows: batch 1 for each device, M = 2048, K = 2, bfloat16."""
    from moe_jax.cluster import read_cluster
    from moe_jax.cluster.collectives import ALL_TO_ALLS as KINDS
    from moe_jax.cluster.collectives import all_to_all_seconds

    cluster = read_cluster(_MODELLED.value)
    if _LATENCIES.value:
        fields = ("intra_latency", "inter_latency", "intra_step", "inter_step")
        cluster = dataclasses.replace(cluster, **dict(zip(fields, map(float, _LATENCIES.value), strict=True)))
    rows, row = 2, 2048 * 2
    print(f"us of one exchange, {rows} rows of {row} bytes from each device, on {cluster.name}\n")
    print("| devices | tensor slicing | " + " | ".join(KINDS) + " |")
    print("|---|---|---|---|---|")
    for devices in (8, 16, 32, 64, 128, 256):
        for slicing in (1, min(8, cluster.need("devices_per_node", "the table"))):
            sized = dataclasses.replace(cluster, nodes=max(1, devices // cluster.need("devices_per_node", "the table")))
            seconds = all_to_all_seconds(sized, devices, slicing, slicing, float(rows * row * slicing))
            shown = " | ".join(f"{seconds[kind] * 1e6:.1f}" for kind in KINDS)
            print(f"| {devices} | {slicing} | {shown} |")


def print_losses():
    """Print the held-out loss and the bytes of the experts, as trained and as int8."""
    import jax

    from moe_jax.data import build_cache, held_out_batches
    from moe_jax.data.stream import cut_documents
    from moe_jax.inference import load
    from moe_jax.inference.load import run_config
    from moe_jax.parallel.host_devices import set_up_devices

    set_up_devices(_HOST_DEVICES.value)
    data = run_config(_WORKDIR.value, _GIN_BINDINGS.value).data
    record = {}
    for quantize in ("none", "int8"):
        generator = load(_WORKDIR.value, bindings=_GIN_BINDINGS.value, quantize=quantize)
        cache = build_cache(data, generator.tokenizer, vocab_size=generator.model.vocab_size)
        total = targets = 0
        for tokens, weights in held_out_batches(
            cache, sequence_length=data.sequence_length, batch_size=32, limit=_HELD_OUT.value
        ):
            rows = [
                row[: int(real.sum()) + 1].tolist() for row, real in zip(tokens, weights, strict=True) if real.any()
            ]
            if generator.model.config.document_mask:  # what is scored is one document
                whole = [part for row in rows for part in cut_documents(row, generator.tokenizer.end_id)]
                rows = [part for part in whole if len(part) > 1]
            number = sum(map(len, rows)) - len(rows)
            total, targets = total + number * generator.loss(rows), targets + number
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(generator.params["bank"]))
        record[quantize] = {"loss": total / targets, "bytes": held}
        print(f"{quantize}: loss {record[quantize]['loss']:.5f} of {targets} tokens, experts {held:,} bytes")
    ratio = {key: record["int8"][key] / record["none"][key] for key in ("loss", "bytes")}
    print(f"int8 over none: loss {ratio['loss']:.5f}, bytes {ratio['bytes']:.4f}\n{json.dumps(record)}")


def main(_):
    if _MODELLED.value:
        print_modelled()
    elif _HELD_OUT.value:
        print_losses()
    else:
        print_measured()


if __name__ == "__main__":
    app.run(main)
