"""``--trainer-endpoints auto``, the default: chooses the number of endpoints on trainer hosts while the job runs.

The first trainer host measures and decides for all trainer hosts, because every rank takes part in each step. If each
host decided alone, a host could not tell whether its own trial or the trial of another host has changed the steps.

trainer_endpoints.py  runs the search in a launcher, and applies its decisions to the pool of its host
controller.py         the search, a state machine that is fed with steps
decisions.py          the phases of the search, its decisions, and its inputs other than steps
windows.py            the steps of a host, and the means over a window of them
memory.py             how many more endpoints the memory of a host holds
"""
