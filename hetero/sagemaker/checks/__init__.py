"""`check`: find mistakes in a training job before the job costs money.

check.py            `check` and `check_request`, which return findings with the numbers SM-01 to SM-27 (without SM-05)
rules.py            one function for each kind of mistake
security_groups.py  asks AWS whether the hosts of a VPC can reach each other
facts.py            facts that the rules derive from a request: roles, hardware, storage, secrets

The code runs in the process that calls `check`, and in the command `hetero check`.
"""
