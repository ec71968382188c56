"""The hosts, ranks and endpoints of a job, and how a host joins.

membership.py    the state machine of the job's hosts, without threads
host_table.py    the hosts of the job and what each has reported, without decisions
admission.py     how a data host joins a running job
joined_hosts.py  the hosts that have joined and left
registrar.py     collects the hosts where the platform does not list them
joined.py        the record of a host that has joined
past_ranks.py    figures of ranks from before a restart
directory.py     the current endpoints, which launchers publish and readers follow
"""
