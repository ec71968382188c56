"""`canary`: forecast the job of an estimator from training jobs on a few percent of its files.

canary.py      `canary`: plans the jobs, executes them and forecasts the whole
identity.py    what determines the work of a job, because results of another job must not be used
manifests.py   lists the objects of a channel, writes manifests, and makes the inputs that name them
watching.py    a finished job as a point: its phases, and CPU, memory and GPU from CloudWatch

The forecast itself is `hetero.decide.canary`. The jobs are runs of `hetero.decide.studies`, so a killed study goes on.
"""
