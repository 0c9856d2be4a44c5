"""The text of a compiled program, read and priced: each number is derived there, or for schedules that the compiler
wrote counted in the text in another way."""

import functools
import pathlib
import re

import pytest
from support.toy import HEAD, LOOP

from moe_jax.analysis.compile_ahead import read_text
from moe_jax.analysis.program_report import build_report
from moe_jax.cluster.costs import cost_of
from moe_jax.cluster.hlo import parse_module, pass_of, replica_groups, role_of, scope_of
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import collective_of, play
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
def test_scopes_and_roles_of_a_path(op_name, scope, part):
    assert (scope_of(op_name), pass_of(op_name)) == (scope, part)
    assert role_of("all-reduce", "jit(s)/transpose(jvp(x))/sparse_reduce_scatter/psum") == "Agg"
    assert role_of("collective-permute", "jit(s)/moe/combine/ppermute") == "all-to-all"


def cost(body: str, name: str, others: str = ""):
    module = parse_module(f"{HEAD}{others}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")
    return cost_of(module.entry.by_name[name], module.entry, module)


@pytest.mark.parametrize(
    "dtype, more, kind",
    [
        ("bf16", "", "bf16"),
        ("f32", "", "tf32"),
        ("f32", ", operand_precision={highest,highest}", "f32"),
        ("f32", ", algorithm=dot_f32_f32_f32", "f32"),
    ],
)
def test_dots_count_batch_and_contracted_dims_by_their_precision(dtype, more, kind):
    """[2, 3, 5] x [2, 5, 7] over a batch of 2: 2 * (2 * 3 * 7) * 5 = 420; 30 + 70 numbers in, 42 of 4 bytes out."""
    body = f"""  %a = {dtype}[2,3,5]{{2,1,0}} parameter(0)
  %b = {dtype}[2,5,7]{{2,1,0}} parameter(1)
  ROOT %d = f32[2,3,7]{{2,1,0}} dot(%a, %b), lhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, rhs_batch_dims={{0}}"""
    found = cost(body + more, "d")
    assert found.flops == {kind: 420.0} and found.bytes == {"bf16": 2, "f32": 4}[dtype] * 100 + 4 * 42


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

%summed (s0: f32[12,8], s1: s32[2,1], s2: f32[2,8]) -> f32[12,8] {
  %s0 = f32[12,8]{1,0} parameter(0)
  %s1 = s32[2,1]{1,0} parameter(1)
  %s2 = f32[2,8]{1,0} parameter(2)
  ROOT %add = f32[12,8]{1,0} scatter(%s0, %s1, %s2), update_window_dims={1}, to_apply=%sum
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
  %n = s32[2,1]{1,0} parameter(6)
  %v = f32[2,8]{1,0} parameter(7)
"""


@pytest.mark.parametrize(
    "fusion, flops, bytes_",
    [
        # 12 layers stacked, one of them read: 256 bytes of 3,072; next to it 4 + 256 in and 256 out
        ("f32[8,8]{1,0} fusion(%a, %i, %b), kind=kCustom, calls=%fused", {"tf32": 1024.0}, 256 + 4 + 256 + 256),
        # updated in place: 32 bytes read, 4 of the index, 32 written; not the 384 of the whole array
        ("f32[12,8]{1,0} fusion(%c, %u, %i), kind=kLoop, calls=%stored", {}, 32 + 4 + 32),
        # two of 12 rows added to in place: 64 bytes read and written, next to the 64 that are added and 8 of places
        ("f32[12,8]{1,0} fusion(%c, %n, %v), kind=kInput, calls=%summed", {}, 64 + 8 + 64 + 64),
        ("f32[12,8]{1,0} scatter(%c, %n, %v), update_window_dims={1}, to_apply=%sum", {}, 64 + 64 + 64),
        # one of 12 rows, of 4 that are cut out and cast: 16 bytes of bfloat16 are read, 4 of the index, 32 written
        ("f32[8]{0} fusion(%h, %i), kind=kLoop, calls=%cast", {}, 16 + 4 + 32),
    ],
)
def test_fusions_read_their_slices_and_write_their_updates(fusion, flops, bytes_):
    found = cost(f"{ARGUMENTS}  ROOT %f = {fusion}", "f", FUSED)
    assert (found.flops, found.bytes) == (flops, bytes_)


def test_products_have_the_sizes_that_prices_ask_for():
    """A batched matmul, grouped ones forward and for rows' gradient, and attention: causal is half of it."""
    mosaic = 'custom-call(%s, %x, %w), custom_call_target="mosaic_gpu_v2"'
    fmha = 'custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax'
    mask = 'backend_config={"cudnn_fmha_backend_config": {"mask_type": "MASK"}}'
    dims = '"lhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"]'
    gemm = f'custom_call_target="__cublas$gemm", backend_config={{"gemm_backend_config":{{{dims}}}}}'
    body = f"""  %s = s32[2]{{0}} parameter(0)
  %x = bf16[6,4]{{1,0}} parameter(1)
  %w = bf16[2,4,3]{{2,1,0}} parameter(2)
  %q = bf16[2,64,4,8]{{3,2,1,0}} parameter(3)
  %l = bf16[2,5,4]{{2,1,0}} parameter(4)
  %m = bf16[6,3]{{1,0}} {mosaic}, metadata={{op_name="jit(f)/jvp(moe)/experts/pallas_call"}}
  %d = bf16[6,3]{{1,0}} {mosaic}, metadata={{op_name="jit(f)/transpose(jvp(moe))/experts/pallas_call"}}
  %a = bf16[2,64,4,8]{{3,2,1,0}} {fmha}", {mask.replace("MASK", "CAUSAL")}
  %b = bf16[2,64,4,8]{{3,2,1,0}} {fmha}Backward", {mask.replace("MASK", "NO_MASK")}
  ROOT %g = (bf16[2,5,3]{{2,1,0}}, s8[9]{{0}}) custom-call(%l, %w), {gemm}"""
    products = {name: cost(body, name).products[0] for name in "mdabg"}
    assert {name: product[:3] for name, product in products.items()} == {
        "m": ("forward", "bf16", (6, 4, 3, 2)),
        "d": ("dlhs", "bf16", (6, 4, 3, 2)),
        "a": ("attention forward", "bf16", (2, 4, 64, 8, 8)),
        "b": ("attention backward", "bf16", (2, 4, 64, 8, 8)),
        "g": ("matmul", "bf16", (2, 5, 3, 4)),
    }
    whole = 4 * 2 * 4 * 64**2 * 8
    assert (products["a"].flops, products["b"].flops) == (whole / 2, 2.5 * whole)


FIXTURES = pathlib.Path(__file__).parent / "fixtures"
VERSIONS = ("", "-0.11.2", "-0.12.0.1")  # of jax, behind a fixture's name; '' is 0.10.2
PROGRAMS = ("expert_parallel", "replicas")
NAMES = [program + version for program in PROGRAMS for version in VERSIONS]
LAYERS = 3
KINDS = "all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute"


@functools.cache
def read(name):
    """Return (text, module, report) of a fixture."""
    text, target = read_text(str(FIXTURES / f"{name}.hlo.xz")), parse_target("h200:2x2")
    module = parse_module(text)
    return text, module, build_report(play(module, Prices(target)), Prices(target), {})


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_read_and_layers_run_as_loops(name):
    """By regular expression alone: lines that start a collective, and lines that end one."""
    text, module, report = read(name)
    starts, dones = (len(re.findall(rf" (?:{KINDS})-{end}\(", text)) for end in ("start", "done"))
    instructions = [i for c in module.computations.values() for i in c.instructions]
    found = [i for i in instructions if collective_of(i, module) and i.opcode.endswith("-start")]
    assert len(found) == starts == dones > 0
    assert len(instructions) == sum(" = " in line for line in text.splitlines())
    loops = [i.trip_count for i in module.entry.instructions if i.opcode == "while"]
    assert loops.count(LAYERS) == 2  # forward and backward
    in_loops = [record for record in report["collectives"] if record["loops"]]
    assert in_loops and all(record["executions"] == LAYERS for record in in_loops)
    assert report["unknown_loops"] == [] and report["unknown_calls"] == {}
    assert sum(report["step"]["flops"].values()) > 1e8
    branches = report["branches"]  # of overflows, not taken
    assert all(min(branch["seconds_not_taken"]) >= branch["seconds_taken"] for branch in branches)
    assert not branches or any(branch["collectives_not_taken"] > 0 for branch in branches)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_replicas_travel_as_often_and_as_far_as_the_schedule_says(name):
    """Dispatch and combine, forward and backward: 4 exchanges a layer of D buckets of C rows of 64 dims, 2 bytes each.

    t = 2 sequences x 64, K = 2, D = 4, slack 1.5: C = 1.5 x 2 x 128 / 4 = 96 rows; replicas: the plan's own, larger.
    Each round moves one expert, w_in and w_out of 64 x 128 in bfloat16: out in Trans, its gradient home in Agg."""
    report = read(name)[2]
    moved = {role: [r for r in report["collectives"] if r["role"] == role] for role in ("all-to-all", "Trans", "Agg")}
    big = [r for r in moved.pop("all-to-all") if r["bytes"] > 1000]
    ways = [(part, scope) for part in ("backward", "forward") for scope in ("combine", "dispatch")]
    assert sorted((r["part"], r["scope"].split("/")[-1]) for r in big) == ways
    (size,) = {r["bytes"] for r in big}
    assert size % (4 * 64 * 2) == 0 and size // (4 * 64 * 2) >= 96
    assert all(r["group_size"] == 4 and r["nodes_of_a_group"] == 2 for r in big)
    assert len(moved["Trans"]) == len(moved["Agg"]) and bool(moved["Agg"]) == name.startswith("replicas")
    for role, records in moved.items():
        rounds = {(r["kind"], r["bytes"], r["part"]) for r in records}
        part = "forward" if role == "Trans" else "backward"
        assert rounds <= {("collective-permute", 2 * 64 * 128 * 2, part)}
        totals = [total["executions"] for total in report["in_loops"]["by_role"] if total["role"] == role]
        assert totals == ([LAYERS * len(records)] if records else [])
