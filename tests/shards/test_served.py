"""Real endpoints: the same batches in windows as without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.control.rank import session as control
from tests.support.shards import write_shards

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from hetero.torch import DataLoader  # noqa: E402
from tests.support.torch.endpoints import ServedJob, imported_script  # noqa: E402

SCRIPT = """
    import hetero
    from hetero import shards

    @hetero.dataset
    def served_rows(files):
        return shards.parquet(files, lanes=4, chunk_rows=10, columns=["id"]).map(lambda row: row["id"])
"""


def test_endpoints_deliver_the_same_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_shards(tmp_path / "data", "parquet", [400] * 5)
    with imported_script(tmp_path, "served_rows_script", SCRIPT) as script:
        expected = [
            batch.tolist() for batch in DataLoader(script.served_rows(files=files), batch_size=10, shuffle="window")
        ]
        job = ServedJob(tmp_path, Path(script.__file__))
        job.start(2)
        monkeypatch.setattr(control, "_session", job)
        try:
            loader: Any = DataLoader(script.served_rows(files=files), batch_size=10, shuffle="window")
            assert [batch.tolist() for batch in loader] == expected
        finally:
            job.stop()
            hetero.spec.set_describer(None)
