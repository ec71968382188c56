"""Jobs without data hosts, whose ranks load with torch's own workers: as cheap as without a launcher, and as free."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.integration.harness import DNN, StartJob

SCRIPT = """
import json, os, sys, time
from pathlib import Path

import psutil
import torch.utils.data

import hetero
from hetero.torch import DataLoader

folder = Path(sys.argv[1])
with open(folder / "imports", "a") as file:
    file.write(f"{os.getpid()}\\n")


class Scaled(torch.utils.data.Dataset):
    def __init__(self, scale):
        self.scale = scale

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.scale(index), os.getpid()


@hetero.dataset
def scaled():
    return Scaled(lambda index: 10 * index)


def main():
    mine, offset = os.getpid(), 1
    collate = lambda samples: ([value + offset for value, _ in samples], samples[0][1])
    for subject in (scaled(), Scaled(lambda index: 10 * index)):
        loader = DataLoader(subject, batch_size=4, num_workers=2, collate_fn=collate)
        for _ in range(3):
            batches = list(loader)
            assert [batch for batch, _ in batches] == [[10 * i + 1 for i in range(j, j + 4)] for j in range(0, 40, 4)]
            assert len({pid for _, pid in batches} - {mine}) == 2, "not by two workers"
        assert psutil.Process().children() == [], "workers outlive their pass"
        for _ in zip(range(2), loader):
            pass
        assert psutil.Process().children() == [], "workers outlive a pass that was left"
    (folder / "passed").touch()


if __name__ == "__main__":
    main()
"""


def test_workers_of_a_homogeneous_job_are_forked_and_import_nothing(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = start_job([DNN], script=script, args=[str(tmp_path)])
    assert job.wait() == 0, job.output
    assert (tmp_path / "passed").exists()
    assert len((tmp_path / "imports").read_text().splitlines()) == 1
    report = json.loads((job.directory / "run" / "report.json").read_text())
    assert sum(loader["num_steps"] for rank in report["run"]["ranks"] for loader in rank["loaders"]) == 2 * (3 * 10 + 2)
