from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]
    TIER_SHARED: _ClassVar[Tier]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_RAW: _ClassVar[Codec]
    CODEC_FP8: _ClassVar[Codec]

class GetCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GET_CODE_UNSPECIFIED: _ClassVar[GetCode]
    GET_CODE_HIT: _ClassVar[GetCode]
    GET_CODE_MISS: _ClassVar[GetCode]
    GET_CODE_STALE: _ClassVar[GetCode]
    GET_CODE_CORRUPT: _ClassVar[GetCode]
    GET_CODE_BUSY: _ClassVar[GetCode]
    GET_CODE_TIMEOUT: _ClassVar[GetCode]
    GET_CODE_UNAVAILABLE: _ClassVar[GetCode]
    GET_CODE_IO_ERROR: _ClassVar[GetCode]
    GET_CODE_REFUSED: _ClassVar[GetCode]

class PutCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_CODE_UNSPECIFIED: _ClassVar[PutCode]
    PUT_CODE_STORED: _ClassVar[PutCode]
    PUT_CODE_EXISTS: _ClassVar[PutCode]
    PUT_CODE_STALE_GENERATION: _ClassVar[PutCode]
    PUT_CODE_NONFINITE: _ClassVar[PutCode]
    PUT_CODE_QUOTA: _ClassVar[PutCode]
    PUT_CODE_BUSY: _ClassVar[PutCode]
    PUT_CODE_REFUSED: _ClassVar[PutCode]
    PUT_CODE_TIMEOUT: _ClassVar[PutCode]
    PUT_CODE_UNAVAILABLE: _ClassVar[PutCode]

class DeleteCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELETE_CODE_UNSPECIFIED: _ClassVar[DeleteCode]
    DELETE_CODE_DELETED: _ClassVar[DeleteCode]
    DELETE_CODE_ABSENT: _ClassVar[DeleteCode]
    DELETE_CODE_STALE: _ClassVar[DeleteCode]

class LeaseCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_CODE_UNSPECIFIED: _ClassVar[LeaseCode]
    LEASE_CODE_HELD: _ClassVar[LeaseCode]
    LEASE_CODE_RELEASED: _ClassVar[LeaseCode]
    LEASE_CODE_EXPIRED: _ClassVar[LeaseCode]
    LEASE_CODE_UNKNOWN: _ClassVar[LeaseCode]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_HOST: _ClassVar[Durability]
    DURABILITY_NVME: _ClassVar[Durability]

class SegmentRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEGMENT_ROLE_UNSPECIFIED: _ClassVar[SegmentRole]
    SEGMENT_ROLE_KEY: _ClassVar[SegmentRole]
    SEGMENT_ROLE_VALUE: _ClassVar[SegmentRole]
    SEGMENT_ROLE_LATENT: _ClassVar[SegmentRole]
    SEGMENT_ROLE_ROPE: _ClassVar[SegmentRole]
    SEGMENT_ROLE_DRAFT_KEY: _ClassVar[SegmentRole]
    SEGMENT_ROLE_DRAFT_VALUE: _ClassVar[SegmentRole]
    SEGMENT_ROLE_OPAQUE: _ClassVar[SegmentRole]

class ScaleRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALE_RULE_UNSPECIFIED: _ClassVar[ScaleRule]
    SCALE_RULE_NONE: _ClassVar[ScaleRule]
    SCALE_RULE_LAYER_HEAD: _ClassVar[ScaleRule]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_NVME: Tier
TIER_SHARED: Tier
CODEC_UNSPECIFIED: Codec
CODEC_RAW: Codec
CODEC_FP8: Codec
GET_CODE_UNSPECIFIED: GetCode
GET_CODE_HIT: GetCode
GET_CODE_MISS: GetCode
GET_CODE_STALE: GetCode
GET_CODE_CORRUPT: GetCode
GET_CODE_BUSY: GetCode
GET_CODE_TIMEOUT: GetCode
GET_CODE_UNAVAILABLE: GetCode
GET_CODE_IO_ERROR: GetCode
GET_CODE_REFUSED: GetCode
PUT_CODE_UNSPECIFIED: PutCode
PUT_CODE_STORED: PutCode
PUT_CODE_EXISTS: PutCode
PUT_CODE_STALE_GENERATION: PutCode
PUT_CODE_NONFINITE: PutCode
PUT_CODE_QUOTA: PutCode
PUT_CODE_BUSY: PutCode
PUT_CODE_REFUSED: PutCode
PUT_CODE_TIMEOUT: PutCode
PUT_CODE_UNAVAILABLE: PutCode
DELETE_CODE_UNSPECIFIED: DeleteCode
DELETE_CODE_DELETED: DeleteCode
DELETE_CODE_ABSENT: DeleteCode
DELETE_CODE_STALE: DeleteCode
LEASE_CODE_UNSPECIFIED: LeaseCode
LEASE_CODE_HELD: LeaseCode
LEASE_CODE_RELEASED: LeaseCode
LEASE_CODE_EXPIRED: LeaseCode
LEASE_CODE_UNKNOWN: LeaseCode
DURABILITY_UNSPECIFIED: Durability
DURABILITY_HOST: Durability
DURABILITY_NVME: Durability
SEGMENT_ROLE_UNSPECIFIED: SegmentRole
SEGMENT_ROLE_KEY: SegmentRole
SEGMENT_ROLE_VALUE: SegmentRole
SEGMENT_ROLE_LATENT: SegmentRole
SEGMENT_ROLE_ROPE: SegmentRole
SEGMENT_ROLE_DRAFT_KEY: SegmentRole
SEGMENT_ROLE_DRAFT_VALUE: SegmentRole
SEGMENT_ROLE_OPAQUE: SegmentRole
SCALE_RULE_UNSPECIFIED: ScaleRule
SCALE_RULE_NONE: ScaleRule
SCALE_RULE_LAYER_HEAD: ScaleRule

class Segment(_message.Message):
    __slots__ = ("name", "role", "dtype", "layers", "heads", "dim", "scale_rule")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    SCALE_RULE_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: SegmentRole
    dtype: str
    layers: int
    heads: int
    dim: int
    scale_rule: ScaleRule
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[SegmentRole, str]] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., heads: _Optional[int] = ..., dim: _Optional[int] = ..., scale_rule: _Optional[_Union[ScaleRule, str]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("model_id", "weights_revision", "adapter_id", "adapter_revision", "kv_compute", "rope", "key_scheme", "page_tokens", "storage_order", "segments", "shard_count")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    KV_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    KEY_SCHEME_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ORDER_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    weights_revision: str
    adapter_id: str
    adapter_revision: str
    kv_compute: str
    rope: str
    key_scheme: str
    page_tokens: int
    storage_order: str
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    shard_count: int
    def __init__(self, model_id: _Optional[str] = ..., weights_revision: _Optional[str] = ..., adapter_id: _Optional[str] = ..., adapter_revision: _Optional[str] = ..., kv_compute: _Optional[str] = ..., rope: _Optional[str] = ..., key_scheme: _Optional[str] = ..., page_tokens: _Optional[int] = ..., storage_order: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., shard_count: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("index", "layer_start", "layer_end", "head_start", "head_end")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    index: int
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    def __init__(self, index: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ...) -> None: ...

class PageRef(_message.Message):
    __slots__ = ("boot_id", "tier", "slot", "generation")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    tier: Tier
    slot: int
    generation: int
    def __init__(self, boot_id: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class DevicePool(_message.Message):
    __slots__ = ("name", "device", "fingerprint", "page_bytes", "pages", "pages_held", "pages_draining", "pages_pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    PAGES_DRAINING_FIELD_NUMBER: _ClassVar[int]
    PAGES_PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    device: str
    fingerprint: bytes
    page_bytes: int
    pages: int
    pages_held: int
    pages_draining: int
    pages_pinned: int
    def __init__(self, name: _Optional[str] = ..., device: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., page_bytes: _Optional[int] = ..., pages: _Optional[int] = ..., pages_held: _Optional[int] = ..., pages_draining: _Optional[int] = ..., pages_pinned: _Optional[int] = ...) -> None: ...
