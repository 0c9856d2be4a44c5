"""The dry run: what it prints for every named size, and that it needs no device."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_jax.analysis.dry_run import dry_run
from moe_jax.config.gin_files import parse_run_config
from moe_jax.config.run_config import bound_in
from moe_jax.errors import UserError

ROOT = Path(__file__).parent.parent.parent
MODELS = sorted(path.stem for path in (ROOT / "configs" / "model").glob("*.gin"))
RUNS = sorted(path.stem for path in (ROOT / "configs" / "run").glob("*.gin"))

# layers, M, F, experts and dense FFNs of all layers, and the count that the paper prints ('' where it prints none)
PAPERS = {
    "hecate_gpt_moe_s": (12, 768, 1536, 12 * 64, "1.84 B"),
    "hecate_gpt_moe_l": (12, 1536, 3072, 12 * 64, "7.36 B"),
    "hecate_bert_moe": (12, 1024, 2048, 12 * 64, "3.27 B"),
    "hecate_bert_moe_deep": (24, 1024, 2048, 24 * 64, "6.54 B"),
    "pro_prophet_moe_gpt_s": (12, 512, 1024, 12 * 16, ""),
    "pro_prophet_moe_gpt_m": (12, 1024, 2048, 12 * 16, ""),
    "pro_prophet_moe_gpt_l": (12, 2048, 4096, 12 * 16, ""),
    "pro_prophet_moe_gpt_ds": (24, 512, 1024, 24 * 16, ""),
    "pro_prophet_moe_gpt_dm": (24, 1024, 2048, 24 * 16, ""),
    "fastermoe_moe_gpt": (12, 2048, 4096, 12 * 16, ""),
    "fastermoe_moe_gpt_s": (12, 1024, 2048, 12 * 16, ""),
    "fastermoe_moe_gpt_l": (12, 4096, 8192, 12 * 16, ""),
    "fastermoe_moe_bert_deep": (24, 1024, 2048, 24 * 16, ""),
    "fastermoe_moe_bert_deep_l": (24, 4096, 8192, 24 * 16, ""),
    "fastermoe_moe_bert_wide": (12, 1024, 2048, 12 * 64, ""),
    "fastermoe_moe_bert_wide_l": (12, 2048, 4096, 12 * 64, ""),
    "parm_bert_base": (12, 768, 3072, 12 * 8, ""),
    "parm_gpt2": (12, 768, 3072, 12 * 8, ""),
    # DeepSpeed-MoE: every second layer MoE; PR-MoE has an FFN for every token next to each MoE layer
    "deepspeed_350m_moe_128": (24, 1024, 4096, 12 + 12 * 128, "13 B"),
    "deepspeed_1b3_moe_128": (24, 2048, 8192, 12 + 12 * 128, "52 B"),
    "pr_moe_350m_32_64": (24, 1024, 4096, 12 + 12 + 10 * 32 + 2 * 64, "4 B"),
    "pr_moe_1b3_64_128": (24, 2048, 8192, 12 + 12 + 10 * 64 + 2 * 128, "31 B"),
}


# models whose weights are published: parameters, all and those of one token, as their checkpoints hold them
PUBLISHED = {
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248),
    "olmoe_1b_7b": (6_919_161_856, 1_282_017_280),
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704),
    "qwen3_235b_a22b": (235_093_634_560, 22_190_763_520),
    "deepseek_moe_16b": (16_375_728_128, 2_828_650_496),
    "deepseek_v2_lite": (15_706_484_224, 2_661_150_208),
}


def test_every_model_file_has_its_paper():
    assert set(MODELS) == {*PAPERS, *PUBLISHED, "demo"}


def config_of(file, *bindings):
    return parse_run_config([f"configs/{file}.gin"] if file else (), bindings)[0]


def number(title, text) -> int:
    """Return the number behind a title."""
    return int(re.search(rf"{title} +([\d,]+)", text)[1].replace(",", ""))


def header_of(path) -> str:
    """Return the comment at the head of a config, continued lines joined."""
    return " ".join((ROOT / "configs" / f"{path}.gin").read_text().split("\n\n")[0].replace("\\\n#", "").split())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_count_as_their_checkpoints(name):
    text, header = dry_run(config_of(f"model/{name}"), 8), header_of(f"model/{name}")
    for title, count in zip(("total", "active per token"), PUBLISHED[name], strict=True):
        assert number(title, text) == count and f"{count:,}" in header


@pytest.mark.parametrize("name", PAPERS)
def test_named_size_counts_as_its_paper(name):
    layers, dim, hidden, ffns, printed = PAPERS[name]
    run, header = config_of(f"model/{name}"), header_of(f"model/{name}")
    text, count = dry_run(run), layers * 4 * dim**2 + ffns * 2 * dim * hidden
    assert number("as the papers count", text) == count and f"{count / 1e9:.2f} B" in header
    assert count < 1e9 or f"{count:,}  {count / 1e9:.2f} B" in text
    assert not printed or printed in (f"{count / 1e9:.2f} B", f"{count / 1e9:.0f} B") and printed in header
    assert dim // run.model.heads in (64, 128) and run.model.vocab_size == 50304


@pytest.mark.parametrize("path", [f"model/{name}" for name in MODELS] + [f"run/{name}" for name in RUNS])
def test_config_header_states_its_command(path):
    """The command in the header names the file, and its dry run works on the number of devices that it gives."""
    header = header_of(path)
    assert f"python -m moe_jax.train --gin_file=configs/{path}.gin" in header
    devices = int(re.search(r"--host_devices=(\d+)", header).group(1))
    bindings = re.findall(r"--host_devices=\d+ --gin_bindings='([^']+)'", header)
    run = config_of(path, *bindings)
    if teacher := run.distillation.teacher:  # a run that the header trains first
        assert f"--workdir={teacher}" in header
        run = config_of(path, *bindings, "DistillationConfig.teacher = ''", "DistillationConfig.until = None")
    assert re.search(rf"^  {devices} devices = data \d+ x expert \d+", dry_run(run, devices), re.MULTILINE)


# 2 x 4 devices, or 3 x 4, of which data parallelism leaves one node, or nodes of unequal size
BY_NODE = (
    "PlannerConfig.transfer = 'by_node'", "MeshConfig.devices_per_node = 4", "MoEConfig.num_experts = 24",
    "train.batch_size = 24", "MeshConfig.data = 2",
)  # fmt: skip


def test_dry_run_has_all_sections():
    run, text = parse_run_config(["configs/run/demo.gin"])
    short, out = (dry_run(run, 8, bound=bound_in(text), everything=everything) for everything in (False, True))
    for line in text.splitlines():
        assert line in out and (f"  {line}\n" in short) == line.endswith("# set")
    for part in ("8 devices = data 1 x expert 8 x expert_shard 1", "total ", "active per token", "as the papers count",
                 "optimizer state", "activations", "estimate", "forward per token", "training per token"):  # fmt: skip
        assert part in out, part
    assert "assumed" not in out
    assert "8 devices a node" in out and "a run on several hosts takes the devices of a host" in out
    bound = dry_run(config_of("run/demo", "MeshConfig.devices_per_node = 4"), 8)
    assert "4 devices a node" in bound and "a run on several hosts" not in bound
    segments = dry_run(config_of("model/pr_moe_350m_32_64"), 128)
    assert "1 of 32 experts, hidden dim 4096; expert parallel 32, data parallel 4" in segments
    text = dry_run(config_of("", "MeshConfig.data = 2", "MeshConfig.model = 4"))
    assert "assumed: MeshConfig.expert = 2, so 4 device(s)" in text and "--host_devices=N" in text


def test_dry_run_says_what_devices_cannot_share_evenly():
    even, text = (dry_run(config_of("run/demo"), devices) for devices in (4, 5))
    assert "  3 of 35 sequences of a microbatch are padding: devices hold as many each\n" in text
    assert "  8 experts at home on 5 devices, 1 or 2 on each\n" in text
    assert "padding" not in even and "at home on" not in even
    assert number("parameters", text) == number("parameters", even)  # ceil(8 / 5) experts of a layer, as 8 / 4
    assert 0.8 < number("activations", text) / number("activations", even) < 1  # 7 sequences, not 8


def test_dry_run_says_what_auto_attention_is_and_counts_it():
    """Neither keeps scores of t x Sq x heads."""
    run = config_of("model/hecate_gpt_moe_s", "train.batch_size = 256")
    gpu, cpu = dry_run(run, target="h200:4x8"), dry_run(run, 32)
    assert ", attention 'cudnn')" in gpu and ", attention 'blocks')" in cpu
    assert number("activations", gpu) == number("activations", cpu)
    assert "ModelConfig.attention 'auto' is 'cudnn' on NVIDIA H200\n" in gpu
    assert "32 devices = data 1 x expert 32 x expert_shard 1; model 1; 8 devices a node" in gpu
    assert "'auto' is 'blocks' on CPU devices, 'cudnn' on GPUs that have it, see --target\n" in cpu
    with pytest.raises(UserError, match="--target=h200:1x2 and --host_devices=2 both count devices; give one of them"):
        dry_run(run, 2, "h200:1x2")


def test_dry_run_says_which_rule_parm_goes_by(tmp_path):
    """Links, collectives alone, a layer's parts, whole layers; and how s2 returns, by which fits."""
    fits = json.loads(Path("docs/bench/cluster_host.json").read_text())

    def section(kept, *bindings):
        if kept is not None:
            cluster = fits["cluster"] | {"fits": {k: v for k, v in fits["cluster"]["fits"].items() if kept(k)}}
            (tmp_path / "cluster.json").write_text(json.dumps({"cluster": cluster}))
            bindings += (f"MoEConfig.cluster = '{tmp_path / 'cluster.json'}'",)
        return dry_run(config_of("run/parm", *bindings), 8).split("Schedule\n")[1].split("\n\n")[0]

    assert "takes s1 by Parm's equations 13 and 14 on the links of 'host_devices', which has no fits" in section(None)
    collectives = section(lambda name: ":" in name and not name.startswith("layer:"))
    assert "by Parm's equations 13 and 14 on the fits of 'calibrated': s1 " in collectives
    assert "by the sum of a layer's parts" in section(lambda name: not name.startswith("layer:"))
    whole = section(lambda name: True)
    assert "by the whole-layer fits ('layer:SCHEDULE') of 'calibrated'" in whole and ", deepspeed " in whole
    assert "takes s1 without a comparison" in section(None, "MeshConfig.model = 1")
    s2 = "MoEConfig.schedule = 's2'"
    assert "returns by 'aas': MoEConfig.gather 'auto', and 'host_devices' has no fit" in section(None, s2)
    assert "'auto' on the fits of 'calibrated': saa " in section(lambda name: True, s2)


PAIRWISE = "MoEConfig.schedule = 'pairwise'"
LARGE = ("ModelConfig.hidden_dim = 16384", "ModelConfig.model_dim = 32768")


@pytest.mark.parametrize(
    ("file", "bindings", "devices", "part"),
    [
        ("", ["ModelConfig.heads = 2", "MeshConfig.model = 4"], 4, "ModelConfig.heads (2) must be divisible by"),
        ("", ["MeshConfig.expert = 1"], 0, "--host_devices (0) must be at least 1"),
        ("", ["train.batch_size = 100_000_000"], 8, "choices of experts in a step must be at most 2147483647, so"),
        ("", ["DataConfig.sequence_length = 2048"], 8, "(2048) must not exceed ModelConfig.max_length"),
        ("", [PAIRWISE, "MeshConfig.expert = 1", "MeshConfig.data = 8"], 8, "needs MeshConfig.expert of at least 2"),
        ("", ["MoEConfig.gather = 'later'"], 8, "MoEConfig.gather ('later') must be one of 'auto', 'saa', 'aas'"),
        ("run/fastermoe", ["PlannerConfig.cluster = 'configs/cluster/lpwnv.gin'", *LARGE], 8, "replica_slots = 1"),
        ("run/hecate", BY_NODE, 8, "there is one node"),
        ("run/qwen3_30b_h100", [], 4, "= 8, but there are 4 devices; change one of the sizes, or run on 8 devices"),
        ("run/hecate", [*BY_NODE, "MeshConfig.expert = 6"], 12, "nodes of unequal size"),
    ],
)
def test_dry_run_refuses_what_a_run_would_refuse(file, bindings, devices, part):
    with pytest.raises(UserError) as caught:
        dry_run(config_of(file, *bindings), devices)
    assert part in str(caught.value) and "\n" not in str(caught.value)


SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def memory_of(file, *bindings, target):
    """Return the first line of what a dry run says."""
    title, line, *_ = dry_run(config_of(file, *bindings), target=target).splitlines()
    assert title == "Memory"
    return line.strip()


def test_dry_run_says_whether_a_device_has_the_memory(monkeypatch):
    run, where = "run/qwen3_30b_h100", "needed on each of 8 NVIDIA H100 80GB HBM3, 71.2 of 79.1 GiB are jax's"
    monkeypatch.setenv(SHARE, "0.9")
    assert memory_of(run, target="h100:1x8") == f"fits: 69.7 GiB {where} ({SHARE})"
    monkeypatch.delenv(SHARE)
    said = memory_of(run, target="h100:1x8")
    assert said.startswith("does not fit: ") and said.endswith(
        f"; {SHARE}=0.9 in the environment, as scripts/launch sets it, would do"
    )
    assert memory_of(run, target="b200:1x8").startswith("fits: ")


@pytest.mark.parametrize(
    ("file", "target", "changes"),
    [
        ("model/mixtral_8x7b", "h200:4x8", 1),
        ("model/mixtral_8x7b", "h100:4x8", 2),
        ("model/qwen3_30b_a3b", "h100:1x8", 3),
    ],
)
def test_the_changes_that_a_dry_run_names_suffice(file, target, changes, monkeypatch):
    monkeypatch.delenv(SHARE, raising=False)
    said = memory_of(file, target=target)
    named = said.partition("; ")[2].partition(" would do: ")[0].split(" and ")
    share = [change for change in named if change.startswith(SHARE)]
    bindings = [change for change in named if change not in share]
    assert said.startswith("does not fit: ") and len(bindings) == changes
    monkeypatch.setenv(SHARE, "0.9" if share else "0.75")
    assert memory_of(file, *bindings, target=target).startswith("fits: ")
    for left_out in bindings:  # no fewer do
        assert not memory_of(file, *(set(bindings) - {left_out}), target=target).startswith("fits: ")


def test_dry_run_touches_no_device():
    """In a fresh process where asking jax for a device raises, and with no backend started at the end."""
    code = """
import jax
def refuse(*args, **kwargs):
    raise AssertionError("a dry run asked for devices")
for name in ("devices", "local_devices", "device_count", "local_device_count", "default_backend"):
    setattr(jax, name, refuse)
from jax._src import xla_bridge
xla_bridge.backends = xla_bridge.get_backend = refuse
from moe_jax.config.gin_files import parse_run_config
from moe_jax.config.run_config import bound_in
from moe_jax.analysis.dry_run import dry_run
for arguments in ([], ["train.zero_stage = 3", "MeshConfig.data = 2"]):
    print(dry_run(parse_run_config(["configs/run/demo.gin"], arguments)[0], 8).count("8 devices"))
assert not xla_bridge._backends
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]
