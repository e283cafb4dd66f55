from kvtier.v1 import page_pb2 as _page_pb2
from kvtier.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WATCH_KIND_UNSPECIFIED: _ClassVar[WatchKind]
    WATCH_KIND_SNAPSHOT: _ClassVar[WatchKind]
    WATCH_KIND_SNAPSHOT_END: _ClassVar[WatchKind]
    WATCH_KIND_STORED: _ClassVar[WatchKind]
    WATCH_KIND_REMOVED: _ClassVar[WatchKind]
    WATCH_KIND_BUMPED: _ClassVar[WatchKind]
    WATCH_KIND_POOL: _ClassVar[WatchKind]
    WATCH_KIND_POOL_GONE: _ClassVar[WatchKind]
    WATCH_KIND_ALIVE: _ClassVar[WatchKind]
WATCH_KIND_UNSPECIFIED: WatchKind
WATCH_KIND_SNAPSHOT: WatchKind
WATCH_KIND_SNAPSHOT_END: WatchKind
WATCH_KIND_STORED: WatchKind
WATCH_KIND_REMOVED: WatchKind
WATCH_KIND_BUMPED: WatchKind
WATCH_KIND_POOL: WatchKind
WATCH_KIND_POOL_GONE: WatchKind
WATCH_KIND_ALIVE: WatchKind

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("session_id", "tenant", "salt", "layout", "shard", "client_name", "fingerprint")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    tenant: str
    salt: bytes
    layout: _page_pb2.Layout
    shard: _page_pb2.Shard
    client_name: str
    fingerprint: bytes
    def __init__(self, session_id: _Optional[int] = ..., tenant: _Optional[str] = ..., salt: _Optional[bytes] = ..., layout: _Optional[_Union[_page_pb2.Layout, _Mapping]] = ..., shard: _Optional[_Union[_page_pb2.Shard, _Mapping]] = ..., client_name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("session_id", "handle", "boot_id", "fingerprint", "generation", "raw_bytes", "fp8_bytes", "session_ttl_ms", "namespace_number")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    FP8_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    handle: int
    boot_id: int
    fingerprint: bytes
    generation: int
    raw_bytes: int
    fp8_bytes: int
    session_ttl_ms: int
    namespace_number: int
    def __init__(self, session_id: _Optional[int] = ..., handle: _Optional[int] = ..., boot_id: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., generation: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., fp8_bytes: _Optional[int] = ..., session_ttl_ms: _Optional[int] = ..., namespace_number: _Optional[int] = ...) -> None: ...

class CallHints(_message.Message):
    __slots__ = ("session", "ttl_ms", "priority", "traceparent")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    session: str
    ttl_ms: int
    priority: int
    traceparent: str
    def __init__(self, session: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("handle", "keys", "hints", "exact")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    keys: bytes
    hints: CallHints
    exact: bool
    def __init__(self, handle: _Optional[int] = ..., keys: _Optional[bytes] = ..., hints: _Optional[_Union[CallHints, _Mapping]] = ..., exact: bool = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("codes", "tiers", "leading_run")
    CODES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LEADING_RUN_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[_page_pb2.GetCode]
    tiers: _containers.RepeatedScalarFieldContainer[_page_pb2.Tier]
    leading_run: int
    def __init__(self, codes: _Optional[_Iterable[_Union[_page_pb2.GetCode, str]]] = ..., tiers: _Optional[_Iterable[_Union[_page_pb2.Tier, str]]] = ..., leading_run: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("handle", "keys")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    keys: bytes
    def __init__(self, handle: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("codes",)
    CODES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[_page_pb2.DeleteCode]
    def __init__(self, codes: _Optional[_Iterable[_Union[_page_pb2.DeleteCode, str]]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("handle", "keys", "ttl_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    keys: bytes
    ttl_ms: int
    def __init__(self, handle: _Optional[int] = ..., keys: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("lease_id", "codes", "leading_run", "ttl_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    LEADING_RUN_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    codes: _containers.RepeatedScalarFieldContainer[_page_pb2.GetCode]
    leading_run: int
    ttl_ms: int
    def __init__(self, lease_id: _Optional[int] = ..., codes: _Optional[_Iterable[_Union[_page_pb2.GetCode, str]]] = ..., leading_run: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids", "ttl_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    ttl_ms: int
    def __init__(self, session_id: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("codes",)
    CODES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[_page_pb2.LeaseCode]
    def __init__(self, codes: _Optional[_Iterable[_Union[_page_pb2.LeaseCode, str]]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("handle", "keys", "hints")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    keys: bytes
    hints: CallHints
    def __init__(self, handle: _Optional[int] = ..., keys: _Optional[bytes] = ..., hints: _Optional[_Union[CallHints, _Mapping]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("codes", "leading_run")
    CODES_FIELD_NUMBER: _ClassVar[int]
    LEADING_RUN_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[_page_pb2.GetCode]
    leading_run: int
    def __init__(self, codes: _Optional[_Iterable[_Union[_page_pb2.GetCode, str]]] = ..., leading_run: _Optional[int] = ...) -> None: ...

class ExpectRequest(_message.Message):
    __slots__ = ("handle", "key", "ended", "return_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RETURN_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    key: bytes
    ended: bool
    return_ms: int
    def __init__(self, handle: _Optional[int] = ..., key: _Optional[bytes] = ..., ended: bool = ..., return_ms: _Optional[int] = ...) -> None: ...

class ExpectResponse(_message.Message):
    __slots__ = ("heeded",)
    HEEDED_FIELD_NUMBER: _ClassVar[int]
    heeded: bool
    def __init__(self, heeded: bool = ...) -> None: ...

class DemoteRequest(_message.Message):
    __slots__ = ("handle", "keys")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    keys: bytes
    def __init__(self, handle: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class DemoteResponse(_message.Message):
    __slots__ = ("codes", "leading_run")
    CODES_FIELD_NUMBER: _ClassVar[int]
    LEADING_RUN_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[_page_pb2.GetCode]
    leading_run: int
    def __init__(self, codes: _Optional[_Iterable[_Union[_page_pb2.GetCode, str]]] = ..., leading_run: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("pages", "pages_lost")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_LOST_FIELD_NUMBER: _ClassVar[int]
    pages: int
    pages_lost: int
    def __init__(self, pages: _Optional[int] = ..., pages_lost: _Optional[int] = ...) -> None: ...

class BumpGenerationRequest(_message.Message):
    __slots__ = ("fingerprint", "expected_generation", "weights_revision", "token")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    expected_generation: int
    weights_revision: str
    token: bytes
    def __init__(self, fingerprint: _Optional[bytes] = ..., expected_generation: _Optional[int] = ..., weights_revision: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class BumpGenerationResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class AdoptHandoffRequest(_message.Message):
    __slots__ = ("session_id", "token")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    token: bytes
    def __init__(self, session_id: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class AdoptHandoffResponse(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("fingerprint", "alive_ms")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ALIVE_MS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    alive_ms: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., alive_ms: _Optional[int] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("epoch", "sequence", "kind", "tier", "fingerprint", "shard", "keys", "pool", "session_id", "client_name", "lossy")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    kind: WatchKind
    tier: _page_pb2.Tier
    fingerprint: bytes
    shard: int
    keys: bytes
    pool: _page_pb2.DevicePool
    session_id: int
    client_name: str
    lossy: bool
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., kind: _Optional[_Union[WatchKind, str]] = ..., tier: _Optional[_Union[_page_pb2.Tier, str]] = ..., fingerprint: _Optional[bytes] = ..., shard: _Optional[int] = ..., keys: _Optional[bytes] = ..., pool: _Optional[_Union[_page_pb2.DevicePool, _Mapping]] = ..., session_id: _Optional[int] = ..., client_name: _Optional[str] = ..., lossy: bool = ...) -> None: ...

class ReportPoolRequest(_message.Message):
    __slots__ = ("session_id", "pool", "gone")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    pool: _page_pb2.DevicePool
    gone: bool
    def __init__(self, session_id: _Optional[int] = ..., pool: _Optional[_Union[_page_pb2.DevicePool, _Mapping]] = ..., gone: bool = ...) -> None: ...

class ReportPoolResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteNamespaceRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    def __init__(self, fingerprint: _Optional[bytes] = ...) -> None: ...

class DeleteNamespaceResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...
