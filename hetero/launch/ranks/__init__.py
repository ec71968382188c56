"""Starts, watches and ends the ranks of a trainer host.

ranks.py            starts the agent of the framework and watches it
torchrun_agent.py   torch's own agent, as a child of the launcher
tf_agent.py         hetero's agent, which starts ranks of TensorFlow
mpi_ranks.py        ranks whose processes mpirun has made already
parent_launcher.py  finds out whether mpirun or torchrun started this process
leader.py           connects the copies of a launcher on one host: one leads, the others follow
rank.py             wraps the user's script in each rank
rank_folder.py      the folder for output and failure notes of the ranks
"""
