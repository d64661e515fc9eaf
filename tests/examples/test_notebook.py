"""The notebook of examples/: it is stored without outputs, and runs from its first cell to its last."""

import json
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'exgrpo[test]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'exgrpo[test]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'exgrpo[test]'")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "from_questions_to_report.ipynb"


def test_the_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)
    assert {*notebook.metadata} == {"kernelspec", "language_info"}


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources=folder).execute()
    questions, train, curves, answer, scores, report = (
        cell.outputs for cell in notebook.cells if cell.cell_type == "code"
    )
    assert json.loads(questions[0].text).keys() == {"question", "answer"}
    assert "held-out Pass@1: before" in train[0].text
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in curves)
    assert "reward " in answer[0].text
    assert "pass" in scores[-1].text.lower()
    page = Path(report[0].text.strip())
    assert page == tmp_path / "runs" / "notebook" / "report.html"
    assert "Plotly.newPlot" in page.read_text()
