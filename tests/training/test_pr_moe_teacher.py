"""DeepSpeed-MoE's PR-MoE teaches a student: layers of 4 and of 8 experts over 8 devices, beside the student's 8."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from support.distillation import assert_close, taught_loss
from support.placements import to_bank
from support.tiny_run import finish, start, write_corpus

from moe_jax.config.gin_files import parse_run_config
from moe_jax.models import make_loss
from moe_jax.planning.placement import Placement
from moe_jax.training.checkpoint import Checkpointer
from moe_jax.training.program import build_session
from moe_jax.training.teacher import load_teacher

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")

SMALL = (
    "ModelConfig.dtype = 'float64'", "ModelConfig.model_dim = 16", "ModelConfig.heads = 2",
    "ModelConfig.hidden_dim = 16", "ModelConfig.max_length = 16", "DataConfig.sequence_length = 16",
    "train.batch_size = 8", "train.steps = 4", "train.warmup_steps = 1", "train.checkpoint_every = 1",
    "train.keep_checkpoints = 9", "train.evaluate_every = 0",
)  # fmt: skip


def arguments(folder, name, *own):
    """Return (config file, bindings) of a shrunk run of configs/run/<name>.gin."""
    folders = (write_corpus(folder / "corpus"), f"DataConfig.cache_dir = {str(folder / 'cache')!r}")
    return f"configs/run/{name}.gin", [*SMALL, *folders, *own]


def student(folder, *own):
    return arguments(
        folder, "mos", f"DistillationConfig.teacher = {str(folder / 'teacher')!r}", "DistillationConfig.until = 3", *own
    )


def train(workdir, file, bindings):
    """Carry the run out on 8 devices by the command line; return what it printed."""
    flags = [f"--gin_file={file}", f"--workdir={workdir}", "--host_devices=8"]
    command = [sys.executable, "-m", "moe_jax.train", *flags, *(f"--gin_bindings={line}" for line in bindings)]
    code, out, err = finish(start(command))
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A PR-MoE, and a student that learned from it in three of four steps."""
    folder = tmp_path_factory.mktemp("pr_moe")
    train(folder / "teacher", *arguments(folder, "pr_moe"))
    train(folder / "student", *student(folder))
    return folder


def reference_params(workdir):
    """Return {'dense', 'experts'} of a run's last checkpoint on the host, for the reference."""
    arrays = Checkpointer(workdir / "checkpoints", keep=9).read_arrays(4)
    leaves = {tuple(name.split("/")): jnp.asarray(leaf) for name, leaf in arrays.items()}
    params = traverse_util.unflatten_dict({path[1:]: leaf for path, leaf in leaves.items() if path[0] == "params"})
    return {"dense": params["dense"], "experts": params["bank"]}


def test_loss_and_gradients_equal_one_dense_device(taught):
    with jax.enable_x64(True):
        file, bindings = student(taught)
        config, *_ = parse_run_config([file], bindings)
        session = build_session(config, jax.devices())
        teacher, model = session.teacher, session.model
        groups = [teacher.model.roles_of(segment) for segment in teacher.model.expert_segments]
        assert [own.size(own.expert) for own in groups] == [4, 8]
        assert {name: home.max() + 1 for name, home in session.home.items()} == {"segment_0": 8}
        frozen = load_teacher(teacher, config.distillation)
        checkpoints = Checkpointer(taught / "student" / "checkpoints", keep=9)
        params = checkpoints.restore_params(4, session.abstract_state()["params"], session.home)
        batch = jax.tree.map(lambda rows: rows[0], session.feed.read(7))
        loss = make_loss(model, model.layout(), *batch.inputs.shape, teacher=teacher)
        rest = batch, session.tables, jax.random.key(0), np.int32(0), np.sum(batch.weights)
        (got, stats), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *rest, frozen)

        pair = (model.config, model.moe), (teacher.model.config, teacher.model.moe)
        (want, kl), want_grads = jax.jit(jax.value_and_grad(taught_loss, has_aux=True), static_argnums=(3, 4, 5))(
            reference_params(taught / "student"), reference_params(taught / "teacher"), batch, *pair, teacher.alpha
        )
        assert got.dtype == jnp.float64 and float(kl) > 1e-3
        np.testing.assert_allclose([float(got), float(stats.kl)], [float(want), float(kl)], rtol=1e-10)
        even = to_bank(want_grads["experts"], Placement.even(model.config.moe_layers, model.moe.num_experts, 8))
        assert_close(grads, {"dense": want_grads["dense"], "bank": even})
