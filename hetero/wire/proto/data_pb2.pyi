from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OnSampleError(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RAISE: _ClassVar[OnSampleError]
    SKIP: _ClassVar[OnSampleError]

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_NONE: _ClassVar[Compression]
    LZ4: _ClassVar[Compression]
    ZSTD: _ClassVar[Compression]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    U8: _ClassVar[DType]
    U16: _ClassVar[DType]
    U32: _ClassVar[DType]
    U64: _ClassVar[DType]
    I8: _ClassVar[DType]
    I16: _ClassVar[DType]
    I32: _ClassVar[DType]
    I64: _ClassVar[DType]
    F16: _ClassVar[DType]
    BF16: _ClassVar[DType]
    F32: _ClassVar[DType]
    F64: _ClassVar[DType]
    BOOL: _ClassVar[DType]
    BYTES: _ClassVar[DType]
    UTF8: _ClassVar[DType]
    C64: _ClassVar[DType]
    C128: _ClassVar[DType]
    F8E4M3FN: _ClassVar[DType]
    F8E5M2: _ClassVar[DType]
    F8E4M3FNUZ: _ClassVar[DType]
    F8E5M2FNUZ: _ClassVar[DType]
    TEXT_OR_DATE: _ClassVar[DType]

class Container(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTAINER_UNSPECIFIED: _ClassVar[Container]
    TENSOR: _ClassVar[Container]
    ARRAY: _ClassVar[Container]
    SCALAR: _ClassVar[Container]
    LIST: _ClassVar[Container]
RAISE: OnSampleError
SKIP: OnSampleError
COMPRESSION_NONE: Compression
LZ4: Compression
ZSTD: Compression
DTYPE_UNSPECIFIED: DType
U8: DType
U16: DType
U32: DType
U64: DType
I8: DType
I16: DType
I32: DType
I64: DType
F16: DType
BF16: DType
F32: DType
F64: DType
BOOL: DType
BYTES: DType
UTF8: DType
C64: DType
C128: DType
F8E4M3FN: DType
F8E5M2: DType
F8E4M3FNUZ: DType
F8E5M2FNUZ: DType
TEXT_OR_DATE: DType
CONTAINER_UNSPECIFIED: Container
TENSOR: Container
ARRAY: Container
SCALAR: Container
LIST: Container

class DatasetSpec(_message.Message):
    __slots__ = ("name", "arguments_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments_json: str
    def __init__(self, name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("protocol", "dataset", "expected")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    dataset: DatasetSpec
    expected: _containers.RepeatedCompositeFieldContainer[DatasetSpec]
    def __init__(self, protocol: _Optional[int] = ..., dataset: _Optional[_Union[DatasetSpec, _Mapping]] = ..., expected: _Optional[_Iterable[_Union[DatasetSpec, _Mapping]]] = ...) -> None: ...

class PrepareReply(_message.Message):
    __slots__ = ("failure", "num_samples", "fingerprint", "environment", "globals", "warnings", "sources", "keeps_samples", "is_iterable")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class GlobalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    GLOBALS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    IS_ITERABLE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    num_samples: int
    fingerprint: str
    environment: _containers.ScalarMap[str, str]
    globals: _containers.ScalarMap[str, str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    keeps_samples: bool
    is_iterable: bool
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., num_samples: _Optional[int] = ..., fingerprint: _Optional[str] = ..., environment: _Optional[_Mapping[str, str]] = ..., globals: _Optional[_Mapping[str, str]] = ..., warnings: _Optional[_Iterable[str]] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., keeps_samples: bool = ..., is_iterable: bool = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("name", "num_samples", "layout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_samples: int
    layout: bytes
    def __init__(self, name: _Optional[str] = ..., num_samples: _Optional[int] = ..., layout: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("protocol", "dataset", "indices", "keys", "occurrences", "helpers", "seed", "epoch", "position", "collate", "step", "verify", "max_batch_bytes", "compression", "on_sample_error", "as_is", "contiguous", "is_part", "owners", "lanes", "lane_states")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OCCURRENCES_FIELD_NUMBER: _ClassVar[int]
    HELPERS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COLLATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    ON_SAMPLE_ERROR_FIELD_NUMBER: _ClassVar[int]
    AS_IS_FIELD_NUMBER: _ClassVar[int]
    CONTIGUOUS_FIELD_NUMBER: _ClassVar[int]
    IS_PART_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    LANE_STATES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    dataset: DatasetSpec
    indices: bytes
    keys: bytes
    occurrences: bytes
    helpers: bytes
    seed: int
    epoch: int
    position: int
    collate: bool
    step: int
    verify: bool
    max_batch_bytes: int
    compression: Compression
    on_sample_error: OnSampleError
    as_is: bool
    contiguous: bool
    is_part: bool
    owners: bytes
    lanes: bytes
    lane_states: bytes
    def __init__(self, protocol: _Optional[int] = ..., dataset: _Optional[_Union[DatasetSpec, _Mapping]] = ..., indices: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., occurrences: _Optional[bytes] = ..., helpers: _Optional[bytes] = ..., seed: _Optional[int] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., collate: bool = ..., step: _Optional[int] = ..., verify: bool = ..., max_batch_bytes: _Optional[int] = ..., compression: _Optional[_Union[Compression, str]] = ..., on_sample_error: _Optional[_Union[OnSampleError, str]] = ..., as_is: bool = ..., contiguous: bool = ..., is_part: bool = ..., owners: _Optional[bytes] = ..., lanes: _Optional[bytes] = ..., lane_states: _Optional[bytes] = ...) -> None: ...

class Lanes(_message.Message):
    __slots__ = ("num_lanes", "chunk_samples", "guarantee", "end", "snapshot_every", "pieces", "num_sources")
    NUM_LANES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_EVERY_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    NUM_SOURCES_FIELD_NUMBER: _ClassVar[int]
    num_lanes: int
    chunk_samples: int
    guarantee: str
    end: str
    snapshot_every: int
    pieces: _containers.RepeatedCompositeFieldContainer[LanePiece]
    num_sources: int
    def __init__(self, num_lanes: _Optional[int] = ..., chunk_samples: _Optional[int] = ..., guarantee: _Optional[str] = ..., end: _Optional[str] = ..., snapshot_every: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[LanePiece, _Mapping]]] = ..., num_sources: _Optional[int] = ...) -> None: ...

class LanePiece(_message.Message):
    __slots__ = ("lane", "place", "num_samples", "snapshot", "known_place", "known_chain")
    LANE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_PLACE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_CHAIN_FIELD_NUMBER: _ClassVar[int]
    lane: int
    place: int
    num_samples: int
    snapshot: LaneSnapshot
    known_place: int
    known_chain: bytes
    def __init__(self, lane: _Optional[int] = ..., place: _Optional[int] = ..., num_samples: _Optional[int] = ..., snapshot: _Optional[_Union[LaneSnapshot, _Mapping]] = ..., known_place: _Optional[int] = ..., known_chain: _Optional[bytes] = ...) -> None: ...

class LaneSnapshot(_message.Message):
    __slots__ = ("place", "chain", "state_bytes", "library")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    place: int
    chain: bytes
    state_bytes: int
    library: str
    def __init__(self, place: _Optional[int] = ..., chain: _Optional[bytes] = ..., state_bytes: _Optional[int] = ..., library: _Optional[str] = ...) -> None: ...

class Helpers(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Helper]
    def __init__(self, items: _Optional[_Iterable[_Union[Helper, _Mapping]]] = ...) -> None: ...

class Helper(_message.Message):
    __slots__ = ("endpoint_id", "host", "address", "incarnation")
    ENDPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    endpoint_id: str
    host: str
    address: str
    incarnation: str
    def __init__(self, endpoint_id: _Optional[str] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class AttendReply(_message.Message):
    __slots__ = ("port", "ticket")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("header", "failure", "refusal", "request")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    header: BatchHeader
    failure: Failure
    refusal: Refusal
    request: int
    def __init__(self, header: _Optional[_Union[BatchHeader, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., request: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "details")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Refusal.Reason]
        BUSY: _ClassVar[Refusal.Reason]
        UNPREPARED: _ClassVar[Refusal.Reason]
        MALFORMED: _ClassVar[Refusal.Reason]
        BROKEN: _ClassVar[Refusal.Reason]
    UNSPECIFIED: Refusal.Reason
    BUSY: Refusal.Reason
    UNPREPARED: Refusal.Reason
    MALFORMED: Refusal.Reason
    BROKEN: Refusal.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    reason: Refusal.Reason
    details: str
    def __init__(self, reason: _Optional[_Union[Refusal.Reason, str]] = ..., details: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("dataset", "host", "stage", "sample_index", "exception", "traceback", "types")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    host: str
    stage: str
    sample_index: str
    exception: str
    traceback: str
    types: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dataset: _Optional[str] = ..., host: _Optional[str] = ..., stage: _Optional[str] = ..., sample_index: _Optional[str] = ..., exception: _Optional[str] = ..., traceback: _Optional[str] = ..., types: _Optional[_Iterable[str]] = ...) -> None: ...

class BatchHeader(_message.Message):
    __slots__ = ("protocol", "structure", "payload_bytes", "checksum", "num_queued", "compression", "block_bytes", "skips", "num_parts")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    structure: bytes
    payload_bytes: int
    checksum: int
    num_queued: int
    compression: Compression
    block_bytes: _containers.RepeatedScalarFieldContainer[int]
    skips: bytes
    num_parts: int
    def __init__(self, protocol: _Optional[int] = ..., structure: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., num_queued: _Optional[int] = ..., compression: _Optional[_Union[Compression, str]] = ..., block_bytes: _Optional[_Iterable[int]] = ..., skips: _Optional[bytes] = ..., num_parts: _Optional[int] = ...) -> None: ...

class Skips(_message.Message):
    __slots__ = ("num_skipped", "listed")
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    num_skipped: int
    listed: _containers.RepeatedCompositeFieldContainer[Skip]
    def __init__(self, num_skipped: _Optional[int] = ..., listed: _Optional[_Iterable[_Union[Skip, _Mapping]]] = ...) -> None: ...

class Skip(_message.Message):
    __slots__ = ("index", "exception")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    index: str
    exception: str
    def __init__(self, index: _Optional[str] = ..., exception: _Optional[str] = ...) -> None: ...

class Structure(_message.Message):
    __slots__ = ("root", "leaves")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    root: Node
    leaves: _containers.RepeatedCompositeFieldContainer[Leaf]
    def __init__(self, root: _Optional[_Union[Node, _Mapping]] = ..., leaves: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ...) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("dtype", "container", "shape", "nbytes", "strides", "numpy_dtype")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    NUMPY_DTYPE_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    container: Container
    shape: _containers.RepeatedScalarFieldContainer[int]
    nbytes: int
    strides: _containers.RepeatedScalarFieldContainer[int]
    numpy_dtype: str
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., container: _Optional[_Union[Container, str]] = ..., shape: _Optional[_Iterable[int]] = ..., nbytes: _Optional[int] = ..., strides: _Optional[_Iterable[int]] = ..., numpy_dtype: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("leaf", "list", "tuple", "mapping", "record", "none", "boolean", "integer", "real", "text", "binary", "set", "frozen_set", "complex", "big_integer")
    LEAF_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    MAPPING_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    NONE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BINARY_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    FROZEN_SET_FIELD_NUMBER: _ClassVar[int]
    COMPLEX_FIELD_NUMBER: _ClassVar[int]
    BIG_INTEGER_FIELD_NUMBER: _ClassVar[int]
    leaf: int
    list: Children
    tuple: Children
    mapping: Mapping
    record: Record
    none: bool
    boolean: bool
    integer: int
    real: float
    text: str
    binary: bytes
    set: Children
    frozen_set: Children
    complex: Complex
    big_integer: bytes
    def __init__(self, leaf: _Optional[int] = ..., list: _Optional[_Union[Children, _Mapping]] = ..., tuple: _Optional[_Union[Children, _Mapping]] = ..., mapping: _Optional[_Union[Mapping, _Mapping]] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., none: bool = ..., boolean: bool = ..., integer: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., binary: _Optional[bytes] = ..., set: _Optional[_Union[Children, _Mapping]] = ..., frozen_set: _Optional[_Union[Children, _Mapping]] = ..., complex: _Optional[_Union[Complex, _Mapping]] = ..., big_integer: _Optional[bytes] = ...) -> None: ...

class Complex(_message.Message):
    __slots__ = ("real", "imaginary")
    REAL_FIELD_NUMBER: _ClassVar[int]
    IMAGINARY_FIELD_NUMBER: _ClassVar[int]
    real: float
    imaginary: float
    def __init__(self, real: _Optional[float] = ..., imaginary: _Optional[float] = ...) -> None: ...

class Children(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, items: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class Mapping(_message.Message):
    __slots__ = ("keys", "values", "ordered", "read_only")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Node]
    values: _containers.RepeatedCompositeFieldContainer[Node]
    ordered: bool
    read_only: bool
    def __init__(self, keys: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., ordered: bool = ..., read_only: bool = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("module", "qualified_name", "fields", "values")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    QUALIFIED_NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    module: str
    qualified_name: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, module: _Optional[str] = ..., qualified_name: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...
