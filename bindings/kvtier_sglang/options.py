"""The options of the binding: keys of the backend's extra config that begin with `kvtier_`.

Values, usable from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.errors import InvalidConfigValue, UnknownConfigKey
from kvtier_sglang.at_rest import AtRest

__all__ = ["Options"]

_PREFIX: Final = "kvtier_"
#: SGLang's own threads wait for these calls; it gives up on a thread after ten seconds.
_SECONDS_MAX: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`endpoint` as kvtier.connect takes it, None for the default one.

    `model_id` and `weights_revision` replace what SGLang says of the model; they matter where two
    servers name one checkpoint differently, or two checkpoints alike. `weights_fixed` says that the
    weights are never updated while the server runs. `kv_dtype` is the format of
    the numbers in a pool of uint8 ("float8_e4m3fn"), where SGLang does not say. `model_layers` is
    the number of layers of the whole model, needed with pipeline parallelism alone. `salt` keeps
    servers apart that would share. `at_rest` is the name of an AtRest. Deadlines in seconds.
    `events_*` are those of kvtier_sglang.events; without an endpoint there are none.
    """

    endpoint: str | None = None
    tenant: str = "default"
    salt: str = ""
    model_id: str = ""
    weights_revision: str = ""
    weights_fixed: bool = False
    kv_dtype: str = ""
    model_layers: int = 0
    at_rest: str = AtRest.RAW.value
    exists_deadline: float = 0.1
    get_deadline: float = 2.0
    set_deadline: float = 2.0
    events_endpoint: str = ""
    events_replay_endpoint: str = ""
    events_topic: str = ""
    events_allow_network: bool = False
    events_host_medium: str = "EXTERNAL"

    @classmethod
    def of(cls, extra_config: Mapping[str, Any] | None) -> Options:
        """Raises UnknownConfigKey, InvalidConfigValue. Keys of others are left alone."""
        given = {
            key.removeprefix(_PREFIX): value
            for key, value in (extra_config or {}).items()
            if key.startswith(_PREFIX)
        }
        defaults = {name: getattr(_DEFAULTS, name) for name in cls.__slots__}
        for name, value in given.items():
            if name not in defaults:
                raise UnknownConfigKey(
                    f"{_PREFIX}{name} is no option of the SGLang binding",
                    remedy=f"use one of {', '.join(_PREFIX + known for known in defaults)}",
                )
            _check(name, value, defaults[name])
        AtRest.of(given.get("at_rest", defaults["at_rest"]))
        return cls(**given)


def _check(name: str, value: object, default: object) -> None:
    if isinstance(default, bool):
        is_right, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        is_right = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 < value <= _SECONDS_MAX
        )
        wanted = f"seconds, more than 0 and up to {_SECONDS_MAX:g}"
    elif isinstance(default, int):
        is_right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        wanted = "a whole number"
    else:
        is_right, wanted = isinstance(value, str), "text"
    if not is_right:
        raise InvalidConfigValue(f"{_PREFIX}{name} is {value!r}", remedy=f"pass {wanted}")


_DEFAULTS: Final = Options()
