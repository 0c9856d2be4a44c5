"""BUILD.md names every flag of the trainer, and every `train.*` binding with its default."""

import dataclasses
import pathlib
import re

from moe_jax.config.train_config import TrainConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "BUILD.md").read_text(encoding="utf-8")


def test_one_table_has_every_train_binding_with_its_default():
    table = PAGE.split("| `train.` |")[1].split("\n\n")[0]
    rows = {}
    for names, defaults in re.findall(r"^\| (`.+?`) \| (.+?) \|", table, re.MULTILINE):
        names = re.findall(r"`(\w+)`", names)
        rows |= dict(zip(names, defaults.split(", "), strict=True))
    assert rows == {field.name: repr(field.default) for field in dataclasses.fields(TrainConfig)}


def test_every_flag_of_the_trainer_is_named():
    source = (ROOT / "moe_jax" / "train.py").read_text(encoding="utf-8")
    flags = re.findall(r"flags\.DEFINE_\w+\(\s*\"(\w+)\"", source)
    assert len(flags) > 15
    assert [flag for flag in flags if f"`--{flag}" not in PAGE] == []
