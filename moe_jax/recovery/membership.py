"""Which hosts train, and when that changes: decided from what all living supervisors say. No arrays, no connections.

Inputs: the last membership, and the states of the hosts that can be reached. Outputs: who leads, and what the leader
does next.
"""

# Every function here is pure, and every supervisor has the same inputs but for messages under way, so all agree on who
# leads. Two that disagree, because the network between them is cut, are told apart by the run folder's lease, which
# the leader must hold before it forms a membership.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_jax.recovery.workers import STOPPED

MOST_FAILED_STARTS = 3  # in a row, without a finished step
_LOST_ANOTHER = 4  # exit code of a process that ends because of another


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a job's command line fixes."""

    hosts: int  # all that are listed
    size: int  # hosts that train where enough are there; the others are spares
    least: int  # fewer do not train
    settle_seconds: float  # a start goes without hosts that have been missing for so long, if `size` are there
    start_timeout_seconds: float  # and with fewer, down to `least`, after so long


@dataclass(frozen=True)
class State:
    """What a supervisor says of its host."""

    birth: str  # of the supervisor; a host that returns has another
    epoch: int = 0  # that its processes belong to, 0 without any
    code: int | None = None  # by which these ended, None while they run
    step: int = 0  # that they last finished in this epoch, 0 for none
    ready: bool = False  # whether processes stand by with their imports done
    leaving: bool = False  # it was told to end


@dataclass(frozen=True)
class Membership:
    """The hosts of one epoch; `hosts`: (index, birth) in the order of their processes. Epoch 0: none trains yet."""

    epoch: int = 0
    leader: int = -1
    hosts: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of_message(cls, message: dict) -> Membership:
        """Return a membership that was sent; KeyError, TypeError or ValueError where it is none."""
        hosts = tuple((int(index), str(birth)) for index, birth in message["hosts"])
        return cls(int(message["epoch"]), int(message["leader"]), hosts)

    def lost(self, living: Mapping[int, State]) -> list[int]:
        """Return the hosts that are gone, or have come back since."""
        return [index for index, birth in self.hosts if index not in living or living[index].birth != birth]


@dataclass(frozen=True)
class Form:
    """Start the next epoch on these hosts, if they are enough, because of `why`.

    `failed`: the processes of this one failed by themselves.
    """

    hosts: tuple[int, ...]
    why: str
    failed: bool = False


@dataclass(frozen=True)
class Stop:
    """Let the processes save and end, for a start that follows."""

    why: str


@dataclass(frozen=True)
class End:
    """End the job on all hosts."""

    code: int
    line: str


@dataclass(frozen=True)
class Leave:
    """End these hosts alone, because of `line`; the others go on without them."""

    hosts: tuple[int, ...]
    line: str


def leader_of(membership: Membership, living: Mapping[int, State]) -> int:
    """Return the index of the host that leads: who did, else the first one left that trains, else the lowest."""
    staying = {index: state for index, state in living.items() if not state.leaving}
    gone = membership.lost(staying)
    order = [membership.leader, *(index for index, _ in membership.hosts)]
    return next((index for index in order if index in staying and index not in gone), min(staying, default=-1))


def seats(membership: Membership, usable: set[int], size: int) -> tuple[int, ...]:
    """Return the hosts of the next start, in order: who trained keeps its place, where the state in its memory lies.

    Free places go to the lowest of the others; where there is none, the rest closes up.
    """
    held = [index if index in usable else None for index, _ in membership.hosts][:size]
    held += [None] * (size - len(held))
    others = iter(sorted(usable - set(held)))
    return tuple(
        index for index in (next(others, None) if seat is None else seat for seat in held) if index is not None
    )


def first_start(rules: Rules, living: Mapping[int, State], waited: float, quiet: float) -> Form | End | None:
    """Return what the leader does while nothing trains yet; `waited`, `quiet`: seconds since it began, since the last
    host joined.
    """
    usable = {index for index, state in living.items() if not state.leaving}
    missing = sorted(set(range(rules.hosts)) - usable)
    late = waited >= rules.start_timeout_seconds
    if not missing or (len(usable) >= rules.size and quiet >= rules.settle_seconds) or late:
        if len(usable) < rules.least:
            return End(4, f"hosts {missing} of {rules.hosts} did not come within {rules.start_timeout_seconds:g} s")
        return Form(
            seats(Membership(), usable, rules.size), f"hosts {missing} are missing" if missing else "all are here"
        )
    return None


def next_act(
    rules: Rules, membership: Membership, living: Mapping[int, State], own: int, failures: int
) -> Form | Stop | Leave | End | None:
    """Return what the leader does now that a membership stands; None to wait.

    Args:
      own: the index of this host, which leads.
      failures: starts in a row, before this one, that failed by themselves without a finished step.
    """
    usable = {index for index, state in living.items() if not state.leaving}
    hosts, lost = seats(membership, usable, rules.size), membership.lost(living)
    present = [index for index, _ in membership.hosts if index not in lost]
    ended = {i: living[i].code for i in present if living[i].epoch == membership.epoch and living[i].code is not None}
    for index, code in ended.items():
        if code in (2, 3):  # the same on every start
            return End(code, f"the processes of host {index} ended with exit code {code}, which a restart cannot mend")
    if not lost and len(ended) == len(present) and not any(ended.values()):
        return End(0, "finished")
    failed = {index: code for index, code in ended.items() if code not in (0, STOPPED)}
    stopped = len(ended) == len(present)
    why = ""
    if lost:
        why = f"host {', '.join(map(str, lost))} is lost"
    elif failed:
        why = ", ".join(f"the processes of host {index} ended with exit code {code}" for index, code in failed.items())
        stepped = any(living[i].epoch == membership.epoch and living[i].step for i in present)
        if not stepped and failures + 1 >= MOST_FAILED_STARTS:
            line = f"{MOST_FAILED_STARTS} starts in a row failed before a step was finished; the last time {why}"
            broken = tuple(index for index, code in failed.items() if code != _LOST_ANOTHER)
            if broken and not stopped:
                return None  # the others tell soon whether they fail by themselves too
            # all of several: the job's own fault; a single host may itself be broken, and a spare will tell
            others = len(broken) < len(ended) or (len(present) == 1 and usable > set(present))
            some = broken and others and len(usable - set(broken)) >= rules.least
            return Leave(broken, line) if some else End(2, line)
    elif stopped:
        why = "the processes have saved and stopped"
    elif membership.leader != own:
        why = f"host {membership.leader} leads no more"
    if why:
        return Form(hosts, why, failed=bool(failed) and not lost)
    stepping = all(living[i].epoch == membership.epoch and living[i].step for i in present)
    newcomers = sorted(set(hosts) - set(present))
    if (
        newcomers
        and stepping
        and all(living[i].ready for i in newcomers)
        and not any(s.leaving for s in living.values())
    ):
        return Stop(f"host {', '.join(map(str, newcomers))} joins")
    return None
