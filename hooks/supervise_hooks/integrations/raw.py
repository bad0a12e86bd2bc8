"""torch tensors as raw bytes and back, under safetensors' names of their types."""

import torch

from supervise_hooks.contract.errors import CheckpointError

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64", "complex128": "C128",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): known for name, known in _NAMES.items() if hasattr(torch, name)}
_DTYPES = {known: dtype for dtype, known in DTYPE_NAMES.items()}


def why_unstorable(tensor: torch.Tensor) -> str | None:
    """Why raw bytes cannot stand for this tensor; None when they can."""
    if hasattr(tensor, "__tensor_flatten__"):
        return f"it is a {type(tensor).__name__}, whose parts only its own class knows"
    if tensor.is_meta:
        return "it is on the meta device: it has no values"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return "it is quantized"
    return None if tensor.dtype in DTYPE_NAMES else f"its dtype is {tensor.dtype}"


def bytes_of(tensor: torch.Tensor) -> int:
    """How many bytes `to_buffer` will give."""
    return tensor.numel() * tensor.element_size()


def to_buffer(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major; of a contiguous tensor in host memory without a copy. Keeps the memory alive."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if host.numel() == 0:
        return memoryview(b"")
    return host.reshape(-1).view(torch.uint8).numpy().data


def from_buffer(content: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over `content`, which it keeps alive. Raises CheckpointError for a dtype this torch does not know."""
    known = _DTYPES.get(dtype)
    if known is None:
        raise CheckpointError(f"cannot read a tensor of type {dtype}: torch {torch.__version__} does not know it")
    if not content:
        return torch.empty(shape, dtype=known)
    return torch.frombuffer(content, dtype=torch.uint8).view(known).reshape(shape)
