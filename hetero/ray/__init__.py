"""A data service for Ray Train: the batches of a training job are computed by data hosts that Ray places.

::

    driver              DataService                service.py
      |  makes          Coordinator (actor)        actors.py     child: the hub, coordinator.py
      |                   |  owns, adds, removes                   (scaling.py decides)
      |                 DataHost (actors)          actors.py     child: hetero launch --join
    workers of Ray Train    connect                worker.py     become the ranks of the hub

child.py     starts the process of an actor, and watches it
job.py       ``hetero launch --platform ray``, which needs no Ray Train. groups.py has its groups, job_host.py is one
             of its hosts, connection.py connects its driver, head.py watches the head of the cluster

Ray places, restarts and counts. Batches and heartbeats never go through Ray: they use hetero's own connections, whose
gRPC runs in the child processes and in the workers. Nothing here imports Ray before a `DataService` is made.
"""

from __future__ import annotations

from hetero.ray.service import DataService

__all__ = ["DataService"]
