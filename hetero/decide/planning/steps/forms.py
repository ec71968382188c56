"""The bytes and CPU seconds of a sample in each form of `hetero.report.plan.FORMS`."""

from __future__ import annotations

from hetero.metrics.profile.profile import Profile
from hetero.report.plan import UINT8

__all__ = ["bytes_per_sample", "codec_s"]

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


def bytes_per_sample(profile: Profile, form: str) -> float:
    """Return the bytes of one sample on the network. 0 if not measured."""
    measured = profile.wire_bytes_per_sample.value if profile.wire_bytes_per_sample else 0.0
    if form == UINT8:
        leaves = [leaf for leaf in profile.leaves if leaf.fits_uint8]
        wide = sum(leaf.bytes_per_sample for leaf in leaves)
        narrow = sum(leaf.bytes_per_sample / _ITEM_BYTES.get(leaf.dtype, 1) for leaf in leaves)
        # The measured bytes include a share of the header, which stays. So change only the bytes of the arrays.
        return measured - wide + narrow
    # A form without a codec is sent as it is.
    return measured * next((codec.ratio for codec in profile.codecs if codec.name == form), 1.0)


def codec_s(profile: Profile, form: str) -> tuple[float, float]:
    """Return the CPU seconds per sample that the form's compression costs an endpoint, and a rank. Both may be 0."""
    for codec in profile.codecs:
        if codec.name == form:
            return codec.encode_cpu_s_per_sample, codec.decode_cpu_s_per_sample
    return 0.0, 0.0
