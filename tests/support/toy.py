"""A device whose times are whole numbers, and small schedules written for it by hand."""

from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import Target

# 2 nodes of 2 devices; 100 bytes/s inside, 10 bytes/s a node by one adapter; 1 FLOP/s, 1000 bytes/s of memory
TARGET = Target(
    name="toy",
    device_kind="toy",
    intra_bandwidth=100.0,
    node_bandwidth=10.0,
    adapters=1,
    memory_bandwidth=1000.0,
    flops_bf16=64.0,
    flops_tf32=32.0,
    flops_f32=16.0,
    flops_f64=8.0,
    source="made up",
    nodes=2,
    per_node=2,
)
PRICES = Prices(
    TARGET, matmul_efficiency=1.0, memory_efficiency=1.0, launch=0.0, start=0.0, step=0.0, node_start=0.0,
    node_step=0.0, node_share=1.0,
)  # fmt: skip

HEAD = "HloModule toy, is_scheduled=true, entry_computation_layout={()->()}\n\n"

# one block: 160 bytes exchanged over 4 devices during a matmul of 1,024 FLOPs, which needs the result of another matmul
BLOCK = """
%body (p: (s32[], f32[4,10])) -> (s32[], f32[4,10]) {
  %p = (s32[], f32[4,10]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,10]{1,0} get-tuple-element(%p), index=1
  %a = bf16[8,8]{1,0} constant({...})
  %all-to-all-start = ((f32[4,10]{1,0}), f32[4,10]{1,0}) all-to-all-start(%x), channel_id=1, """ + (
    """replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(f)/jvp(moe)/while/body/dispatch/all_to_all"}
  %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, """
    """metadata={op_name="jit(f)/jvp(moe)/while/body/experts/dot_general"}
  %all-to-all-done = f32[4,10]{1,0} all-to-all-done(%all-to-all-start)
  ROOT %t = (s32[], f32[4,10]{1,0}) tuple(%i, %all-to-all-done)
}

%condition (q: (s32[], f32[4,10])) -> pred[] {
  %q = (s32[], f32[4,10]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}
"""
)
LOOP = (
    HEAD
    + BLOCK
    + """
ENTRY %main (x0: f32[4,10]) -> f32[4,10] {
  %x0 = f32[4,10]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,10]{1,0}) tuple(%zero, %x0)
  %while.1 = (s32[], /*index=1*/f32[4,10]{1,0}) while(%start), condition=%condition, body=%body, """
    + (
        """backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %out = f32[4,10]{1,0} get-tuple-element(%while.1), index=1
}
"""
    )
)

# a conditional whose branches are nothing and one kernel
BRANCH = (
    HEAD
    + """
%nothing (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} parameter(0)
}

%something (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %negate = f32[8]{0} negate(%b)
}

ENTRY %main (x: f32[8], p: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %p = s32[] parameter(1)
  ROOT %conditional.1 = f32[8]{0} conditional(%p, %x, %x), branch_computations={%nothing, %something}
}
"""
)
