import pathlib

import pytest

from moe_jax.analysis import cuda_wheels
from moe_jax.cluster.targets import check_run, device_named, parse_target, read_device, target_names
from moe_jax.errors import UserError
from moe_jax.parallel.mesh import MeshConfig


def test_every_device_has_figures_and_a_description():
    assert set(target_names()) == {"b200", "h100", "h200", "a100", "v100", "2080ti", "3090", "4090"}
    for name in target_names():
        target = read_device(name)
        assert target.source and target.device in target.config
        rates = [target.intra_bandwidth, target.node_bandwidth, target.memory_bandwidth, target.flops_bf16]
        assert min(rates) > 1e9 and target.adapters >= 1
        assert f"memory_bandwidth: {int(target.memory_bandwidth)}" in target.config  # said twice, and alike
        assert device_named(target.device) == name
    assert device_named("NVIDIA B9") is None


def test_parse_target():
    target = parse_target("h200:4x8")
    assert (target.nodes, target.per_node, target.devices) == (4, 8, 32)
    for mesh in (MeshConfig(), MeshConfig(expert=32, devices_per_node=8), MeshConfig(data=4, expert_shard=2)):
        check_run(target, mesh, "bfloat16")
    with pytest.raises(UserError, match="has 8 devices a node, but MeshConfig.devices_per_node is 4; set it to 8 or 0"):
        check_run(target, MeshConfig(devices_per_node=4), "bfloat16")
    with pytest.raises(UserError, match="names no known device; choose one of 2080ti, 3090, 4090, a100, b200"):
        parse_target("h300:4x8")


@pytest.mark.parametrize("text", ["h200", "h200:0x8"])
def test_parse_target_refuses_topologies(text):
    with pytest.raises(UserError, match="needs a topology NODESxDEVICES.*h200:4x8"):
        parse_target(text)


def test_devices_that_cuda_dropped():
    parse_target("v100:1x8").check_compilable(12)
    parse_target("2080ti:1x8").check_compilable(13)
    with pytest.raises(UserError, match="'v100' .* was dropped by CUDA 13"):
        parse_target("v100:1x8").check_compilable(13)


def test_turing_multiplies_no_bfloat16():
    check_run(parse_target("2080ti:1x8"), MeshConfig(), "float32")
    with pytest.raises(UserError, match="'2080ti' .* has no bfloat16 matmuls, .* set ModelConfig.dtype = 'float32'"):
        check_run(parse_target("2080ti:1x8"), MeshConfig(), "bfloat16")


def test_the_environment_is_the_one_that_the_scripts_make(tmp_path, monkeypatch):
    """make_environment of scripts/environment.sh writes requirements.txt and the wheels; `ready` asks for these."""
    place = tmp_path / "x-cuda"
    place.mkdir()
    assert not cuda_wheels.ready(place)
    for wheels, ready in (("jax[cuda13]==0.0.1", False), (cuda_wheels.WHEELS, True)):
        (place / cuda_wheels.MARK).write_text(f"-e .\n{wheels}\n")
        assert cuda_wheels.ready(place) == ready
    monkeypatch.setenv("MOE_JAX_VENV", str(tmp_path / "x"))
    assert cuda_wheels.folder(cuda_wheels.RECORDED) == place
    script = (pathlib.Path(__file__).parents[2] / "scripts" / "test.sh").read_text()
    assert f"\nrecorded={cuda_wheels.RECORDED} " in script and 'make_environment "$venv" "jax[cuda13]==$jax"' in script
