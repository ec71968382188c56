"""Decides before a job: which machines, what it costs, or that data hosts do not pay.

profile.py     the measured figures of a job (`Profile`), and the reader and writer of ``profile.json``
"""

from __future__ import annotations

from hetero.planning.profile import Profile, load_profile, write_profile

__all__ = ["Profile", "load_profile", "write_profile"]
