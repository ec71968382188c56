"""The profile of a job: what its steps and its samples cost, measured while it ran.

profile.py   the measured figures of a job (`Profile`), their limits, and the reader and writer of ``profile.json``
parts.py     the measurements of one rank or one host
assembly.py  makes a profile from the measurements of all ranks and hosts
text.py      shows a profile as Markdown
"""
