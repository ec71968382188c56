"""A data service for Ray Train: the batches of a training job are computed by data hosts that Ray places.

::

    driver              DataService                service.py
      |  makes          Coordinator (actor)        actors.py     child: the hub, coordinator.py
      |                   |  owns, adds, removes                   (scaling.py decides)
      |                 DataHost (actors)          actors.py     child: hetero launch --join
    workers of Ray Train    connect                worker.py     become the ranks of the hub

child.py       starts the process of an actor, and watches it
job.py         ``hetero launch --platform ray``: a whole job on Ray, without Ray Train
groups.py      the groups of such a job
job_host.py    a host of such a job
connection.py  the connection of a driver to Ray, and what Ray's errors mean
head.py        watches the head of the Ray cluster

Ray places and restarts the actors, and counts the resources that they use. Batches and heartbeats never go through Ray.
They use hetero's own connections, whose gRPC runs in the child processes and in the workers. This package imports Ray
only when a `DataService` or a job is made.
"""

from __future__ import annotations

from hetero.ray.service import DataService

__all__ = ["DataService"]
