"""The machine below: processes, logs, files, memory. Nothing here knows about batches or jobs.

cgroups.py           CPU and memory limits of this container
documents.py         bounded reading, and writing, of JSON, YAML and text files
fault_injection.py   faults that tests and drills switch on by environment
line_relay.py        passes on what a child process prints, line by line
logs.py              log lines with their prefix, on one line each
memory.py            malloc's thresholds
process.py           starting, watching and ending child processes
scripts.py           where the user's script is: a file or a module
workdir.py           private folders that go away with their process
"""
