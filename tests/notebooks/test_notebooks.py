"""Every notebook is stored without outputs, and runs from top to bottom: bash scripts/test.sh --ecosystem."""

import os
import pathlib
import subprocess
import sys

import nbformat
import pytest
from support.quick_compiles import QUICK

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "scripts" / "notebooks").glob("*.ipynb"))

# In a process of its own: the client's event loop and its warnings are no concern of the other tests.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
nbformat.write(notebook, sys.argv[2])
"""


def execute(path, folder):
    """Return (outputs, standard output) of all cells of a notebook."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": QUICK,  # the notebook sets the number of devices by itself
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    result = folder / "executed.ipynb"
    command = [sys.executable, "-c", EXECUTE, str(path), str(result)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = nbformat.read(result, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    return outputs, text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}  # no version of whoever saved it


@pytest.mark.ecosystem
def test_moe_layer(tmp_path):
    """The loss falls, the load evens out, and one picture is drawn."""
    outputs, text = execute(ROOT / "scripts" / "notebooks" / "moe_layer.ipynb", tmp_path)
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    assert "{'data': 1, 'expert': 8, 'expert_shard': 1}" in text
    for line in ("loss ", "fullest device over the mean: "):
        words = next(row for row in text.splitlines() if row.startswith(line)).removeprefix(line).split()
        before, after = float(words[0]), float(words[2])
        assert after < 0.8 * before, text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


@pytest.mark.ecosystem
def test_generate(tmp_path):
    """The loss falls, every token has its experts, and equal prompts are continued as drawn."""
    outputs, text = execute(ROOT / "scripts" / "notebooks" / "generate.ipynb", tmp_path)
    losses = next(row for row in text.splitlines() if row.startswith("held-out loss")).split()
    assert float(losses[4]) < 0.75 * float(losses[2]), text
    assert "experts of each token, [tokens, layers, K]: (51, 2, 2)" in text and "greedy: '" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
