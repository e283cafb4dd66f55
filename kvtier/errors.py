"""Every error kvtier raises, as one tree; each leaf says what to do in `.remedy`.

    KvtierError
    ├── ConfigError
    │   ├── UnknownConfigKey      a key nobody reads; the nearest known one is named
    │   └── InvalidConfigValue    a value outside its range, with where it came from
    ├── InvalidInput              the caller's arguments; nothing was changed
    │   ├── KeyLengthError        a key that is not 32 bytes
    │   ├── PageSizeError         a page longer or shorter than its layout says
    │   ├── LayoutError           a layout that cannot be stored, or differs from what is stored
    │   ├── LimitExceeded         over a limit of GetCapabilities
    │   ├── ChunkError            a bulk stream that breaks its rules
    │   └── InvalidFrame          a packet of the local plane that breaks its rules
    ├── NamespaceError
    │   ├── UnknownHandle         a handle or session of another boot, or one that has ended
    │   ├── UnknownNamespace
    │   ├── GenerationConflict    a bump whose expected generation is not the current one
    │   └── NamespaceMismatch     the shard or the weights differ from what the namespace has
    ├── LeaseError
    │   ├── LeaseExpired
    │   └── LeaseUnknown
    ├── ResourceError
    │   ├── Busy                  no room that may be taken now
    │   ├── NotDurable            stored in host memory, but not on NVMe as asked
    │   └── NotEnoughMemory       the machine cannot give what the configuration asks for
    ├── AvailabilityError
    │   ├── DaemonUnavailable     nobody answers at this address
    │   ├── DeadlineExceeded
    │   ├── ClientClosed          used after close()
    │   └── ForkedClient          used in a child process
    ├── IntegrityError
    │   ├── CorruptPage           bytes that fail their checksum
    │   ├── CorruptRecord         a record header that fails its checksum or makes no sense
    │   ├── StaleGeneration       a ref, handle or commit of an older allocation
    │   └── NonFinite             numbers that cannot be packed
    ├── TierIOError               a tier's device failed
    ├── DirectoryError            the daemon directory: locked by another, or of another version
    ├── MissingExtra              an optional dependency is not installed
    └── NotImplementedYet         defined in the protocol, not in this version

The parents are never raised themselves. A leaf has exactly one gRPC status
(transfer/grpc_status.py).
"""

from __future__ import annotations

__all__ = [
    "AvailabilityError",
    "Busy",
    "ChunkError",
    "ClientClosed",
    "ConfigError",
    "CorruptPage",
    "CorruptRecord",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "DirectoryError",
    "ForkedClient",
    "GenerationConflict",
    "IntegrityError",
    "InvalidConfigValue",
    "InvalidFrame",
    "InvalidInput",
    "KeyLengthError",
    "KvtierError",
    "LayoutError",
    "LeaseError",
    "LeaseExpired",
    "LeaseUnknown",
    "LimitExceeded",
    "MissingExtra",
    "NamespaceError",
    "NamespaceMismatch",
    "NonFinite",
    "NotDurable",
    "NotEnoughMemory",
    "NotImplementedYet",
    "PageSizeError",
    "ResourceError",
    "StaleGeneration",
    "TierIOError",
    "UnknownConfigKey",
    "UnknownHandle",
    "UnknownNamespace",
    "leaves",
]


class KvtierError(Exception):
    """Base of all errors. `str(error)` names the thing; `error.remedy` says what to do about it."""

    def __init__(self, message: str, *, remedy: str) -> None:
        if type(self).__subclasses__():
            raise TypeError(
                f"{type(self).__name__} is a parent in the error tree: raise one of its leaves"
            )
        super().__init__(message)
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.remedy))


def _rebuild(kind: type[KvtierError], message: str, remedy: str) -> KvtierError:
    return kind(message, remedy=remedy)


class ConfigError(KvtierError): ...


class UnknownConfigKey(ConfigError): ...


class InvalidConfigValue(ConfigError): ...


class InvalidInput(KvtierError, ValueError): ...


class KeyLengthError(InvalidInput): ...


class PageSizeError(InvalidInput): ...


class LayoutError(InvalidInput): ...


class LimitExceeded(InvalidInput): ...


class ChunkError(InvalidInput): ...


class InvalidFrame(InvalidInput): ...


class NamespaceError(KvtierError): ...


class UnknownHandle(NamespaceError): ...


class UnknownNamespace(NamespaceError): ...


class GenerationConflict(NamespaceError): ...


class NamespaceMismatch(NamespaceError): ...


class LeaseError(KvtierError): ...


class LeaseExpired(LeaseError): ...


class LeaseUnknown(LeaseError): ...


class ResourceError(KvtierError): ...


class Busy(ResourceError): ...


class NotDurable(ResourceError): ...


class NotEnoughMemory(ResourceError): ...


class AvailabilityError(KvtierError): ...


class DaemonUnavailable(AvailabilityError): ...


class DeadlineExceeded(AvailabilityError, TimeoutError): ...


class ClientClosed(AvailabilityError): ...


class ForkedClient(AvailabilityError): ...


class IntegrityError(KvtierError): ...


class CorruptPage(IntegrityError): ...


class CorruptRecord(IntegrityError): ...


class StaleGeneration(IntegrityError): ...


class NonFinite(IntegrityError): ...


class TierIOError(KvtierError): ...


class DirectoryError(KvtierError): ...


class MissingExtra(KvtierError): ...


class NotImplementedYet(KvtierError): ...


def leaves() -> list[type[KvtierError]]:
    """Every error that can be raised, in the order of the tree."""
    found: list[type[KvtierError]] = []
    stack: list[type[KvtierError]] = [KvtierError]
    while stack:
        kind = stack.pop(0)
        children = kind.__subclasses__()
        if children:
            stack = children + stack
        elif kind.__module__ == __name__:
            found.append(kind)
    return found
