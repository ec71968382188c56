"""The ranks of a trainer host, and who starts them.

ranks.py            starts the agent that fits the framework, and watches it
torchrun_agent.py   torch's own agent, as a child of the launcher
tf_agent.py         starts ranks of any other framework
mpi_ranks.py        ranks that mpirun or a platform has started already
parent_launcher.py  what started this process: mpirun, torchrun, or nothing
leader.py           one launcher leads where every rank was given a copy of it
rank.py             wraps the user's script in each rank
rank_folder.py      the folder in which ranks and launcher leave each other files
"""
