"""A Slurm of three nodes for these tests, and what a job leaves on them."""

import contextlib
import os
import pathlib
import shutil
import tempfile

import pytest


@pytest.fixture(scope="session")
def nodes():
    from slurm_jobs import Lab, NoSlurmError

    with contextlib.ExitStack() as stack:
        try:
            lab = stack.enter_context(Lab(3))
        except NoSlurmError as error:
            pytest.skip(str(error))
        yield lab


@pytest.fixture
def lab(nodes):
    """All nodes up, before and after."""
    yield nodes
    nodes.restore()


@pytest.fixture(scope="session")
def shared():
    """A folder that all nodes see; /tmp is each node's own."""
    folder = pathlib.Path(tempfile.mkdtemp(dir="/var/tmp", prefix="moe_jax_slurm_tests."))
    yield folder
    if not os.environ.get("MOE_JAX_KEEP"):
        shutil.rmtree(folder)
