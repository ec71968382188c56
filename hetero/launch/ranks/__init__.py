"""Starts, watches and ends the ranks of a trainer host.

starter.py          the interface of a rank starter
ranks.py            starts and watches the agent
agent.py            the process between the launcher and the ranks: starts them, and ends them when one fails
frameworks.py       what ranks of each training framework need; the registry of frameworks
mpi_ranks.py        the starter for mpirun, which has already made a process for each rank
parent_launcher.py  finds out whether mpirun or torchrun started this process
leader.py           the local leader of the launchers that mpirun or torchrun made on one host, and its followers
rank.py             runs the user's script in each rank
observed.py         times the imports of a canary run
rank_folder.py      the folder for the output of the ranks, and the root cause of their failures
"""
