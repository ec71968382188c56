"""The bytes and CPU seconds of a sample in each form of `hetero.decide.planning.candidates.FORMS`."""

from __future__ import annotations

from hetero.metrics.profile.profile import Profile
from hetero.report.plan import UINT8

__all__ = ["Forms"]

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


class Forms:
    """What a sample costs on its way, by form.

    Args:
        profile: The figures of the job.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._bytes = profile.wire_bytes_per_sample.value if profile.wire_bytes_per_sample else 0.0

    def bytes_per_sample(self, form: str) -> float:
        """Return the bytes of one sample on the network. 0 if not measured."""
        if form == UINT8:
            leaves = [leaf for leaf in self._profile.leaves if leaf.fits_uint8]
            wide = sum(leaf.bytes_per_sample for leaf in leaves)
            narrow = sum(leaf.bytes_per_sample / _ITEM_BYTES.get(leaf.dtype, 1) for leaf in leaves)
            # The bytes on the network include a share of the header, so only the arrays' difference counts.
            return self._bytes - wide + narrow
        return self._bytes * next((codec.ratio for codec in self._profile.codecs if codec.name == form), 1.0)

    def codec_s(self, form: str) -> tuple[float, float]:
        """Return the CPU seconds per sample that a compression costs an endpoint and a rank."""
        for codec in self._profile.codecs:
            if codec.name == form:
                return codec.encode_cpu_s_per_sample, codec.decode_cpu_s_per_sample
        return 0.0, 0.0
