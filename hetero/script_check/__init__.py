"""``hetero check SCRIPT``: finds what would go wrong, or differ, on data hosts. No job is started.

check.py     starts `run` in another process, waits for it, and returns what it found
run.py       that process: runs the script as a rank whose batches come from endpoints, and records what it finds
session.py   what takes the place of the launcher there: two endpoints in an empty folder, short passes, a limit of time
source.py    search of the script's source for the lines that cause what was found
findings.py  what was found: file, line, what, and what to write

The script runs as in a job with data hosts, and all checks of such a job apply: globals and batches are compared, each
batch is computed twice, and what cannot travel is refused. In addition, passes end after three batches, because the
loop should come to its second epoch. The endpoints run in an empty folder, where relative paths fail.
"""

from hetero.script_check.check import DEFAULT_SECONDS, check_script
from hetero.script_check.findings import Finding, findings_json, findings_text

__all__ = ["DEFAULT_SECONDS", "Finding", "check_script", "findings_json", "findings_text"]
