"""accelerate, Lightning and plain torch rebuild the loader: same batches, once over the ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("rebuilding_script.py")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("world_size", "tools"),
    [
        pytest.param(1, ["accelerate"], id="alone"),
        pytest.param(1, ["lightning"], marks=pytest.mark.long, id="alone, lightning"),
        pytest.param(2, ["accelerate"], id="two ranks"),
        pytest.param(2, ["lightning", "accelerate"], marks=pytest.mark.long, id="two ranks, lightning"),
        pytest.param(3, ["accelerate"], marks=pytest.mark.long, id="three ranks"),
    ],
)
def test_loader_rebuilt_by_tools_yields_the_same(world_size: int, tools: list[str], tmp_path: Path) -> None:
    for tool in tools:  # not imported here: that takes seconds, and makes all later forks of this process slow
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"needs {tool}")
    ranks = []
    for rank in range(world_size):
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            **(
                {
                    "RANK": f"{rank}",
                    "LOCAL_RANK": f"{rank}",
                    "GROUP_RANK": "0",
                    "WORLD_SIZE": f"{world_size}",
                    "LOCAL_WORLD_SIZE": f"{world_size}",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": "1",
                    "TORCHELASTIC_RUN_ID": "test",
                }
                if world_size > 1
                else {}
            ),
        }
        command = [sys.executable, str(SCRIPT), f"{rank}", f"{world_size}", str(tmp_path / "store"), *tools]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * world_size, "\n".join(outputs)
