"""Files of rows, of every kind that is read."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    """Write rows, or lines as they stand, to the kind of file that the name says; return the path."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([rows[0].keys(), *(row.values() for row in rows)])
    else:
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)
