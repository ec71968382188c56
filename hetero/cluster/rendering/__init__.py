"""What platforms share that write the script or manifest of a job, for ``hetero render``.

request.py     what the user asks for
kubernetes.py  what the manifests of Kubernetes have in common
spot.py        what they say for capacity that the platform may take back

All are pure: a request becomes a text. The same platform reads in each host what its text has told the host.
"""
