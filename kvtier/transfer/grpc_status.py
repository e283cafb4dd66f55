"""One error class, one gRPC status, in both directions.

Promise: an error raised in the daemon is raised in the client as the same class with the same text
and remedy; a status that no kvtier daemon made (a proxy, the transport) becomes the nearest class.
The class and the remedy travel in trailing metadata, percent-encoded, because metadata may hold
printable ASCII alone.

Functions without state: usable from any thread.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

import grpc
import grpc.aio

from kvtier import errors
from kvtier.errors import KvtierError

__all__ = ["ERROR_KEY", "REMEDY_KEY", "code_of", "from_rpc_error", "to_status"]

ERROR_KEY: Final = "kvtier-error"
REMEDY_KEY: Final = "kvtier-remedy"

#: Peers drop calls whose metadata passes 8 KiB; percent-encoding can make three bytes of one.
_TEXT_BYTES_MAX: Final = 1024
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_CODES: Final[dict[type[KvtierError], grpc.StatusCode]] = {
    errors.UnknownConfigKey: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidConfigValue: grpc.StatusCode.INVALID_ARGUMENT,
    errors.KeyLengthError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PageSizeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LayoutError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LimitExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ChunkError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidFrame: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownHandle: grpc.StatusCode.NOT_FOUND,
    errors.UnknownNamespace: grpc.StatusCode.NOT_FOUND,
    errors.GenerationConflict: grpc.StatusCode.ABORTED,
    errors.NamespaceMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseExpired: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseUnknown: grpc.StatusCode.NOT_FOUND,
    errors.Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotDurable: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotEnoughMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DaemonUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ClientClosed: grpc.StatusCode.CANCELLED,
    errors.ForkedClient: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CorruptPage: grpc.StatusCode.DATA_LOSS,
    errors.CorruptRecord: grpc.StatusCode.DATA_LOSS,
    errors.StaleGeneration: grpc.StatusCode.ABORTED,
    errors.NonFinite: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TierIOError: grpc.StatusCode.INTERNAL,
    errors.DirectoryError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.MissingExtra: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotImplementedYet: grpc.StatusCode.UNIMPLEMENTED,
}

_CLASSES: Final[dict[str, type[KvtierError]]] = {kind.__name__: kind for kind in _CODES}

#: What a status means that carries no class of ours. Everything else is DaemonUnavailable: whoever
#: answered there did not answer as a kvtier daemon does.
_BY_CODE: Final[dict[grpc.StatusCode, type[KvtierError]]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Busy,
    grpc.StatusCode.UNIMPLEMENTED: errors.NotImplementedYet,
    grpc.StatusCode.INVALID_ARGUMENT: errors.ChunkError,
    grpc.StatusCode.OUT_OF_RANGE: errors.LimitExceeded,
    grpc.StatusCode.NOT_FOUND: errors.UnknownHandle,
    grpc.StatusCode.FAILED_PRECONDITION: errors.NamespaceMismatch,
    grpc.StatusCode.ABORTED: errors.StaleGeneration,
    grpc.StatusCode.DATA_LOSS: errors.CorruptPage,
}

_REMEDY_BY_CODE: Final[dict[grpc.StatusCode, str]] = {
    grpc.StatusCode.UNAVAILABLE: "see that the daemon runs and listens at this address",
    grpc.StatusCode.DEADLINE_EXCEEDED: "compute the page; raise `deadline` if this happens often",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "try again later, with fewer calls at once",
    grpc.StatusCode.CANCELLED: "see that the daemon still runs; its log says why a call is ended",
    grpc.StatusCode.UNIMPLEMENTED: "the methods of this daemon are listed in its capabilities",
}
_REMEDY_ELSE: Final = (
    "read the daemon's log; something between it and this client may have answered"
)


def code_of(error: KvtierError) -> grpc.StatusCode:
    """The one status of the error's class."""
    return _CODES[type(error)]


def to_status(error: KvtierError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """(code, details, trailing metadata) of `error`, in the order `context.abort` takes them."""
    metadata = (
        (ERROR_KEY, type(error).__name__),
        (REMEDY_KEY, quote(_short(error.remedy), safe=_PRINTABLE)),
    )
    return code_of(error), _short(str(error)), metadata


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvtierError:
    """The error that the other side raised, or the nearest class for a status that is not ours."""
    code = error.code()
    metadata = error.trailing_metadata()
    fields = {} if metadata is None else dict(tuple(metadata))
    details = error.details() or f"gRPC status {code.name}"
    kind = _CLASSES.get(str(fields.get(ERROR_KEY, "")))
    # A class that does not belong to this status was put there by something else.
    if kind is not None and _CODES[kind] is code:
        return kind(details, remedy=unquote(str(fields.get(REMEDY_KEY, ""))) or _REMEDY_ELSE)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        return errors.LimitExceeded(
            details, remedy="keep messages under message_bytes_max of the daemon's capabilities"
        )
    kind = _BY_CODE.get(code, errors.DaemonUnavailable)
    return kind(details, remedy=_REMEDY_BY_CODE.get(code, _REMEDY_ELSE))


def _short(text: str) -> str:
    return text.encode(errors="replace")[:_TEXT_BYTES_MAX].decode(errors="ignore")
