"""Finds problems of this host before a job starts. Each check looks for a problem that has made jobs fail.

The examination works on a host of a job, also while the job runs, and on a machine outside any cluster. It changes
nothing and shows no secrets. ``hetero doctor`` runs it:

snapshot.py      the input of the examination: options, environment, platform, cluster
examination.py   runs all subjects in parallel, and shows their diagnoses as text or JSON
parallel.py      runs tasks in parallel, and does not wait for those that take too long

Each subject is a function that receives the snapshot and returns diagnoses:

cluster.py       the platform, its description of the cluster, and the names of the hosts
connections.py   the ports of this host and of the other hosts
leftovers.py     processes and files of earlier runs
limits.py        CPUs, open files, shared memory, the memory of endpoints, folders that a job writes to
signals.py       whether a stop reaches the launcher
token.py         the token and the certificates
versions.py      Python and packages
"""

from __future__ import annotations

from hetero.doctor.examination import examine, render_text, to_json
from hetero.doctor.snapshot import Snapshot, take_snapshot
from hetero.documents.diagnosis import Diagnosis, Level

__all__ = ["Diagnosis", "Level", "Snapshot", "examine", "render_text", "take_snapshot", "to_json"]
