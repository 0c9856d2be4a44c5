"""DeepSpeed-MoE's PR-MoE teaches a student: layers of 4 and of 8 experts over 8 devices, beside the student's 8."""

import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from support.distillation import assert_close, taught_loss
from support.placements import to_bank
from support.tiny_run import finish, start, write_corpus

from moe_jax.analysis.dry_run import dry_run
from moe_jax.config import parse_run_config
from moe_jax.errors import UserError
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


def config_of(file, bindings):
    return parse_run_config([file], bindings)[0]


def arrays(workdir, step=4):
    return Checkpointer(workdir / "checkpoints", keep=9).read_arrays(step)


def reference_params(workdir):
    """Return {'dense', 'experts'} of a run's last checkpoint on the host, for the reference."""
    leaves = {tuple(name.split("/")): jnp.asarray(leaf) for name, leaf in arrays(workdir).items()}
    params = traverse_util.unflatten_dict({path[1:]: leaf for path, leaf in leaves.items() if path[0] == "params"})
    return {"dense": params["dense"], "experts": params["bank"]}


def test_loss_and_gradients_equal_one_dense_device(taught):
    with jax.enable_x64(True):
        config = config_of(*student(taught))
        session = build_session(config, jax.devices())
        teacher, model = session.teacher, session.model
        groups = [teacher.model.roles_of(segment) for segment in teacher.model.expert_segments]
        assert [own.size(own.expert) for own in groups] == [4, 8] and {
            name: size for name, (_, size) in session.homes.items()
        } == {"segment_0": 8}
        frozen = load_teacher(teacher, config.distillation)
        checkpoints = Checkpointer(taught / "student" / "checkpoints", keep=9)
        params = checkpoints.restore_params(4, session.abstract_state()["params"], session.home)
        batch = jax.tree.map(lambda rows: rows[0], session.feed.read(7))
        loss = make_loss(model, session.layout, *batch.inputs.shape, teacher=teacher)
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


@pytest.mark.parametrize(
    ("experts", "change", "devices", "says"),
    [
        (3, "train.seed = 0", 8, r"segment 0 of the model .*num_experts \(3\) must be divisible by the expert axis"),
        (4, "MoEConfig.num_experts = 6", 24, r"groups of 4 and of 6 devices do not lie inside one another"),
    ],
)  # fmt: skip
def test_a_teacher_whose_experts_do_not_spread_is_refused_in_one_line(taught, experts, change, devices, says):
    other = taught / f"other_{experts}"
    if not other.exists():
        shutil.copytree(taught / "teacher", other)
        text = (other / "config.gin").read_text()
        (other / "config.gin").write_text(text.replace("num_experts=4", f"num_experts={experts}"))
    bindings = (f"DistillationConfig.teacher = {str(other)!r}", "train.batch_size = 24", change)
    config = config_of(*student(taught, *bindings))
    with pytest.raises(UserError, match=says) as caught:
        dry_run(config, devices)
    assert str(caught.value).startswith("DistillationConfig.teacher (") and "\n" not in str(caught.value)
