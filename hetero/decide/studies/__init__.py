"""Studies: runs, planned as a table, executed, measured and compared.

::

    STUDY.yaml -> Study -> StudyPlan (cells, runs) -> findings
                                |
                             conduct, with an Executor and the ledger -> RunResult -> rows, statistics -> CSV, page

study_file.py   reads STUDY.yaml (`Study`)
file_values.py  reads single values of the file
cells/          the combinations of levels that a study runs
placeholders.py replaces {name} in texts by levels and quantities
plan.py         the runs with their arguments and their order (`StudyPlan`)
checks.py       mistakes that the plan shows (ST-01 to ST-11)
runs.py         what a run starts (`PlannedRun`), how it ended (`RunResult`), and the interface `Executor`
executors.py    executes runs as child processes: ``hetero simulate``, ``hetero launch``
child_job.py    the processes of one run, and their output
conduct.py      executes the runs that are left, within the budget
ledger.py       ``runs.jsonl``, which lets a killed study go on
statistics.py   intervals, time to quality, quality after time
output/         shows the results
study.py        a study from its file to its results

`hetero.sagemaker.study_executor` executes runs on SageMaker. The main thread plans, decides and writes the ledger.
A thread ``study-run`` executes each run, and a thread ``study-output`` reads the output of each of its processes.
Importing this package imports neither NumPy nor matplotlib.
"""
