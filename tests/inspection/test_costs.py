"""Each number is derived beside it."""

import pytest
from support.toy import HEAD

from moe_jax.cluster.costs import cost_of
from moe_jax.cluster.hlo import parse_module


def cost(body: str, name: str, others: str = ""):
    module = parse_module(f"{HEAD}{others}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")
    return cost_of(module.entry.by_name[name], module.entry, module)


def test_dot_counts_batch_and_contracted_dims():
    # [2, 3, 5] x [2, 5, 7] over a batch of 2: 2 * (2 * 3 * 7) * 5 = 420; bytes 2 * (30 + 70) + 4 * 42 = 368
    body = """  %a = bf16[2,3,5]{2,1,0} parameter(0)
  %b = bf16[2,5,7]{2,1,0} parameter(1)
  ROOT %d = f32[2,3,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}"""
    found = cost(body, "d")
    assert found.flops == (("bf16", 420.0),) and found.bytes == 368


@pytest.mark.parametrize(
    "more, kind",
    [("", "tf32"), (", operand_precision={highest,highest}", "f32"), (", algorithm=dot_f32_f32_f32", "f32")],
)
def test_float32_dots_by_their_precision(more, kind):
    body = f"""  %a = f32[2,2]{{1,0}} parameter(0)
  ROOT %d = f32[2,2]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{more}"""
    assert cost(body, "d").flops == ((kind, 16.0),)


FUSED = """
%fused (p0: f32[12,8,8], p1: s32[], p2: f32[8,8]) -> f32[8,8] {
  %p0 = f32[12,8,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8,8]{1,0} parameter(2)
  %cut = f32[1,8,8]{2,1,0} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,8,8}
  %w = f32[8,8]{1,0} bitcast(%cut)
  ROOT %d = f32[8,8]{1,0} dot(%w, %p2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%stored (q0: f32[12,8], q1: f32[8], q2: s32[]) -> f32[12,8] {
  %q0 = f32[12,8]{1,0} parameter(0)
  %q1 = f32[8]{0} parameter(1)
  %q2 = s32[] parameter(2)
  %row = f32[1,8]{1,0} bitcast(%q1)
  ROOT %put = f32[12,8]{1,0} dynamic-update-slice(%q0, %row, %q2, %q2)
}
"""


def test_fusion_reads_a_slice_and_multiplies():
    # 12 layers stacked, one of them read: 256 bytes of 3,072; beside it 4 + 256 in and 256 out
    body = """  %a = f32[12,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[8,8]{1,0} parameter(2)
  ROOT %f = f32[8,8]{1,0} fusion(%a, %i, %b), kind=kCustom, calls=%fused"""
    found = cost(body, "f", FUSED)
    assert found.flops == (("tf32", 2.0 * 64 * 8),) and found.bytes == 256 + 4 + 256 + 256


def test_fusion_reads_a_slice_in_another_shape_and_dtype():
    # one of 12 rows, of 4 that are cut out and cast: 16 bytes of bfloat16 are read, 4 of the index, 32 written
    called = """%cast (p0: bf16[12,8], p1: s32[]) -> f32[8] {
  %p0 = bf16[12,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %flat = bf16[96]{0} bitcast(%p0)
  %four = bf16[32]{0} dynamic-slice(%flat, %p1), dynamic_slice_sizes={32}
  %more = f32[32]{0} convert(%four)
  ROOT %cut = f32[8]{0} slice(%more), slice={[8:16]}
}
"""
    body = """  %a = bf16[12,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = f32[8]{0} fusion(%a, %i), kind=kLoop, calls=%cast"""
    assert cost(body, "f", called).bytes == 16 + 4 + 32


def test_fusion_that_updates_in_place_writes_the_update():
    # 32 bytes read, 4 of the index, 32 written; not the 384 of the whole array
    body = """  %a = f32[12,8]{1,0} parameter(0)
  %u = f32[8]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[12,8]{1,0} fusion(%a, %u, %i), kind=kLoop, calls=%stored"""
    assert cost(body, "f", FUSED).bytes == 32 + 4 + 32


def test_kernels_written_by_hand_count_by_their_shapes():
    # rows [6, 4] by weights [2, 4, 3]: 2 * 6 * 4 * 3 = 144; rows by rows to [2, 4, 3]: 2 * 6 * 4 * 3
    body = """  %s = s32[2]{0} parameter(0)
  %x = bf16[6,4]{1,0} parameter(1)
  %w = bf16[2,4,3]{2,1,0} parameter(2)
  %y = bf16[6,3]{1,0} parameter(3)
  %m = bf16[6,3]{1,0} custom-call(%s, %x, %w), custom_call_target="mosaic_gpu_v2"
  %t = bf16[2,4,3]{2,1,0} custom-call(%s, %x, %y), custom_call_target="mosaic_gpu_v2"
  %l = s32[4,9]{1,0} parameter(4)
  %b = bf16[8,4,3]{2,1,0} parameter(5)
  %n = s32[1]{0} parameter(6)
  %k = bf16[6,3]{1,0} custom-call(%l, %s, %n, %x, %b, %w), custom_call_target="mosaic_gpu_v2"
  %p = (f32[5,2,4,3]{3,2,1,0}) custom-call(%l, %x, %y), custom_call_target="mosaic_gpu_v2"
  %g = (f32[6,3]{1,0}, s8[99]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %o = f32[6]{0} custom-call(%x), custom_call_target="my_kernel\""""  # noqa: E501
    assert cost(body, "m").flops == cost(body, "t").flops == cost(body, "g").flops == (("bf16", 144.0),)
    # a table of tiles first, and banks read by slot: two rows of eight, one of two; five sums over parts of the rows
    assert cost(body, "k").flops == cost(body, "p").flops == (("bf16", 144.0),)
    assert cost(body, "k").bytes == 4 * 36 + 4 * 2 + 4 + 2 * 24 + 2 * 12 * (2 + 1) + 2 * 18
    assert cost(body, "p").bytes == 4 * 36 + 2 * 24 + 2 * 18 + 4 * 5 * 24
    unknown = cost(body, "o")
    assert (unknown.unknown, unknown.flops, unknown.bytes) == ("my_kernel", (), 48 + 24)


def test_what_only_names_memory_costs_nothing():
    body = """  %x = f32[6,4]{1,0} parameter(0)
  %b = f32[24]{0} bitcast(%x)
  ROOT %t = (f32[24]{0}) tuple(%b)"""
    assert cost(body, "b") == cost(body, "t") == cost(body, "x")
    assert cost(body, "x").bytes == 0
