"""Decides about a job, before or after it runs. Nothing that runs a job imports this.

profile.py  makes a profile from the report of a finished run
planning/   chooses machines from a profile
canary/     forecasts a whole job from short runs
studies/    plans, runs and compares many jobs
pages/      HTML pages about runs, and what the pages of plans, canaries and studies share
"""
