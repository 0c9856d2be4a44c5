"""How s2 returns under MoEConfig.gather 'auto': by a calibration's fits, without them by AAS; the program has it."""

import jax
import pytest

from moe_jax.cluster import Cluster
from moe_jax.moe.schedules.s2 import choose_gather
from moe_jax.parallel.mesh import MeshConfig, build_mesh

# D = 4, Ns = 2, N_MP = 2: C = 8 rows of 4 bytes give y = 4 * 8 * 4 = 128 bytes gathered and x = 128 exchanged
MESH = MeshConfig(expert=4, expert_shard=2, model=2)
IN_TURN = {"all_to_all:8": (1.0, 0.25), "all_gather:2": (2.0, 0.5)}  # 1 + 32 + 2 + 64 = 99


@pytest.fixture(scope="module")
def roles():
    return build_mesh(MESH, jax.devices())


@pytest.mark.parametrize(
    "saa, gather",
    [((0.0, 0.25, 0.5), "saa"), ((2.0, 0.25, 0.5), "saa"), ((3.0, 0.25, 0.5), "aas"), ((4.0, 0.25, 0.5), "aas")],
)
def test_the_shorter_by_fits_is_taken(roles, saa, gather):
    cluster = Cluster(fits={**IN_TURN, "saa:8,2,2": saa})
    chosen, why = choose_gather("auto", roles, 8, 4, cluster)
    assert chosen == gather and f"saa {saa[0] + 96:.4g} s, aas 99 s" in why


def test_without_fits_it_is_aas_and_a_name_is_obeyed(roles):
    lacking = choose_gather("auto", roles, 8, 4, Cluster(fits=IN_TURN))
    assert lacking[0] == "aas" and "has no fit 'saa:8,2,2'" in lacking[1]
    other = choose_gather("auto", roles, 8, 4, Cluster(fits={**IN_TURN, "saa:8,2,2": (0, 0, 0)}), "two_level")
    assert other[0] == "aas" and "has no fit 'two_level:8'" in other[1]
    for name in ("saa", "aas"):
        assert choose_gather(name, roles, 8, 4, Cluster(fits={**IN_TURN, "saa:8,2,2": (0, 0, 0)}))[0] == name
