"""`submit`: start a training job, and start it again while SageMaker lacks instances for it.

submit.py     `submit`: attempts to start the job, waits between attempts, and follows the job until it ends
shortages.py  finds in the service's responses which instances the service lacks

The code runs in the process that calls `submit`.
"""
