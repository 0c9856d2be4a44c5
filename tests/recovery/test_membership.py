"""Who leads, who trains, and what a leader does next; no processes."""

import dataclasses

import pytest

from moe_jax.recovery.membership import (
    End,
    Form,
    Leave,
    Membership,
    Rules,
    State,
    Stop,
    first_start,
    leader_of,
    next_act,
    seats,
)

RULES = Rules(hosts=4, size=3, least=1, settle_seconds=10, start_timeout_seconds=300)
SINCE = Membership(epoch=7, leader=0, hosts=((0, "a"), (1, "b"), (2, "c")))
LIVING = {
    **{index: State(birth, epoch=7, step=5) for index, birth in SINCE.hosts},
    3: State("d", ready=True),
}


def changed(changes: dict[int, dict | None]) -> dict[int, State]:
    """Return the living hosts with some fields changed; None: it is gone."""
    kept = {index: state for index, state in LIVING.items() if changes.get(index, {}) is not None}
    return {index: dataclasses.replace(state, **changes.get(index, {})) for index, state in kept.items()}


def act(changes: dict[int, dict | None], *, rules=RULES, since=SINCE, own=0, failures=0):
    return next_act(rules, since, changed(changes), own, failures)


@pytest.mark.parametrize(
    ("held", "usable", "expected"),
    [
        ((), {0, 1, 2, 3}, (0, 1, 2)),
        ((0, 1, 2), {1, 2, 3}, (3, 1, 2)),  # in the lost one's place: the others find their state in their own memory
        ((0, 1, 2), {0, 2}, (0, 2)),
        ((0, 2), {0, 1, 2, 3}, (0, 2, 1)),
        ((2,), {0, 2}, (2, 0)),
        ((0, 1), {2}, (2,)),
        ((0, 1), set(), ()),
    ],
)
def test_who_trained_keeps_its_place(held, usable, expected):
    assert seats(Membership(1, 0, tuple((index, "x") for index in held)), usable, 3) == expected


@pytest.mark.parametrize(
    ("changes", "leader"),
    [
        ({}, 0),
        ({0: None}, 1),
        ({0: None, 1: None, 2: None}, 3),
        ({0: {"birth": "new"}}, 1),  # it has come back: what it held is gone
        ({0: {"leaving": True}}, 1),
        ({index: {"leaving": True} for index in range(4)}, -1),
    ],
)
def test_who_leads(changes, leader):
    assert leader_of(SINCE, changed(changes)) == leader


def test_a_lower_host_that_returns_does_not_take_the_lead_from_a_living_one():
    since = Membership(8, 1, ((3, "d"), (1, "b"), (2, "c")))
    assert leader_of(since, LIVING) == 1


def test_nothing_happens_while_all_is_well():
    assert act({}) is None
    assert act({3: None}) is None  # a spare
    assert act({0: {"code": 0}, 1: {"code": 0}}) is None  # others still write their end
    assert act({0: {"code": 75}, 1: {"code": 75}}) is None  # or save
    assert act({0: {"epoch": 6, "code": 137}}) is None  # of the epoch before: it has not heard of this one yet


@pytest.mark.parametrize(
    ("changes", "hosts", "why", "failed"),
    [
        ({1: None}, (0, 3, 2), "host 1 is lost", False),
        ({1: {"birth": "new"}}, (0, 1, 2), "host 1 is lost", False),  # restarted: it may take its own place
        ({1: None, 3: None}, (0, 2), "host 1 is lost", False),
        ({1: {"code": 137}, 2: {"code": 4}}, (0, 1, 2), "the processes of host 1 ended with exit code 137", True),
        ({1: None, 2: {"code": 4}}, (0, 3, 2), "host 1 is lost", False),
        ({0: {"code": 75}, 1: {"code": 75}, 2: {"code": 75}}, (0, 1, 2), "have saved and stopped", False),
        ({0: {"code": 75}, 1: {"code": 75, "leaving": True}, 2: {"code": 75}}, (0, 3, 2), "saved", False),
    ],
)
def test_a_start_on_the_hosts_that_are_left(changes, hosts, why, failed):
    done = act(changes)
    assert isinstance(done, Form) and (done.hosts, done.failed) == (hosts, failed) and why in done.why


def test_who_takes_over_starts_anew():
    done = act({}, since=dataclasses.replace(SINCE, leader=3), own=0)
    assert isinstance(done, Form) and "host 3 leads no more" in done.why


def test_ends_of_the_job():
    assert act({0: {"code": 0}, 1: {"code": 0}, 2: {"code": 0}}) == End(0, "finished")
    assert isinstance(act({0: {"code": 0}, 1: None, 2: {"code": 0}}), Form)  # it may have died before its report
    for code in (2, 3):
        done = act({1: {"code": code}, 2: None})
        assert isinstance(done, End) and done.code == code and "host 1" in done.line


def test_three_failures_without_a_step_in_between_end_the_job():
    failing = {index: {"code": 1, "step": 0} for index in range(3)}
    assert isinstance(act(failing, failures=1), Form)
    done = act(failing, failures=2)
    assert isinstance(done, End) and done.code == 2 and "3 starts in a row failed before a step" in done.line
    assert isinstance(act({0: {"code": 1}}, failures=9), Form)  # a step was finished
    assert isinstance(act({**failing, 1: None}, failures=9), Form)  # a host was lost: the others could not help it


def test_a_host_that_fails_by_itself_leaves_where_the_others_are_enough():
    others = {0: {"code": 4, "step": 0}, 2: {"code": 4, "step": 0}}
    failing = {**others, 1: {"code": 1, "step": 0}}
    assert isinstance(act(failing, failures=1), Form)
    left = act(failing, failures=2)
    assert isinstance(left, Leave) and left.hosts == (1,) and "host 1 ended with exit code 1" in left.line
    assert act({**failing, 2: {"step": 0}}, failures=2) is None, "it may fail by itself too"
    few = {**failing, 3: None}
    assert isinstance(act(few, failures=2), Leave)
    done = act(few, failures=2, rules=dataclasses.replace(RULES, least=3))
    assert isinstance(done, End) and done.code == 2
    done = act({**others, 1: {"code": 4, "step": 0}}, failures=2)
    assert isinstance(done, End) and done.code == 2, "none is to blame"
    alone, states = Membership(7, 0, ((0, "a"),)), {0: State("a", epoch=7, code=1), 3: State("d", ready=True)}
    rules = dataclasses.replace(RULES, size=1)
    assert isinstance(next_act(rules, alone, states, 0, 2), Leave), "a spare tells whether it was the host"
    assert isinstance(next_act(rules, alone, {0: states[0]}, 0, 2), End)


def test_a_host_joins_once_steps_are_made_and_it_has_its_imports():
    since = Membership(8, 0, ((0, "a"), (2, "c")))
    living = {0: State("a", epoch=8, step=3), 2: State("c", epoch=8, step=3), 3: State("d", ready=True)}

    def done(changes: dict):
        states = {index: dataclasses.replace(state, **changes.get(index, {})) for index, state in living.items()}
        return next_act(RULES, since, states, 0, 0)

    assert done({}) == Stop("host 3 joins")
    assert done({3: {"ready": False}}) is None
    assert done({2: {"step": 0}}) is None
    assert done({2: {"leaving": True}}) is None


def test_the_first_start_waits_for_who_is_missing():
    def start(indices, waited, quiet, rules=RULES):
        return first_start(rules, {index: State("x") for index in indices}, waited, quiet)

    assert start(range(4), 0, 0) == Form((0, 1, 2), "all are here")
    assert start((0, 1, 3), 9, 9) is None
    assert start((0, 1, 3), 12, 10) == Form((0, 1, 3), "hosts [2] are missing")
    assert start((0, 1), 299, 200) is None
    assert start((0, 1), 300, 200) == Form((0, 1), "hosts [2, 3] are missing")
    few = start((0, 1), 300, 200, dataclasses.replace(RULES, least=3))
    assert isinstance(few, End) and few.code == 4 and "hosts [2, 3] of 4 did not come within 300 s" in few.line


@pytest.mark.parametrize(
    "message", [{}, {"epoch": 1, "leader": 0, "hosts": [1]}, {"epoch": "x", "leader": 0, "hosts": []}, {"hosts": None}]
)
def test_what_is_no_membership_is_refused(message):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Membership.of_message(message)
