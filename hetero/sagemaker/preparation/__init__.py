"""`prepare`: change an estimator into one that starts a heterogeneous job.

staging.py             `prepare`: copies the code, adds hetero's files, changes the estimator
adapters.py            reads and changes estimators of each version of the SDK
ignore_file.py         chooses the files of the source folder that are not copied
wheel.py               builds a wheel of the running hetero, for the job
metric_definitions.py  patterns for SageMaker to read the launcher's figures from a job's logs
launcher.txt           the launcher that `prepare` adds to the code

The code runs in the process that calls `prepare`: a notebook, a script or launchers/submit_job.py.
"""
