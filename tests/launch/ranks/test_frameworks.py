"""The variables that the ranks of each framework get."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.config.options import FRAMEWORKS
from hetero.launch.ranks.frameworks import RANK_FRAMEWORKS, TensorFlow, Torch
from hetero.launch.ranks.ranks import free_port
from hetero.launch.ranks.starter import RanksOptions

OPTIONS = RanksOptions(
    script="train.py",
    script_args=(),
    framework="torch",
    num_hosts=2,
    host_index=1,
    meeting_points=[("10.0.0.1", 7000)],
    num_ranks=2,
    num_cpus=2,
    num_gpus=0,
    environment={},
    is_module=False,
    generation=0,
)
PLACE = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "7000",
}
"""Of the last rank."""


def test_each_framework_that_a_job_may_have_is_known() -> None:
    assert tuple(RANK_FRAMEWORKS) == FRAMEWORKS


TELLS = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
"""


def test_rank_of_torch_gets_what_torchrun_gives_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun logs a warning if it must set it
    port = free_port()
    flags = ["--nproc-per-node=2", f"--master-port={port}", f"--log-dir={tmp_path / 'torchrun'}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *flags, str(script), str(tmp_path)]
    subprocess.run(torchrun, env=environ, check=True, timeout=120)
    options = dataclasses.replace(OPTIONS, num_hosts=1, host_index=0, meeting_points=[("127.0.0.1", port)])
    for rank in range(2):
        told = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        own = Torch().variables(options, rank, environ)
        assert own.pop("TORCHELASTIC_USE_AGENT_STORE") == "False"  # the store is in rank 0, and not in an agent
        assert own.items() <= told.items()
        # torchrun's own, for its children: the store, the file for an exception, the signals that it handles
        others = {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
        assert told.keys() - own.keys() - environ.keys() <= others


def test_rank_of_torch_on_the_second_host_is_told_its_place() -> None:
    told = Torch().variables(OPTIONS, 1, {})
    assert PLACE.items() < told.items()
    assert (told["GROUP_WORLD_SIZE"], told["ROLE_RANK"], told["ROLE_WORLD_SIZE"]) == ("2", "3", "4")


def test_rank_of_torch_after_a_restart_is_told_the_count() -> None:
    told = Torch().variables(dataclasses.replace(OPTIONS, generation=2), 1, {})
    assert told["TORCHELASTIC_RESTART_COUNT"] == "2"


@pytest.mark.parametrize(("environ", "expected"), [({}, "1"), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3")])
def test_error_handling_of_nccl_is_the_users_if_stated(environ: dict[str, str], expected: str) -> None:
    assert Torch().variables(OPTIONS, 1, environ)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == expected


def test_rank_of_tensorflow_is_told_its_place_among_all_ranks() -> None:
    options = dataclasses.replace(OPTIONS, meeting_points=[("10.0.0.1", 7000), ("10.0.0.2", 7100)])
    told = TensorFlow().variables(options, 1, {})
    config = json.loads(told.pop("TF_CONFIG"))
    assert told == PLACE
    workers = ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7100", "10.0.0.2:7101"]
    assert config == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 3}}


def test_address_of_ipv6_is_in_brackets_only_where_a_port_follows() -> None:
    options = dataclasses.replace(OPTIONS, num_ranks=1, meeting_points=[("fd00::1", 7000), ("fd00::2", 7100)])
    told = TensorFlow().variables(options, 0, {})
    assert json.loads(told["TF_CONFIG"])["cluster"] == {"worker": ["[fd00::1]:7000", "[fd00::2]:7100"]}
    assert (told["MASTER_ADDR"], Torch().variables(options, 0, {})["MASTER_ADDR"]) == ("fd00::1", "fd00::1")


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "stated", "expected"),
    [
        (1, 4, None, [None]),  # all of them
        (2, 0, None, [None, None]),
        (4, 4, None, ["0", "1", "2", "3"]),
        (2, 4, None, ["0,1", "2,3"]),
        (2, 5, None, ["0,1", "2,3"]),
        (2, 4, "2,3", ["2", "3"]),  # of those that the user allows
        (2, 4, "GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        (2, 4, "3", [None, None]),  # fewer than ranks: they share it as it is
        (2, 4, "", [None, None]),
    ],
)
def test_ranks_of_tensorflow_share_the_gpus_of_a_host(
    num_ranks: int, num_gpus: int, stated: str | None, expected: list[str | None]
) -> None:
    options = dataclasses.replace(OPTIONS, num_ranks=num_ranks, num_gpus=num_gpus)
    environ = {} if stated is None else {"CUDA_VISIBLE_DEVICES": stated}
    told = [TensorFlow().variables(options, rank, environ).get("CUDA_VISIBLE_DEVICES") for rank in range(num_ranks)]
    assert told == expected


def test_ranks_of_torch_see_all_gpus_of_their_host() -> None:
    told = Torch().variables(dataclasses.replace(OPTIONS, num_gpus=2), 1, {})
    assert "CUDA_VISIBLE_DEVICES" not in told
