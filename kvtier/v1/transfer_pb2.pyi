from kvtier.v1 import page_pb2 as _page_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutOpen(_message.Message):
    __slots__ = ("handle", "durability", "session", "ttl_ms", "priority", "traceparent")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    durability: _page_pb2.Durability
    session: str
    ttl_ms: int
    priority: int
    traceparent: str
    def __init__(self, handle: _Optional[int] = ..., durability: _Optional[_Union[_page_pb2.Durability, str]] = ..., session: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PutPage(_message.Message):
    __slots__ = ("key", "length", "codec", "payload_sum", "origin_sum", "lossy", "parent", "depth")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SUM_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_SUM_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    length: int
    codec: _page_pb2.Codec
    payload_sum: bytes
    origin_sum: bytes
    lossy: bool
    parent: bytes
    depth: int
    def __init__(self, key: _Optional[bytes] = ..., length: _Optional[int] = ..., codec: _Optional[_Union[_page_pb2.Codec, str]] = ..., payload_sum: _Optional[bytes] = ..., origin_sum: _Optional[bytes] = ..., lossy: bool = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("open", "pages", "offset", "data")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    open: PutOpen
    pages: _containers.RepeatedCompositeFieldContainer[PutPage]
    offset: int
    data: bytes
    def __init__(self, open: _Optional[_Union[PutOpen, _Mapping]] = ..., pages: _Optional[_Iterable[_Union[PutPage, _Mapping]]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("codes", "leading_run", "boot_id", "slots", "generations", "reached")
    CODES_FIELD_NUMBER: _ClassVar[int]
    LEADING_RUN_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[_page_pb2.PutCode]
    leading_run: int
    boot_id: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    reached: _containers.RepeatedScalarFieldContainer[_page_pb2.Durability]
    def __init__(self, codes: _Optional[_Iterable[_Union[_page_pb2.PutCode, str]]] = ..., leading_run: _Optional[int] = ..., boot_id: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., reached: _Optional[_Iterable[_Union[_page_pb2.Durability, str]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("handle", "keys", "accept", "lossy_ok", "session", "ttl_ms", "priority", "traceparent", "reader_verifies")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    LOSSY_OK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    READER_VERIFIES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    keys: bytes
    accept: _containers.RepeatedScalarFieldContainer[_page_pb2.Codec]
    lossy_ok: bool
    session: str
    ttl_ms: int
    priority: int
    traceparent: str
    reader_verifies: bool
    def __init__(self, handle: _Optional[int] = ..., keys: _Optional[bytes] = ..., accept: _Optional[_Iterable[_Union[_page_pb2.Codec, str]]] = ..., lossy_ok: bool = ..., session: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., reader_verifies: bool = ...) -> None: ...

class GetPage(_message.Message):
    __slots__ = ("code", "tier", "codec", "lossy", "length", "payload_sum", "origin_sum", "slot", "generation")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SUM_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_SUM_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    code: _page_pb2.GetCode
    tier: _page_pb2.Tier
    codec: _page_pb2.Codec
    lossy: bool
    length: int
    payload_sum: bytes
    origin_sum: bytes
    slot: int
    generation: int
    def __init__(self, code: _Optional[_Union[_page_pb2.GetCode, str]] = ..., tier: _Optional[_Union[_page_pb2.Tier, str]] = ..., codec: _Optional[_Union[_page_pb2.Codec, str]] = ..., lossy: bool = ..., length: _Optional[int] = ..., payload_sum: _Optional[bytes] = ..., origin_sum: _Optional[bytes] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("pages", "offset", "data")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[GetPage]
    offset: int
    data: bytes
    def __init__(self, pages: _Optional[_Iterable[_Union[GetPage, _Mapping]]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
