"""What the planner is compared with: the simulated truth, the best cluster in it, and what other rules choose.

    scenarios -> profiles -> planner    the planner's choice   --.
    scenarios -> search                 the best choice        --+--> simulation -> USD per 1,000 steps
    scenarios -> rules                  choices of other rules --'

simulation.py   the truth: a discrete-event simulation of a job on a cluster
workload.py     what is simulated, and what comes out: workload, hosts, cluster, result
draws.py        the random numbers of a simulation
hosts.py        a host's busy processes and NIC
processors.py   how fast the processes of a host run when they share its vCPUs
readers.py      a rank's window, its choice of endpoints, and its hedges
machines.py     the machine types of the scenarios, and their prices
scenarios.py    the random and the constructed jobs
choices.py      what a planner, a rule or the search may choose
search.py       the cheapest choice in the truth
bounds.py       lower bounds of step times, for the search
rules.py        the rules of others
profiles.py     what the planner may see of a scenario
planner.py      the planner under test, behind one function

Only the last two import hetero. The first six share nothing with `hetero.decide.planning`, not even a formula.
"""
