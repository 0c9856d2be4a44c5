"""Whole machines that vanish: namespaces, destroyed or cut off, under supervisors whose processes count."""

import pytest
from machines import Machine, children_of
from network import LabShape, build_network, find_missing, remove_network
from support.supervised_job import Job

PORT = 8475


@pytest.fixture
def lab(tmp_path):
    """Three machines, of which one stands by, and their job."""
    if missing := find_missing(shaped=False):
        pytest.skip(missing)
    machines, job = [], None
    try:
        machines = [Machine(host) for host in build_network(LabShape(hosts=3))]
        job = Job(
            tmp_path, 3, "--spares=1", "--lost_after_seconds=3",
            addresses=[f"{machine.host.address}:{PORT}" for machine in machines],
        )  # fmt: skip
        for machine in machines:
            machine.boot()
        job.start(0, 1, 2, before=[machine.inside() for machine in machines])
        yield machines, job
    finally:
        for machine in machines:
            machine.kill()
        if job is not None:
            job.close()
        remove_network()


def test_a_machine_that_is_destroyed_is_replaced_and_comes_back_as_a_spare(lab):
    machines, job = lab
    first = job.epoch_of(2)
    assert job.hosts_of(first) == [0, 1]
    machines[0].kill()
    job.kill(0)
    second = job.epoch_of(2, after=first)
    assert job.hosts_of(second) == [2, 1]
    machines[0].boot()
    job.start(0, before=[machines[0].inside()])
    job.wait(lambda: "host 0 is here" in job.log(2).partition("host 0 has closed")[2])
    machines[1].kill()
    job.kill(1)
    third = job.epoch_of(2, after=second)
    assert job.hosts_of(third) == [2, 0]
    job.tell("exit", "0")
    assert [job.end(index) for index in (0, 2)] == [0, 0]


@pytest.mark.parametrize("cut", [0, 1])
def test_of_a_cut_network_only_the_side_that_holds_the_lease_goes_on(lab, cut):
    """The other ends in one line, also where it is the larger one."""
    machines, job = lab
    first = job.epoch_of(2)
    others = [index for index in range(3) if index != cut]
    machines[cut].set_link("down")
    if cut == 1:
        second = job.epoch_of(2, after=first)
        assert job.hosts_of(second) == [0, 2] and job.end(1) == 4
        line, ended = job.log(1).splitlines()[-1], [1]
    else:  # who leads is alone, and has the run folder
        second = job.epoch_of(1, after=first)
        assert job.hosts_of(second) == [0] and [job.end(index) for index in others] == [4, 4]
        line, ended = job.log(1).splitlines()[-1], others
    assert line.startswith("error: ") and "is cut off: hosts" in line and "which goes on" in line
    machines[cut].set_link("up")
    job.start(*ended, before=[machine.inside() for machine in machines])
    third = job.epoch_of(2, after=second - 1)
    assert third >= second
    assert children_of(job.supervisors[0].pid)
