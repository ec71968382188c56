"""The launcher: the process that runs one host's part of a job, from start to end.

entry.py         starts the launcher as a platform's entry point
launcher.py      the launcher process, its failures and its exit code
host.py          one host: control plane, endpoints, output, signals
roles.py         the steps of a data host and of a trainer host
placement.py     how many endpoints and ranks a host runs
addresses.py     addresses of the other hosts
reporting/       what a launcher shows and writes about a run
job_token.py     the files that hetero.sagemaker.prepare adds to the code, such as the token
control_plane.py the hub of a host, and what all hosts must agree on
joining.py       joins a running job, or registers with the main host of a job
wanted_hosts.py  how many data hosts the job could use
failure.py       the failure file
watchdog.py      ends a launcher whose main loop is stuck
data_services/   what data hosts run: endpoints or tf.data.service
auto_endpoints/  --trainer-endpoints auto: how many endpoints trainer hosts run
ranks/           starts ranks: PyTorch, TensorFlow, MPI
"""
