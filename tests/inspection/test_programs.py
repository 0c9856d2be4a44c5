"""The text of a compiled program, read and priced: each number is derived beside it."""

import pytest
from support.toy import HEAD, LOOP

from moe_jax.cluster.costs import cost_of
from moe_jax.cluster.hlo import parse_module, pass_of, replica_groups, role_of, scope_of
from moe_jax.errors import UserError


def test_parse_module_reads_operands_with_types_brackets_and_quotes():
    text = HEAD + (
        "ENTRY %main (a: bf16[2,3]) -> bf16[2,3] {\n"
        "  %a = bf16[2,3]{1,0:T(8,128)(2,1)} parameter(0), sharding={replicated}\n"
        "  ROOT %c.1 = (bf16[2,3]{1,0}, s4[3]{0}) custom-call(bf16[2,3]{1,0} %a, /*index=1*/%a), "
        "custom_call_target=\"f(x\", metadata={op_name=\"jit(f)/state[\\'p\\'][\\'w\\']/g\"}\n}\n"
    )
    call = parse_module(text).entry.root
    assert call.operands == ("a", "a") and call.opcode == "custom-call"
    assert call.bytes == 12 + 2  # three 4-bit numbers fill two bytes
    assert "\\'p\\'" in call.op_name


@pytest.mark.parametrize(
    "text, message",
    [
        ("HloModule m, entry\n", "lacks is_scheduled=true"),
        (LOOP[: LOOP.index("  ROOT %out") + 30], "cannot be read; was the text cut off"),
    ],
)
def test_parse_module_refuses(text, message):
    with pytest.raises(UserError, match=message):
        parse_module(text)


@pytest.mark.parametrize(
    "text, groups",
    [
        ("channel_id=2, source_target_pairs={{0,1},{12,0}}, x", ((0, 1), (12, 0))),
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("dimensions={0}", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4], dimensions={0}", ((0, 1), (2, 3))),
        # ids 0..3 as [[0, 1], [2, 3]], turned to [[0, 2], [1, 3]], cut into two rows
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=1] {'a','b'}", ((0, 1, 2, 3),)),
        # ids as [[0, 1], [2, 3]], turned, fill the mesh: a runs over 0, 1 at b = 0
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}, x", ((3, 2), (1, 0))),
    ],
)
def test_replica_groups(text, groups):
    assert replica_groups(text, 4) == groups


RECOMPUTED = "jit(s)/transpose(jvp())/checkpoint/rematted_computation/moe/cond/branch_1_fun/gate/dot"


@pytest.mark.parametrize(
    "op_name, scope, part",
    [
        ("jit(step)/jvp()/shard_map/while/body/closed_call/moe/dispatch/all_to_all", "moe/dispatch", "forward"),
        ("jit(step)/transpose(jvp(moe))/while/body/moe/combine/mul", "moe/combine", "backward"),
        (RECOMPUTED, "moe/gate", "recompute"),
        ("jit(s)/attention/vmap(jit(f))/jit(f)/x", "attention", "forward"),
        ("", "", ""),
    ],
)
def test_scopes_of_a_path(op_name, scope, part):
    assert (scope_of(op_name), pass_of(op_name)) == (scope, part)


def test_roles():
    assert role_of("all-reduce", "jit(s)/transpose(jvp(x))/sparse_reduce_scatter/psum") == "Agg"
    assert role_of("collective-permute", "jit(s)/moe/combine/ppermute") == "all-to-all"


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

%cast (r0: bf16[12,8], r1: s32[]) -> f32[8] {
  %r0 = bf16[12,8]{1,0} parameter(0)
  %r1 = s32[] parameter(1)
  %flat = bf16[96]{0} bitcast(%r0)
  %four = bf16[32]{0} dynamic-slice(%flat, %r1), dynamic_slice_sizes={32}
  %more = f32[32]{0} convert(%four)
  ROOT %out = f32[8]{0} slice(%more), slice={[8:16]}
}
"""
ARGUMENTS = """  %a = f32[12,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[8,8]{1,0} parameter(2)
  %c = f32[12,8]{1,0} parameter(3)
  %u = f32[8]{0} parameter(4)
  %h = bf16[12,8]{1,0} parameter(5)
"""


@pytest.mark.parametrize(
    "fusion, flops, bytes_",
    [
        # 12 layers stacked, one of them read: 256 bytes of 3,072; beside it 4 + 256 in and 256 out
        (
            "f32[8,8]{1,0} fusion(%a, %i, %b), kind=kCustom, calls=%fused",
            (("tf32", 2.0 * 64 * 8),),
            256 + 4 + 256 + 256,
        ),
        # updated in place: 32 bytes read, 4 of the index, 32 written; not the 384 of the whole array
        ("f32[12,8]{1,0} fusion(%c, %u, %i), kind=kLoop, calls=%stored", (), 32 + 4 + 32),
        # one of 12 rows, of 4 that are cut out and cast: 16 bytes of bfloat16 are read, 4 of the index, 32 written
        ("f32[8]{0} fusion(%h, %i), kind=kLoop, calls=%cast", (), 16 + 4 + 32),
    ],
)
def test_fusions_read_their_slices_and_write_their_updates(fusion, flops, bytes_):
    found = cost(f"{ARGUMENTS}  ROOT %f = {fusion}", "f", FUSED)
    assert (found.flops, found.bytes) == (flops, bytes_)


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
