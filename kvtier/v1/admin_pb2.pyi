from kvtier.v1 import page_pb2 as _page_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("version", "record_version", "tiers", "codecs", "planes", "page_bytes_max", "keys_per_call_max", "pages_per_put_max", "bytes_per_call_max", "message_bytes_max", "chunk_bytes", "lease_ms_default", "lease_ms_max", "session_ttl_ms", "sessions_max", "namespaces_max", "methods", "local_socket")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECORD_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEYS_PER_CALL_MAX_FIELD_NUMBER: _ClassVar[int]
    PAGES_PER_PUT_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_CALL_MAX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    SESSION_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_MAX_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    version: str
    record_version: int
    tiers: _containers.RepeatedScalarFieldContainer[_page_pb2.Tier]
    codecs: _containers.RepeatedScalarFieldContainer[_page_pb2.Codec]
    planes: _containers.RepeatedScalarFieldContainer[str]
    page_bytes_max: int
    keys_per_call_max: int
    pages_per_put_max: int
    bytes_per_call_max: int
    message_bytes_max: int
    chunk_bytes: int
    lease_ms_default: int
    lease_ms_max: int
    session_ttl_ms: int
    sessions_max: int
    namespaces_max: int
    methods: _containers.RepeatedScalarFieldContainer[str]
    local_socket: str
    def __init__(self, version: _Optional[str] = ..., record_version: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[_page_pb2.Tier, str]]] = ..., codecs: _Optional[_Iterable[_Union[_page_pb2.Codec, str]]] = ..., planes: _Optional[_Iterable[str]] = ..., page_bytes_max: _Optional[int] = ..., keys_per_call_max: _Optional[int] = ..., pages_per_put_max: _Optional[int] = ..., bytes_per_call_max: _Optional[int] = ..., message_bytes_max: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., lease_ms_default: _Optional[int] = ..., lease_ms_max: _Optional[int] = ..., session_ttl_ms: _Optional[int] = ..., sessions_max: _Optional[int] = ..., namespaces_max: _Optional[int] = ..., methods: _Optional[_Iterable[str]] = ..., local_socket: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "ready_bytes", "used_bytes", "pages_filling", "pages_sealed", "pages_retiring", "pages_quarantined", "pages_pinned")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FILLING_FIELD_NUMBER: _ClassVar[int]
    PAGES_SEALED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RETIRING_FIELD_NUMBER: _ClassVar[int]
    PAGES_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PAGES_PINNED_FIELD_NUMBER: _ClassVar[int]
    tier: _page_pb2.Tier
    capacity_bytes: int
    ready_bytes: int
    used_bytes: int
    pages_filling: int
    pages_sealed: int
    pages_retiring: int
    pages_quarantined: int
    pages_pinned: int
    def __init__(self, tier: _Optional[_Union[_page_pb2.Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., pages_filling: _Optional[int] = ..., pages_sealed: _Optional[int] = ..., pages_retiring: _Optional[int] = ..., pages_quarantined: _Optional[int] = ..., pages_pinned: _Optional[int] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("fingerprint", "tenant", "model_id", "weights_revision", "generation", "shard_count", "pages")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    tenant: str
    model_id: str
    weights_revision: str
    generation: int
    shard_count: int
    pages: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., tenant: _Optional[str] = ..., model_id: _Optional[str] = ..., weights_revision: _Optional[str] = ..., generation: _Optional[int] = ..., shard_count: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "client_name", "idle_ms", "handles", "leases")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    client_name: str
    idle_ms: int
    handles: int
    leases: int
    def __init__(self, session_id: _Optional[int] = ..., client_name: _Optional[str] = ..., idle_ms: _Optional[int] = ..., handles: _Optional[int] = ..., leases: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "state", "boot_id", "uptime_ms", "directory", "listen", "tiers", "namespaces", "sessions", "counters", "planes", "warnings", "devices", "pools")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    version: str
    state: str
    boot_id: int
    uptime_ms: int
    directory: str
    listen: _containers.RepeatedScalarFieldContainer[str]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    counters: _containers.ScalarMap[str, int]
    planes: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStatus]
    pools: _containers.RepeatedCompositeFieldContainer[DevicePoolStatus]
    def __init__(self, version: _Optional[str] = ..., state: _Optional[str] = ..., boot_id: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., directory: _Optional[str] = ..., listen: _Optional[_Iterable[str]] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., planes: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ..., devices: _Optional[_Iterable[_Union[DeviceStatus, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[DevicePoolStatus, _Mapping]]] = ...) -> None: ...

class DevicePoolStatus(_message.Message):
    __slots__ = ("session_id", "client_name", "age_ms", "pool")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    client_name: str
    age_ms: int
    pool: _page_pb2.DevicePool
    def __init__(self, session_id: _Optional[int] = ..., client_name: _Optional[str] = ..., age_ms: _Optional[int] = ..., pool: _Optional[_Union[_page_pb2.DevicePool, _Mapping]] = ...) -> None: ...

class DeviceStatus(_message.Message):
    __slots__ = ("path", "online", "reason", "direct_io", "capacity_bytes", "disk_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    ONLINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIRECT_IO_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    online: bool
    reason: str
    direct_io: bool
    capacity_bytes: int
    disk_bytes: int
    def __init__(self, path: _Optional[str] = ..., online: bool = ..., reason: _Optional[str] = ..., direct_io: bool = ..., capacity_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("tier", "bytes_per_second")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    tier: _page_pb2.Tier
    bytes_per_second: int
    def __init__(self, tier: _Optional[_Union[_page_pb2.Tier, str]] = ..., bytes_per_second: _Optional[int] = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("pages_done", "pages_total", "bytes_done", "pages_corrupt", "pages_unreadable")
    PAGES_DONE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    PAGES_UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    pages_done: int
    pages_total: int
    bytes_done: int
    pages_corrupt: int
    pages_unreadable: int
    def __init__(self, pages_done: _Optional[int] = ..., pages_total: _Optional[int] = ..., bytes_done: _Optional[int] = ..., pages_corrupt: _Optional[int] = ..., pages_unreadable: _Optional[int] = ...) -> None: ...

class ListQuarantineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuarantinedPage(_message.Message):
    __slots__ = ("ref", "fingerprint", "shard", "key", "length", "codec", "device", "age_ms", "reason")
    REF_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ref: _page_pb2.PageRef
    fingerprint: bytes
    shard: int
    key: bytes
    length: int
    codec: _page_pb2.Codec
    device: int
    age_ms: int
    reason: str
    def __init__(self, ref: _Optional[_Union[_page_pb2.PageRef, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., shard: _Optional[int] = ..., key: _Optional[bytes] = ..., length: _Optional[int] = ..., codec: _Optional[_Union[_page_pb2.Codec, str]] = ..., device: _Optional[int] = ..., age_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ListQuarantineResponse(_message.Message):
    __slots__ = ("pages", "devices")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[QuarantinedPage]
    devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pages: _Optional[_Iterable[_Union[QuarantinedPage, _Mapping]]] = ..., devices: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadQuarantineRequest(_message.Message):
    __slots__ = ("ref",)
    REF_FIELD_NUMBER: _ClassVar[int]
    ref: _page_pb2.PageRef
    def __init__(self, ref: _Optional[_Union[_page_pb2.PageRef, _Mapping]] = ...) -> None: ...

class ReadQuarantineResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ClearQuarantineRequest(_message.Message):
    __slots__ = ("refs",)
    REFS_FIELD_NUMBER: _ClassVar[int]
    refs: _containers.RepeatedCompositeFieldContainer[_page_pb2.PageRef]
    def __init__(self, refs: _Optional[_Iterable[_Union[_page_pb2.PageRef, _Mapping]]] = ...) -> None: ...

class ClearQuarantineResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("pages_lost",)
    PAGES_LOST_FIELD_NUMBER: _ClassVar[int]
    pages_lost: int
    def __init__(self, pages_lost: _Optional[int] = ...) -> None: ...
