"""The notebook of examples/: it is stored as it ran, and runs from its first cell to its last."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'exgrpo[test]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'exgrpo[test]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'exgrpo[test]'")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "five_minutes.ipynb"


def outputs(notebook):
    """Of the cells that compute, all that they print, and the kinds of all else."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"][1:]  # without the installation
    printed = ["".join(output.text for output in cell.outputs if output.output_type == "stream") for cell in cells]
    return printed, {kind for cell in cells for output in cell.outputs for kind in output.get("data", ())}


def assert_right(notebook):
    (kernels, training, curves, answer), kinds = outputs(notebook)
    differences = [float(word.strip(",")) for word in kernels.split() if "e-" in word]
    assert len(differences) == 2
    assert max(differences) < 1e-4  # of sums of 32,000 terms in float32
    assert "with_replay" in training
    assert curves.count("held-out") == 4
    assert "reward " in answer
    assert "application/vnd.plotly.v1+json" in kinds


def test_the_notebook_is_stored_as_it_ran():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert_right(notebook)
    assert str(Path.home()) not in NOTEBOOK.read_text()
    assert {*notebook.metadata} == {"kernelspec", "language_info"}


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", ())]
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=folder).execute()
    notebook.cells.insert(0, nbformat.v4.new_code_cell())
    assert_right(notebook)
