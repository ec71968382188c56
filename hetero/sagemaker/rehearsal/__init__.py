"""`rehearse`: run a training job on simulated hosts of this machine.

rehearse.py    `rehearse`: records request and code, starts ``hetero simulate --request``
local_job.py   runs the job of a request on simulated hosts
inputs.py      the files that each host gets from each channel
pipes.py       Pipe mode: streams a channel's data through FIFOs
containers.py  the program of each host's container
toolkit.py     runs SageMaker's own training toolkit on a simulated host

rehearse.py runs in the process that calls `rehearse`. toolkit.py is a separate program on every host.
The other modules run in ``hetero simulate``.
"""
