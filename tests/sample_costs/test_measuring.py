"""The process that measures the supply of a host, on scripts that may and may not be forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero.documents.records import encode
from hetero.metrics.profile.parts import HostPart, SampledWork
from hetero.sample_costs.options import Channel, CostOptions

SCRIPT = """
import threading, time
import numpy as np
import hetero

{at_import}

class Rows:
    def __init__(self, wait_s):
        self.wait_s = wait_s

    def __len__(self):
        return 100

    def __getitem__(self, index):
        begin_s = time.process_time()
        while time.process_time() - begin_s < 0.001:
            pass
        time.sleep(self.wait_s)
        return np.full(1000, index, np.float32)

@hetero.dataset(collate_fn=hetero.collate_arrays)
def rows(fails=False, wait_s=0.0):
    if fails:
        raise FileNotFoundError("there is no folder of rows")
    return Rows(wait_s)
"""
STARTS_A_THREAD = "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"


def measure(folder: Path, *, at_import: str = "", arguments: str = "{}", **changes: Any) -> tuple[HostPart, list[str]]:
    """Run the process as a launcher does, and return what it measured and its progress."""
    script = folder / "rows.py"
    script.write_text(SCRIPT.format(at_import=at_import))
    work = SampledWork(
        dataset="rows", arguments_json=arguments, indices=tuple(range(50)), batch_samples=10, seed=0, epoch=0
    )
    values: dict[str, Any] = {
        "host": "algo-1",
        "instance_type": "ml.test",
        "script": str(script),
        "is_module": False,
        "script_args": (),
        "work": work,
        "num_processes": 2,
        "vcpus": 2,
        "parent_pid": os.getpid(),
        "single_s": 0.2,
        "burst_s": 0.2,
        "receives": False,
    }
    options = CostOptions(**values | changes)
    channel, theirs = Channel.pair("the process that measures")
    with theirs:
        command = [sys.executable, "-m", "hetero.sample_costs.measuring", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        channel.send(encode(options))
        progress = []
        while "progress" in (message := channel.receive(60.0)):
            progress.append(message["progress"])
        return HostPart.from_json(message["part"].encode()), progress
    finally:
        channel.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize("at_import", ["", STARTS_A_THREAD], ids=["forked", "new processes"])
def test_host_measures_samples_alone_and_together(tmp_path: Path, at_import: str) -> None:
    part, progress = measure(tmp_path, at_import=at_import)
    assert part.supply is not None
    assert (part.supply.instance_type, part.supply.vcpus) == ("ml.test", 2)
    assert part.supply.sample_cpu_s.p50 == pytest.approx(0.001, rel=0.5)
    # On a busy machine the samples also wait, so there may be larger bursts.
    assert [point.num_processes for point in part.supply.concurrency][:2] == [1, 2]
    assert all(point.samples_per_s > 0 for point in part.supply.concurrency)
    assert part.supply.build_s is not None
    assert part.contents is not None
    assert [(leaf.path, leaf.dtype, leaf.fits_uint8) for leaf in part.contents.leaves] == [("", "float32", True)]
    assert part.receive_cpu_s_per_gb is None
    assert progress[-1].endswith(" processes")


def test_host_whose_samples_wait_for_storage_measures_more_processes_than_cpus(tmp_path: Path) -> None:
    part, progress = measure(tmp_path, arguments='{"wait_s":0.01}')
    assert part.supply is not None
    assert [point.num_processes for point in part.supply.concurrency] == [1, 2, 4, 8]
    assert progress[-1] == "8 of 8 processes"


def test_host_that_cannot_build_the_data_set_says_why(tmp_path: Path) -> None:
    part, _ = measure(tmp_path, arguments='{"fails":true}')
    assert (part.supply, part.contents) == (None, None)
    assert "there is no folder of rows" in part.notes[0]


def test_host_measures_what_receiving_costs(tmp_path: Path) -> None:
    part, progress = measure(tmp_path, receives=True, work=None, batch_bytes=(2**20,))
    assert part.receive_cpu_s_per_gb is not None
    assert 0.05 < part.receive_cpu_s_per_gb.value < 50
    assert progress == ["receiving"]


def test_host_with_emulated_vcpus_measures_only_what_is_real(tmp_path: Path) -> None:
    part, progress = measure(tmp_path, emulated_sample_s=0.02, vcpus=8)
    assert part.supply is not None
    assert (part.supply.sample_cpu_s.mean, part.supply.sample_cpu_s.basis) == (0.02, "simulated")
    assert [point.num_processes for point in part.supply.concurrency] == [1, 2, 4, 8]
    assert part.contents is not None
    assert "2 of 2 processes" not in progress
