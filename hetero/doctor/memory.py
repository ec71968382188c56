"""The memory of the endpoints that run on this host, and of the samples that they have kept."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from hetero.cache.folders import kept_in_memory
from hetero.doctor.leftovers import find_processes
from hetero.doctor.snapshot import Snapshot
from hetero.system.diagnosis import Diagnosis, ok
from hetero.system.memory import ProcessMemory, process_memory
from hetero.system.quantities import bytes_text

__all__ = ["examine"]


def examine(_snapshot: Snapshot) -> list[Diagnosis]:
    """Report the memory of the endpoints of each job, and of caches of samples in ``/dev/shm``."""
    by_job: dict[str, list[ProcessMemory]] = defaultdict(list)
    for process in find_processes():
        if process.kind == "endpoint" and (memory := process_memory(Path(f"/proc/{process.pid}"))) is not None:
            by_job[process.job_id].append(memory)
    diagnoses = []
    for job, memories in sorted(by_job.items()):
        private, shared = sum(each.private_bytes for each in memories), max(each.shared_bytes for each in memories)
        most = max(each.private_bytes for each in memories)
        found = (
            f"endpoints{f' of the job {job}' if job else ''}: {len(memories)} processes have {bytes_text(private)} of "
            f"private memory, at most {bytes_text(most)} in one of them, and share {bytes_text(shared)}"
        )
        diagnoses.append(ok(found, private_bytes=private, largest_private_bytes=most, shared_bytes=shared))
    if kept := kept_in_memory():
        diagnoses.append(ok(f"samples that data sets have kept in memory take {bytes_text(kept)}", kept_bytes=kept))
    return diagnoses or [ok("no endpoint runs here")]
