"""The control plane tracks hosts, ranks and endpoints, and decides when and why the job ends.

The control plane carries no batches. The launcher of each host takes part in it with a `Hub`, and each rank with a
`RankSession`.

    launcher of host A  <-- Heartbeat, in both directions, one thread per peer -->  launcher of host B
        ^
        |   register, report, watch: over the transport for batches
        |
    ranks of host A

hub.py              launcher: the gRPC server, and the membership behind a lock
members/            the hosts, ranks and endpoints of a job, and how a host joins
peers.py            launcher: what it knows about another host
stop_points.py      launcher: where the ranks end together
peer_connection.py  launcher: a thread per other host, which sends the heartbeats
causes.py           which failure is the root cause, and whether a restart helps
rank_server.py      launcher: the port for the ranks of this host
launcher_link.py    rank: the connection to the launcher
rank/               rank: the session, and how it ends
status.py           the records that hosts and ranks send, and their messages (protos/hetero/v1/control.proto)
metric_series.py    the part of these messages with the values that ranks have logged
security.py         the job's token, and the interceptor that checks every call. Endpoints use it too

Threads of a launcher: The main thread updates the status and waits for changes. ``peer-HOST`` sends heartbeats to one
other host. ``control_N`` serves RPCs. ``ranks`` admits ranks, and each ``rank`` serves one connection. All of them use
the membership through `Hub.membership`, which holds the lock. A rank has ``hetero-watch``, which follows the directory
and the request to stop, and ``hetero-report``, which reports about once a second.

The life of a host (`HostState`)::

    data host      INIT -> SERVING -> DRAINING -> DONE
    trainer host   INIT -> WAIT_PEERS -> TRAINING -> DONE         each state may change to FAILED
                    ^                       |
                    +-- restart of the -----+
                        trainer group

How a job ends: If a rank or launcher fails, its host puts a `Cause` into its status. The arbiter (the living trainer
host with the lowest rank) collects causes for a moment and chooses the root. It then ends the job or begins the next
generation of the trainer group. The arbiter's heartbeats carry the decision to every host.
"""
