"""The packed weight: one 32-bit word per nonzero (paper section 5.3, csrc/FORMAT.md)."""

import typing
import warnings

import numpy as np

from packedconv.schedule import PlanKey, Schedule, checked_schedules

if typing.TYPE_CHECKING:
    from packedconv.plan import CpuPlan

# As in csrc/packed_word.h.
BLOCK_CHANNELS = 256
MAX_KERNEL = 16
FP16_MAX = 65504.0
_FP16_MIN_NORMAL = 2.0**-14


class PackWarning(UserWarning):
    """Packing changed weights by more than rounding: FP16 made them zero or subnormal."""


def encode_word(fp16_bits: int, channel: int, px: int, py: int) -> int:
    """One packed word: [31:16] FP16 bits, [15:8] channel, [7:4] column px, [3:0] row py.

    Raises ValueError when a field does not fit its bits.
    """
    fields = (("fp16_bits", fp16_bits, 16), ("channel", channel, 8), ("px", px, 4), ("py", py, 4))
    for name, value, bits in fields:
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name}: expected 0 to {(1 << bits) - 1} ({bits} bits), got {value}")
    return fp16_bits << 16 | channel << 8 | px << 4 | py


def decode_word(word: int) -> typing.Tuple[int, int, int, int]:
    """(FP16 bits, channel, px, py) of a packed word; the inverse of `encode_word`."""
    if not 0 <= word < 1 << 32:
        raise ValueError(f"word: expected 32 unsigned bits, got {word}")
    return word >> 16, word >> 8 & 0xFF, word >> 4 & 0xF, word & 0xF


class PackedWeight:
    """A sparse convolution weight in the packed format; immutable.

    words: uint32 (nonzeros,), ascending by (input channel, py, px) within an output channel.
    offsets: uint32 (blocks, OC + 1), absolute positions in `words`. A block holds up to 256
    input channels; layers with more have several, one after the other.
    shape: (OC, IC/groups, K_h, K_w) of the unpacked weight.
    underflowed, subnormals: how many weights FP16 turned into zero (and packing dropped),
    and into subnormals of reduced precision.
    schedules: of earlier calls of `autotune`, as the property of that name gives them. They stay
    with the weight in files, copies and pickles; comparisons ignore them.

    Raises TypeError for arrays of another type, ValueError for contents that are not a
    packed weight: offsets that fall or do not span the words, an index outside the kernel,
    words out of order, a zero or non-finite value; and for schedules of no call with it.
    """

    __slots__ = (
        "__weakref__",
        "_derived",
        "_offsets",
        "_schedules",
        "_shape",
        "_subnormals",
        "_underflowed",
        "_words",
    )

    def __init__(
        self,
        words: np.ndarray,
        offsets: np.ndarray,
        shape: typing.Sequence[int],
        underflowed: int = 0,
        subnormals: int = 0,
        schedules: typing.Optional[typing.Mapping[PlanKey, Schedule]] = None,
    ) -> None:
        self._derived = {}  # type: typing.Dict[str, typing.Any]
        self._shape = checked_shape(tuple(int(size) for size in shape))
        self._words = _frozen("words", words)
        self._offsets = _frozen("offsets", offsets)
        self._underflowed = _count("underflowed", underflowed)
        self._subnormals = _count("subnormals", subnormals)
        if self._words.ndim != 1:
            raise ValueError(f"words: expected one axis, got shape {self._words.shape}")
        _check_offsets(self._offsets, self._shape, len(self._words))
        _check_words(self._words, self._offsets, self._shape)
        self._schedules = checked_schedules(schedules or {}, self._shape)

    @property
    def words(self) -> np.ndarray:
        return self._words

    @property
    def offsets(self) -> np.ndarray:
        return self._offsets

    @property
    def shape(self) -> typing.Tuple[int, int, int, int]:
        return self._shape

    @property
    def underflowed(self) -> int:
        return self._underflowed

    @property
    def subnormals(self) -> int:
        return self._subnormals

    @property
    def schedules(self) -> typing.Dict[PlanKey, Schedule]:
        """What `autotune` kept, by call: a copy."""
        # One step of the interpreter, while another thread may keep one more.
        kept = self._schedules.copy()
        return {key: dict(schedule) for key, schedule in kept.items()}

    def _keep_schedule(self, key: PlanKey, schedule: Schedule) -> None:
        self._schedules[key] = schedule

    def plan(
        self,
        input_shape: typing.Sequence[int],
        stride: typing.Union[int, typing.Tuple[int, int]] = 1,
        padding: typing.Union[str, int, typing.Tuple[int, int]] = 0,
        dilation: typing.Union[int, typing.Tuple[int, int]] = 1,
        groups: int = 1,
        threads: typing.Optional[int] = None,
        schedule: typing.Optional[Schedule] = None,
    ) -> "CpuPlan":
        """The plan that `conv2d` computes with on the CPU for an input of this shape; print it.

        input_shape: (N, IC, H, W) or (IC, H, W). stride, padding, dilation, groups: as in
        `packedconv.conv2d`. threads: torch.get_num_threads() where None. schedule: one to use
        instead of what `autotune` kept or the estimate prefers, such as a changed copy of another
        plan's; `conv2d` goes on with its own. block_channels and strip are cut to what the layer
        has; see the plan's `schedule`.

        The first call makes the plan, executes nothing, and keeps it with the weight, so that
        later ones and `conv2d` find it: the last used ones, up to plan.MAX_PLANS plans in
        plan.MAX_PLAN_BYTES of memory.

        Raises TypeError and ValueError as `conv2d` for the same faults, ValueError for a schedule
        that this layer or build does not have, MemoryError.
        """
        from packedconv import plan

        key = plan.plan_key(self, input_shape, stride, padding, dilation, groups, threads)
        return plan.find(self, key, None if schedule is None else plan.frozen(schedule))

    def autotune(
        self,
        input_shape: typing.Sequence[int],
        stride: typing.Union[int, typing.Tuple[int, int]] = 1,
        padding: typing.Union[str, int, typing.Tuple[int, int]] = 0,
        dilation: typing.Union[int, typing.Tuple[int, int]] = 1,
        groups: int = 1,
        threads: typing.Optional[int] = None,
        seconds: float = 1.0,
    ) -> "CpuPlan":
        """Time the schedules of a call on random input and keep the fastest for `conv2d`.

        Arguments as in `plan`. Runs about `seconds`, in which large layers compare few schedules:
        give at least a hundred executions. Where no other schedule is clearly faster (3 %),
        the one that the estimate prefers is kept; where time did not suffice to compare any,
        nothing is. What is kept counts for this call on so many
        threads and this instruction set; it is in `schedules`, and saved with the weight.

        Returns the plan. Raises as `plan`, TypeError for seconds that are no number, ValueError
        where they are not positive, MemoryError for an input or output without memory.
        An error or an interrupt leaves the weight as it was.
        """
        from packedconv import autotune, plan

        key = plan.plan_key(self, input_shape, stride, padding, dilation, groups, threads)
        return autotune.autotune(self, key, seconds)

    def derived(self, name: str, make: typing.Callable[[], typing.Any]) -> typing.Any:
        """What a device or a tracer keeps beside the weight, made by `make` when first asked for.

        No part of the value: copies, pickles and comparisons leave it out.
        """
        found = self._derived.get(name)
        if found is None:
            # Of two threads that come at once, both get what the first one stored.
            found = self._derived.setdefault(name, make())
        return found

    @property
    def nnz(self) -> int:
        """Number of nonzeros."""
        return len(self._words)

    @property
    def sparsity(self) -> float:
        """Fraction of zeros S, in [0, 1]."""
        return 1.0 - self.nnz / float(np.prod(self._shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of words and offsets."""
        return self._words.nbytes + self._offsets.nbytes

    def unpack_array(self) -> np.ndarray:
        """The dense weight, float32 (OC, IC/groups, K_h, K_w); exact for what was packed."""
        dense = np.zeros(self._shape, dtype=np.float32)
        index = _word_indices(self._words, self._offsets)
        dense[index] = (self._words >> 16).astype(np.uint16).view(np.float16)
        return dense

    def unpack(self):
        """The dense weight as a torch tensor, float32 (OC, IC/groups, K_h, K_w)."""
        import torch

        return torch.from_numpy(self.unpack_array())

    def save(self, path: str) -> None:
        """Write the packed file (csrc/FORMAT.md); it appears whole or not at all."""
        from packedconv import packed_file

        packed_file.save(self, path)

    @staticmethod
    def load(path: str) -> "PackedWeight":
        """Read a packed file. Raises ValueError, naming the fault, when it is damaged."""
        from packedconv import packed_file

        return packed_file.load(path)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedWeight):
            return NotImplemented
        return (
            self._shape == other._shape
            and np.array_equal(self._words, other._words)
            and np.array_equal(self._offsets, other._offsets)
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self):
        return (
            PackedWeight,
            (
                *(self._words, self._offsets, self._shape, self._underflowed, self._subnormals),
                self.schedules,
            ),
        )

    def __repr__(self) -> str:
        return (
            f"PackedWeight(shape={self._shape}, nnz={self.nnz}, sparsity={self.sparsity:.4f}, "
            f"nbytes={self.nbytes})"
        )


def pack(weight) -> PackedWeight:
    """Pack a dense weight: torch float tensor (OC, IC/groups, K_h, K_w), on any device.

    Values are rounded to FP16 (to nearest, ties to even). Weights that FP16 turns into zero
    or a subnormal are counted in the result and reported once by a PackWarning.

    Raises TypeError when `weight` is not a floating-point tensor; ValueError for another
    rank, an empty axis, a kernel over 16 x 16, a NaN or infinity, or a value over 65504.
    """
    import torch

    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight: expected a torch.Tensor, got {type(weight).__name__}")
    if not weight.dtype.is_floating_point:
        raise TypeError(f"weight: expected a floating-point tensor, got {weight.dtype}")
    if weight.layout != torch.strided:
        raise TypeError(f"weight: expected a dense (strided) tensor, got {weight.layout}")
    if weight.device.type == "meta":
        raise ValueError("weight: expected a tensor that holds values, got one on meta")
    # A negated view (such as the imaginary part of a conjugate) holds the opposite values.
    packed = _packed(weight.detach().to("cpu", torch.float64).resolve_neg().numpy())
    _report(packed)
    return packed


def pack_array(weight: np.ndarray) -> PackedWeight:
    """`pack` for a numpy array; needs no torch."""
    if not isinstance(weight, np.ndarray):
        raise TypeError(f"weight: expected a numpy array, got {type(weight).__name__}")
    if weight.dtype.kind != "f":
        raise TypeError(f"weight: expected a floating-point array, got {weight.dtype}")
    packed = _packed(weight)
    _report(packed)
    return packed


def _report(packed: PackedWeight) -> None:
    """Warn the caller of the function that packed, when FP16 did more than round."""
    if packed.underflowed or packed.subnormals:
        warnings.warn(
            f"FP16 turned {packed.underflowed} weights into zero (dropped) and "
            f"{packed.subnormals} into subnormals of reduced precision; scale the layer's "
            "weights to keep them",
            PackWarning,
            stacklevel=3,
        )


def _packed(weight: np.ndarray) -> PackedWeight:
    shape = checked_shape(weight.shape)
    if not np.isfinite(weight).all():
        raise ValueError(
            "weight: expected finite values, got "
            f"{np.count_nonzero(~np.isfinite(weight))} NaN or infinite; "
            "mend the weights before packing"
        )
    largest = float(np.abs(weight).max())
    if largest > FP16_MAX:
        raise ValueError(
            f"weight: expected magnitudes up to {FP16_MAX:.0f} (FP16), got {largest:.9g}; "
            "scale the layer's weights and its output"
        )
    with np.errstate(under="ignore"):
        half = weight.astype(np.float16)
    kept = half != 0
    underflowed = int(np.count_nonzero((weight != 0) & ~kept))
    subnormals = int(np.count_nonzero(kept & (np.abs(half) < _FP16_MIN_NORMAL)))

    words, counts = [], []
    for first in range(0, shape[1], BLOCK_CHANNELS):
        block = half[:, first : first + BLOCK_CHANNELS]
        # Row-major order of (oc, ic, py, px) is the order that the format asks for.
        oc, channel, py, px = np.nonzero(block)
        bits = np.ascontiguousarray(block[oc, channel, py, px]).view(np.uint16)
        fields = channel << 8 | px << 4 | py
        words.append(bits.astype(np.uint32) << np.uint32(16) | fields.astype(np.uint32))
        counts.append(np.bincount(oc, minlength=shape[0]))
    ends = np.cumsum(np.concatenate(counts)).reshape(len(counts), shape[0])
    starts = np.concatenate([[0], ends[:-1, -1]])[:, None]
    offsets = np.concatenate([starts, ends], axis=1)
    if offsets[-1, -1] >= 1 << 32:
        raise ValueError(f"weight: expected under 2^32 nonzeros, got {offsets[-1, -1]}")
    return PackedWeight(
        np.concatenate(words), offsets.astype(np.uint32), shape, underflowed, subnormals
    )


def checked_shape(shape: typing.Tuple[int, ...]) -> typing.Tuple[int, int, int, int]:
    """`shape` as that of a weight, (OC, IC/groups, K_h, K_w). Raises ValueError for another."""
    if len(shape) != 4:
        raise ValueError(f"weight: expected 4 axes (OC, IC/groups, K_h, K_w), got shape {shape}")
    if min(shape) < 1:
        raise ValueError(f"weight: expected every axis at least 1, got shape {shape}")
    if max(shape[2:]) > MAX_KERNEL:
        raise ValueError(
            f"weight: expected a kernel of at most {MAX_KERNEL} x {MAX_KERNEL} (4 index bits), "
            f"got {shape[2]} x {shape[3]}"
        )
    return typing.cast(typing.Tuple[int, int, int, int], tuple(shape))


def _frozen(name: str, array: np.ndarray) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint32:
        got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name}: expected a numpy array of uint32, got {got}")
    array = np.array(array, dtype=np.uint32, order="C", copy=True)
    array.setflags(write=False)
    # A view of a read-only array cannot be made writable again.
    return array[...]


def _count(name: str, value: int) -> int:
    if not 0 <= int(value) < 1 << 64:
        raise ValueError(f"{name}: expected a count of weights, got {value}")
    return int(value)


def block_count(in_channels: int) -> int:
    """Blocks of at most 256 input channels."""
    return -(-in_channels // BLOCK_CHANNELS)


def _check_offsets(offsets: np.ndarray, shape: typing.Tuple[int, ...], nonzeros: int) -> None:
    expected = (block_count(shape[1]), shape[0] + 1)
    if offsets.shape != expected:
        raise ValueError(
            f"offsets: expected shape (blocks, OC + 1) = {expected}, got {offsets.shape}"
        )
    flat = offsets.ravel().astype(np.int64)
    falls = np.flatnonzero(np.diff(flat) < 0)
    if falls.size:
        at = int(falls[0])
        raise ValueError(
            f"offsets: expected rising values, got {flat[at + 1]} after {flat[at]} "
            f"at position {at + 1}"
        )
    if flat[0] != 0 or flat[-1] != nonzeros:
        raise ValueError(
            f"offsets: expected to run from 0 to {nonzeros} words, got {flat[0]} to {flat[-1]}"
        )
    joins = offsets[1:, 0] != offsets[:-1, -1]
    if joins.any():
        raise ValueError(
            "offsets: expected each block to begin where the one before it ends, got a gap "
            f"before block {int(np.flatnonzero(joins)[0]) + 1}"
        )


def _word_indices(
    words: np.ndarray, offsets: np.ndarray
) -> typing.Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(oc, ic, py, px) of every word."""
    counts = np.diff(offsets.astype(np.int64), axis=1)
    blocks, out_channels = counts.shape
    row = np.repeat(np.arange(blocks * out_channels), counts.ravel())
    fields = words.astype(np.int64)
    channel = row // out_channels * BLOCK_CHANNELS + (fields >> 8 & 0xFF)
    return row % out_channels, channel, fields & 0xF, fields >> 4 & 0xF


def _check_words(
    words: np.ndarray, offsets: np.ndarray, shape: typing.Tuple[int, int, int, int]
) -> None:
    oc, channel, py, px = _word_indices(words, offsets)
    limits = (("input channel", channel, shape[1]), ("row py", py, shape[2]))
    for name, values, limit in limits + (("column px", px, shape[3]),):
        outside = np.flatnonzero(values >= limit)
        if outside.size:
            at = int(outside[0])
            raise ValueError(
                f"words: expected a {name} below {limit}, got {int(values[at])} "
                f"in word {at} (0x{int(words[at]):08x})"
            )
    magnitude = words >> 16 & 0x7FFF
    wrong = np.flatnonzero((magnitude == 0) | (magnitude >= 0x7C00))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(
            f"words: expected finite nonzero FP16 values, got word {at} (0x{int(words[at]):08x})"
        )
    # Within a row of the offsets (a block and its output channel) the keys must ascend.
    row = channel // BLOCK_CHANNELS * shape[0] + oc
    key = (row * BLOCK_CHANNELS + channel % BLOCK_CHANNELS) * 256 + py * 16 + px
    falls = np.flatnonzero(np.diff(key) <= 0)
    if falls.size:
        at = int(falls[0]) + 1
        raise ValueError(
            "words: expected to ascend by (input channel, py, px) within an output channel, "
            f"got word {at} (0x{int(words[at]):08x}) out of order"
        )
