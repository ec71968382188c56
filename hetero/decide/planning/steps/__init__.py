"""How long a step takes on a cluster, computed from the profile of a job.

uncertain.py  the figures of a profile with their uncertainty, for the intervals
forms.py      the bytes and CPU seconds of a sample in each form on the network
endpoints.py  how many endpoints a host runs
sharing.py    how fast the processes of a host are if they share its CPUs
timeline.py   follows each batch of a job through the data plane (`Timeline`)
timelines.py  the timelines of clusters, and the calibration with the measured step time
model.py      what limits a step, and the step time with its interval (`StepModel`)
"""
