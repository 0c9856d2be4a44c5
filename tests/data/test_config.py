"""DataConfig refuses what cannot work, by name, with the remedy."""

import pytest

from moe_jax.data import DataConfig
from moe_jax.errors import UserError


@pytest.mark.parametrize(
    ("binding", "text"),
    [
        ({"sequence_length": 0}, r"DataConfig.sequence_length \(0\) must be a whole number of at least 1"),
        ({"sequence_length": True}, r"DataConfig.sequence_length \(True\) must be a whole number"),
        ({"held_out_fraction": 0.5}, r"DataConfig.held_out_fraction \(0.5\) must be above 0 and below 0.5"),
        ({"held_out_fraction": float("nan")}, r"DataConfig.held_out_fraction \(nan\) must be above 0"),
        ({"path": None}, r"DataConfig.path \(None\) must be text; write it in quotes"),
        ({"field": ""}, r"DataConfig.field \(''\) must not be empty"),
    ],
)
def test_data_config_refuses(binding, text):
    with pytest.raises(UserError, match=text):
        DataConfig(**binding)
