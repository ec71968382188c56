"""What the scripts and manifests of ``hetero render`` share. Each script or manifest starts a job on a platform.

request.py     what the user asks for
kubernetes.py  what the manifests of Kubernetes have in common
spot.py        what scripts and manifests have for capacity that the platform may take back

All functions are pure: they turn a request into a text. The text sets environment variables on each host. On the host,
the module of the same platform in platforms/ reads these variables, and describes the cluster from them.
"""
