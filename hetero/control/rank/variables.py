"""Environment variables that the launcher sets for its ranks. With them, ranks can connect."""

from __future__ import annotations

__all__ = ["HOST_VARIABLE", "LAUNCHER_VARIABLE", "REMOTE_VARIABLE", "RESTART_VARIABLE", "TLS_VARIABLE"]

LAUNCHER_VARIABLE = "HETERO_LAUNCHER"
"""Environment variable with the address of this host's launcher. See `hetero.control.launcher_link`."""
REMOTE_VARIABLE = "HETERO_REMOTE"
"""Environment variable with 1 if endpoints compute the batches of the ranks, else 0."""
HOST_VARIABLE = "HETERO_LAUNCHER_HOST"
"""Environment variable with the name of this host, which its certificate contains."""
TLS_VARIABLE = "HETERO_TLS_DIR"
"""Environment variable with the certificates' folder. The launcher sets it from its option ``tls_dir``."""
RESTART_VARIABLE = "HETERO_RESTART_COUNT"
"""Environment variable with the number of restarts of the trainer group so far, 0 at first."""
