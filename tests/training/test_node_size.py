"""What a run takes as its node where nobody binds it, and that a bound size wins."""

import types

import pytest

from moe_jax.config import parse_run_config
from moe_jax.errors import UserError
from moe_jax.training.run import with_node_size
from moe_jax.training.watchdog import Hosts

DEVICES = [types.SimpleNamespace(id=i, process_index=i // 2) for i in range(8)]
FOUR_PROCESSES = Hosts(process_count=4, host_ids=["a", "a", "b", "b"])


def sized(hosts, *bindings):
    config, _, _ = parse_run_config([], bindings)
    return with_node_size(config, DEVICES, hosts).mesh


def test_node_is_what_the_processes_share(capsys):
    assert sized(FOUR_PROCESSES).devices_per_node == 4
    assert capsys.readouterr().out == "4 devices a node (4 processes on 2 host(s))\n"
    assert sized(FOUR_PROCESSES).resolve(8).devices_per_node == 4


def test_bound_size_wins():
    assert sized(FOUR_PROCESSES, "MeshConfig.devices_per_node = 2").devices_per_node == 2
    unequal = Hosts(process_count=4, host_ids=["a", "b", "b", "b"])
    assert sized(unequal, "MeshConfig.devices_per_node = 2").devices_per_node == 2
    with pytest.raises(UserError, match=r"different numbers of devices \(\[2, 6\]\)"):
        sized(unequal)
