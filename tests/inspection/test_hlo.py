import pytest
from support.toy import HEAD, LOOP

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


@pytest.mark.parametrize(
    "op_name, scope, part",
    [
        ("jit(step)/jvp()/shard_map/while/body/closed_call/moe/dispatch/all_to_all", "moe/dispatch", "forward"),
        ("jit(step)/transpose(jvp(moe))/while/body/moe/combine/mul", "moe/combine", "backward"),
        (
            "jit(s)/transpose(jvp())/checkpoint/rematted_computation/moe/cond/branch_1_fun/gate/dot",
            "moe/gate",
            "recompute",
        ),
        ("jit(s)/attention/vmap(jit(f))/jit(f)/x", "attention", "forward"),
        ("", "", ""),
    ],
)
def test_scopes_of_a_path(op_name, scope, part):
    assert (scope_of(op_name), pass_of(op_name)) == (scope, part)


@pytest.mark.parametrize(
    "kind, op_name, role",
    [
        ("all-reduce", "jit(s)/transpose(jvp(x))/sparse_reduce_scatter/psum", "Agg"),
        ("collective-permute", "jit(s)/moe/combine/ppermute", "all-to-all"),
    ],
)
def test_roles(kind, op_name, role):
    assert role_of(kind, op_name) == role
