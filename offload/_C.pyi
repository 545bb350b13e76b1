"""The extension: bytes, files, memory, arithmetic. Takes addresses; the caller keeps memory alive."""

from collections.abc import Sequence

class FileMode:
    READ: FileMode
    WRITE: FileMode
    READ_WRITE: FileMode

class File:
    def __init__(self, path: bytes, mode: FileMode, direct: bool) -> None: ...
    @staticmethod
    def of_descriptor(fd: int, mode: FileMode) -> File: ...
    @property
    def path(self) -> str: ...
    @property
    def is_direct(self) -> bool: ...
    @property
    def memory_alignment(self) -> int: ...
    @property
    def offset_alignment(self) -> int: ...
    def nbytes(self) -> int: ...
    def preallocate(self, nbytes: int) -> None: ...
    def sync(self) -> None: ...

class Transfer:
    @property
    def id(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def nbytes_moved(self) -> int: ...
    def done(self) -> bool: ...
    def wait_for(self, seconds: float) -> bool: ...
    def error(self) -> OSError | None: ...

class FaultKind:
    EIO: FaultKind
    ENOSPC: FaultKind
    EAGAIN: FaultKind
    EINTR: FaultKind
    SHORT: FaultKind
    DELAY: FaultKind
    REORDER: FaultKind
    BUSY: FaultKind
    BROKEN: FaultKind
    __members__: dict[str, FaultKind]

class FaultPlan:
    def __init__(
        self,
        seed: int,
        rates: dict[FaultKind, float],
        scheduled: Sequence[tuple[int, FaultKind]],
        delay_seconds: float,
    ) -> None: ...
    def counts(self) -> list[int]: ...
    def hard(self) -> list[tuple[FaultKind, bool, int, int]]: ...

class IoHandle:
    def __init__(
        self,
        backend: str,
        block_size: int,
        queue_depth: int,
        thread_count: int,
        faults: FaultPlan | None = None,
    ) -> None: ...
    @property
    def backend(self) -> str: ...
    @property
    def backend_reason(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def queue_depth(self) -> int: ...
    def open(self, path: bytes, writing: bool) -> File: ...
    def submit(self, writing: bool, extents: Sequence[tuple[int, int, File, int]]) -> Transfer: ...
    def take_finished(self) -> list[int]: ...
    def take_notices(self) -> list[str]: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

def probe_backends() -> list[tuple[str, bool, str]]: ...

class Locking:
    NONE: Locking
    PREFERRED: Locking
    REQUIRED: Locking

class PinnedBuffer:
    def __init__(self, nbytes: int, locking: Locking) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def is_locked(self) -> bool: ...

def pinned_free(address: int, nbytes: int | None) -> None: ...
def pinned_is_locked(address: int, nbytes: int) -> bool: ...
def pinned_is_managed(address: int, nbytes: int) -> bool: ...
def pinned_totals() -> dict[str, int]: ...

class Dtype:
    float32: Dtype
    bfloat16: Dtype
    float16: Dtype

class Isa:
    portable: Isa
    avx2: Isa
    avx512: Isa
    @property
    def name(self) -> str: ...

def supported_isas() -> list[Isa]: ...
def sum_of_squares(
    address: int, numel: int, dtype: Dtype, num_threads: int, isa: Isa = ..., before: float = ...
) -> float: ...

class AdamOptions:
    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled_weight_decay: bool,
        bias_correction: bool,
    ) -> None: ...

class AdamBuffers:
    def __init__(
        self,
        *,
        param: int,
        grad: int,
        exp_avg: int,
        exp_avg_sq: int,
        numel: int,
        param_dtype: Dtype,
        grad_dtype: Dtype,
        state_dtype: Dtype,
        grad_scale: float = 1.0,
        param_out: int = 0,
        param_out_dtype: Dtype = ...,
    ) -> None: ...

def adam_step(options: AdamOptions, step: int, buffers: AdamBuffers, num_threads: int, isa: Isa) -> None: ...
def adam_rollback(options: AdamOptions, step: int, buffers: AdamBuffers, num_threads: int) -> None: ...

class LionOptions:
    def __init__(self, *, lr: float, beta1: float, beta2: float, weight_decay: float) -> None: ...

class AdagradOptions:
    def __init__(self, *, lr: float, eps: float, weight_decay: float, lr_decay: float = 0.0) -> None: ...

class SgdOptions:
    def __init__(
        self, *, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool
    ) -> None: ...

class SingleStateBuffers:
    def __init__(
        self,
        *,
        param: int,
        grad: int,
        state: int,
        numel: int,
        grad_dtype: Dtype,
        grad_scale: float = 1.0,
        param_out: int = 0,
        param_out_dtype: Dtype = ...,
        residual: int = 0,
        param_dtype: Dtype = ...,
        state_dtype: Dtype = ...,
    ) -> None: ...

def lion_step(
    options: LionOptions, step: int, buffers: SingleStateBuffers, num_threads: int, isa: Isa
) -> None: ...
def adagrad_step(
    options: AdagradOptions, step: int, buffers: SingleStateBuffers, num_threads: int, isa: Isa
) -> None: ...
def sgd_step(
    options: SgdOptions, step: int, buffers: SingleStateBuffers, num_threads: int, isa: Isa
) -> None: ...

class SplitBuffers:
    def __init__(
        self,
        *,
        param16: int,
        residual: int,
        grad: int,
        exp_avg: int,
        exp_avg_sq: int,
        numel: int,
        grad_dtype: Dtype,
        grad_scale: float = 1.0,
    ) -> None: ...

def adam_step_split(
    options: AdamOptions, step: int, buffers: SplitBuffers, num_threads: int, isa: Isa
) -> None: ...
def split_encode(
    master: int, param16: int, residual: int, numel: int, num_threads: int, isa: Isa = ...
) -> None: ...
def split_decode(
    param16: int, residual: int, master: int, numel: int, num_threads: int, isa: Isa = ...
) -> None: ...

MOMENT_BLOCK: int

class EightBitBuffers:
    def __init__(
        self,
        *,
        param16: int,
        residual: int,
        grad: int,
        grad_dtype: Dtype,
        grad_scale: float = 1.0,
        exp_avg8: int,
        exp_avg8_scale: int,
        exp_avg_sq8: int,
        exp_avg_sq8_scale: int,
        numel: int,
    ) -> None: ...

def adam_step_8bit(
    options: AdamOptions, step: int, buffers: EightBitBuffers, num_threads: int, isa: Isa
) -> None: ...
def encode_8bit(
    values: int, codes: int, scales: int, numel: int, is_signed: bool, num_threads: int, isa: Isa = ...
) -> None: ...
def decode_8bit(
    codes: int, scales: int, values: int, numel: int, is_signed: bool, num_threads: int, isa: Isa = ...
) -> None: ...
