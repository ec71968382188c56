from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HostState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOST_STATE_UNSPECIFIED: _ClassVar[HostState]
    INIT: _ClassVar[HostState]
    WAIT_PEERS: _ClassVar[HostState]
    SERVING: _ClassVar[HostState]
    TRAINING: _ClassVar[HostState]
    DRAINING: _ClassVar[HostState]
    DONE: _ClassVar[HostState]
    FAILED: _ClassVar[HostState]
HOST_STATE_UNSPECIFIED: HostState
INIT: HostState
WAIT_PEERS: HostState
SERVING: HostState
TRAINING: HostState
DRAINING: HostState
DONE: HostState
FAILED: HostState

class Endpoint(_message.Message):
    __slots__ = ("endpoint_id", "address", "incarnation", "num_slots", "kind", "is_optional")
    ENDPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IS_OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    endpoint_id: str
    address: str
    incarnation: str
    num_slots: int
    kind: str
    is_optional: bool
    def __init__(self, endpoint_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., num_slots: _Optional[int] = ..., kind: _Optional[str] = ..., is_optional: bool = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("host", "summary", "detail", "exit_code", "by_signal", "is_consequence", "of_rank")
    HOST_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    BY_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    IS_CONSEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OF_RANK_FIELD_NUMBER: _ClassVar[int]
    host: str
    summary: str
    detail: str
    exit_code: int
    by_signal: bool
    is_consequence: bool
    of_rank: bool
    def __init__(self, host: _Optional[str] = ..., summary: _Optional[str] = ..., detail: _Optional[str] = ..., exit_code: _Optional[int] = ..., by_signal: bool = ..., is_consequence: bool = ..., of_rank: bool = ...) -> None: ...

class StopPoint(_message.Message):
    __slots__ = ("loader", "steps")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    loader: str
    steps: int
    def __init__(self, loader: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...

class HostStatus(_message.Message):
    __slots__ = ("protocol", "version", "script_digest", "host", "incarnation", "state", "endpoints", "failure", "decided", "stop_requested", "stop_at", "usage_json", "ranks", "counters", "revision", "rendezvous_port", "generation", "restarted_for", "ticks", "options", "trainer_endpoints", "profile_json", "joined")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    STOP_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_FIELD_NUMBER: _ClassVar[int]
    USAGE_JSON_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_PORT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESTARTED_FOR_FIELD_NUMBER: _ClassVar[int]
    TICKS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    script_digest: str
    host: str
    incarnation: str
    state: HostState
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    failure: Cause
    decided: Cause
    stop_requested: bool
    stop_at: StopPoint
    usage_json: bytes
    ranks: _containers.RepeatedCompositeFieldContainer[RankReport]
    counters: _containers.ScalarMap[str, int]
    revision: int
    rendezvous_port: int
    generation: int
    restarted_for: Cause
    ticks: int
    options: _containers.ScalarMap[str, str]
    trainer_endpoints: int
    profile_json: bytes
    joined: _containers.RepeatedCompositeFieldContainer[JoinedHost]
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., script_digest: _Optional[str] = ..., host: _Optional[str] = ..., incarnation: _Optional[str] = ..., state: _Optional[_Union[HostState, str]] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., failure: _Optional[_Union[Cause, _Mapping]] = ..., decided: _Optional[_Union[Cause, _Mapping]] = ..., stop_requested: bool = ..., stop_at: _Optional[_Union[StopPoint, _Mapping]] = ..., usage_json: _Optional[bytes] = ..., ranks: _Optional[_Iterable[_Union[RankReport, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., revision: _Optional[int] = ..., rendezvous_port: _Optional[int] = ..., generation: _Optional[int] = ..., restarted_for: _Optional[_Union[Cause, _Mapping]] = ..., ticks: _Optional[int] = ..., options: _Optional[_Mapping[str, str]] = ..., trainer_endpoints: _Optional[int] = ..., profile_json: _Optional[bytes] = ..., joined: _Optional[_Iterable[_Union[JoinedHost, _Mapping]]] = ...) -> None: ...

class JoinedHost(_message.Message):
    __slots__ = ("host", "address", "group", "instance_type")
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_TYPE_FIELD_NUMBER: _ClassVar[int]
    host: str
    address: str
    group: str
    instance_type: str
    def __init__(self, host: _Optional[str] = ..., address: _Optional[str] = ..., group: _Optional[str] = ..., instance_type: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "host", "version", "script_digest", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    host: JoinedHost
    version: str
    script_digest: str
    options: _containers.ScalarMap[str, str]
    def __init__(self, protocol: _Optional[int] = ..., host: _Optional[_Union[JoinedHost, _Mapping]] = ..., version: _Optional[str] = ..., script_digest: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("refusal", "exit_code", "job_id", "cluster_json", "roles", "admitter", "admitter_address", "may_pass")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_JSON_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ADMITTER_FIELD_NUMBER: _ClassVar[int]
    ADMITTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAY_PASS_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    exit_code: int
    job_id: str
    cluster_json: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    admitter: str
    admitter_address: str
    may_pass: bool
    def __init__(self, refusal: _Optional[str] = ..., exit_code: _Optional[int] = ..., job_id: _Optional[str] = ..., cluster_json: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., admitter: _Optional[str] = ..., admitter_address: _Optional[str] = ..., may_pass: bool = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("rank", "world_size", "generation")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    generation: int
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("remote", "data_timeout_s", "prepare_timeout_s", "emulate_step_s", "purity_checks", "warmup_steps", "stop_grace_s", "max_batch_bytes", "data_service", "wants_step_times", "profile", "elapsed_s")
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    DATA_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PREPARE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    EMULATE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PURITY_CHECKS_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    STOP_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_SERVICE_FIELD_NUMBER: _ClassVar[int]
    WANTS_STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    remote: bool
    data_timeout_s: float
    prepare_timeout_s: float
    emulate_step_s: float
    purity_checks: int
    warmup_steps: int
    stop_grace_s: float
    max_batch_bytes: int
    data_service: str
    wants_step_times: bool
    profile: bool
    elapsed_s: float
    def __init__(self, remote: bool = ..., data_timeout_s: _Optional[float] = ..., prepare_timeout_s: _Optional[float] = ..., emulate_step_s: _Optional[float] = ..., purity_checks: _Optional[int] = ..., warmup_steps: _Optional[int] = ..., stop_grace_s: _Optional[float] = ..., max_batch_bytes: _Optional[int] = ..., data_service: _Optional[str] = ..., wants_step_times: bool = ..., profile: bool = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class RankRequest(_message.Message):
    __slots__ = ("register", "report", "watch")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    register: RegisterRequest
    report: RankReport
    watch: WatchRequest
    def __init__(self, register: _Optional[_Union[RegisterRequest, _Mapping]] = ..., report: _Optional[_Union[RankReport, _Mapping]] = ..., watch: _Optional[_Union[WatchRequest, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DirectoryEntry(_message.Message):
    __slots__ = ("host", "endpoint")
    HOST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    host: str
    endpoint: Endpoint
    def __init__(self, host: _Optional[str] = ..., endpoint: _Optional[_Union[Endpoint, _Mapping]] = ...) -> None: ...

class RankUpdate(_message.Message):
    __slots__ = ("endpoints", "stop_requested", "stop_at")
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    STOP_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[DirectoryEntry]
    stop_requested: bool
    stop_at: StopPoint
    def __init__(self, endpoints: _Optional[_Iterable[_Union[DirectoryEntry, _Mapping]]] = ..., stop_requested: bool = ..., stop_at: _Optional[_Union[StopPoint, _Mapping]] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("loader", "first", "compute_s", "wait_s")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    loader: str
    first: int
    compute_s: _containers.RepeatedScalarFieldContainer[float]
    wait_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, loader: _Optional[str] = ..., first: _Optional[int] = ..., compute_s: _Optional[_Iterable[float]] = ..., wait_s: _Optional[_Iterable[float]] = ...) -> None: ...

class MetricSeries(_message.Message):
    __slots__ = ("name", "step", "value", "at_s", "unix_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: _containers.RepeatedScalarFieldContainer[int]
    value: _containers.RepeatedScalarFieldContainer[float]
    at_s: _containers.RepeatedScalarFieldContainer[float]
    unix_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., step: _Optional[_Iterable[int]] = ..., value: _Optional[_Iterable[float]] = ..., at_s: _Optional[_Iterable[float]] = ..., unix_s: _Optional[_Iterable[float]] = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("rank", "steps_started", "summaries_json", "counters", "stop_vote", "failure", "finished", "loader", "waiting", "generation", "step_times", "profile_json", "metrics", "has_metrics")
    class StepsStartedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEPS_STARTED_FIELD_NUMBER: _ClassVar[int]
    SUMMARIES_JSON_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    STOP_VOTE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    HAS_METRICS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    steps_started: _containers.ScalarMap[str, int]
    summaries_json: _containers.RepeatedScalarFieldContainer[bytes]
    counters: _containers.ScalarMap[str, int]
    stop_vote: bool
    failure: Cause
    finished: bool
    loader: str
    waiting: bool
    generation: int
    step_times: StepTimes
    profile_json: bytes
    metrics: _containers.RepeatedCompositeFieldContainer[MetricSeries]
    has_metrics: bool
    def __init__(self, rank: _Optional[int] = ..., steps_started: _Optional[_Mapping[str, int]] = ..., summaries_json: _Optional[_Iterable[bytes]] = ..., counters: _Optional[_Mapping[str, int]] = ..., stop_vote: bool = ..., failure: _Optional[_Union[Cause, _Mapping]] = ..., finished: bool = ..., loader: _Optional[str] = ..., waiting: bool = ..., generation: _Optional[int] = ..., step_times: _Optional[_Union[StepTimes, _Mapping]] = ..., profile_json: _Optional[bytes] = ..., metrics: _Optional[_Iterable[_Union[MetricSeries, _Mapping]]] = ..., has_metrics: bool = ...) -> None: ...
