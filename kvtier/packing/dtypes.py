"""The number formats that a segment may hold, by the names that torch and ml_dtypes share."""

from __future__ import annotations

from kvtier.errors import LayoutError

__all__ = ["DTYPE_BYTES", "FLOAT_MAX", "dtype_name"]

#: Bytes of one number.
DTYPE_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

#: The largest finite number of the formats that a codec can pack.
FLOAT_MAX: dict[str, float] = {
    "bfloat16": (2.0 - 2.0**-7) * 2.0**127,
    "float16": 65504.0,
    "float32": (2.0 - 2.0**-23) * 2.0**127,
}


def dtype_name(dtype: object) -> str:
    """The plain name of a dtype given as a string, a torch dtype or a numpy dtype.

    Raises LayoutError for a format that a page cannot hold.
    """
    given = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype)
    name = str(given).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise LayoutError(
            f"dtype {dtype!r} is not a format that a page can hold",
            remedy=f"use one of {', '.join(sorted(DTYPE_BYTES))}",
        )
    return name
