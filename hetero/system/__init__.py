"""The machine: processes, logs, files, memory. This package does not know batches or jobs.

cgroups.py           CPU and memory limits of this container
cpu_pressure.py      how short the CPUs of the machine are
diagnosis.py         what hetero doctor reports: ok, warning or error, with advice
documents.py         bounded reading, and writing, of JSON, YAML and text files
extensions.py        parts of hetero that other packages may bring
fault_injection.py   faults that an environment variable enables, for tests and drills
findings.py          what checks found, with what to do
line_relay.py        copies the output of child processes line by line
logs.py              log lines with a prefix, each on one line
memory.py            memory of a process, malloc's thresholds
process.py           starting, watching and ending child processes
quantities.py        numbers with units, for tables
records.py           dataclasses to JSON and back, with a check of every value
scripts.py           finds the user's script, a file or a module
text.py              makes text from users and other processes safe to show
waits.py             times to wait that nothing in the situation decides
workdir.py           private folders that are removed with their process
"""
