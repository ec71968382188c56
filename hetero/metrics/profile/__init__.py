"""The profile of a job: what its steps and its samples cost, measured while it ran.

profile.py   the measured figures of a job (`Profile`), their limits, and the reader and writer of ``profile.json``
parts.py     what each rank and host contributes
assembly.py  makes a profile from these parts
text.py      shows a profile as Markdown
"""
