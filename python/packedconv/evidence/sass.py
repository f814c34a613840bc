"""Machine code of NVIDIA GPUs as their disassembler prints it: functions, loops, counts.

Reads the text of `nvdisasm -c` (labels) and of `cuobjdump -sass` (addresses), and the resource
usage of `cuobjdump -res-usage`. Instructions are counted as they stand in the code: what a
predicate switches off takes an issue slot too.
"""

import collections
import re
from collections.abc import Iterator
from typing import NamedTuple

_FUNCTION = re.compile(r"^(?:\.text\.(\S+):|\s*Function : (\S+))\s*$")
_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:(@\S+)\s+)?([A-Z][\w.]*)(.*?);")
_LABEL_OPERAND = re.compile(r"`\((\.L\w+)\)")
_ADDRESS_OPERAND = re.compile(r"\b0x([0-9a-f]+)\s*$")
_RESOURCES = re.compile(r"Function (\S+):\s+((?:[A-Z]+(?:\[\d+\])?:\d+\s*)+)")


class Instruction(NamedTuple):
    """`address` in bytes; `opcode` with its modifiers, such as LDS.128; `target` of a branch."""

    address: int
    predicate: str
    opcode: str
    operands: str
    target: int | None

    @property
    def operation(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def is_input_load(self) -> bool:
        """Whether it loads one 32-bit value per lane from shared memory."""
        return self.opcode in ("LDS", "LDS.U", "LDS.32", "LDS.U.32")


class Loop(NamedTuple):
    """One iteration of a loop, counted. Kernels load their input from shared memory as 32-bit
    values and weights as wider ones, or from global memory."""

    instructions: int
    fma: int
    input_loads: int
    weight_shared_loads: int
    weight_global_loads: int
    branches: int  # besides the one that closes the loop
    others: dict[str, int]  # neither FMA nor one of the loads, by opcode

    @property
    def shared_loads(self) -> int:
        return self.input_loads + self.weight_shared_loads


class Resources(NamedTuple):
    """Of a thread: registers, and bytes of local memory, where spilled registers go."""

    registers: int
    stack_bytes: int
    local_bytes: int


def functions(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every function of a disassembly, by its (mangled) name.

    Raises ValueError for a branch to a label that the function does not have.
    """
    found: dict[str, list[Instruction]] = {}
    for name, lines in _function_lines(text):
        labels, parts = {}, []
        waiting: list[str] = []
        for line in lines:
            label = _LABEL.match(line)
            if label:
                waiting.append(label[1])
                continue
            match = _INSTRUCTION.search(line)
            if match:
                address = int(match[1], 16)
                labels.update(dict.fromkeys(waiting, address))
                waiting = []
                parts.append((address, match[2] or "", match[3], match[4].strip()))
        found[name] = [
            Instruction(*part, _target(name, part[2], part[3], labels)) for part in parts
        ]
    return found


def resources(text: str) -> dict[str, Resources]:
    """Registers, stack and local memory of every function, from `cuobjdump -res-usage`."""
    found = {}
    for name, listed in _RESOURCES.findall(text):
        numbers = dict(part.rsplit(":", 1) for part in listed.split())
        found[name] = Resources(int(numbers["REG"]), int(numbers["STACK"]), int(numbers["LOCAL"]))
    return found


def main_loop(instructions: list[Instruction]) -> Loop | None:
    """The loop that multiplies: the largest of the innermost loops that load from shared memory
    and hold FMAs. A loop over what an unrolled one leaves has fewer FMAs. None without any."""
    candidates = []
    for first, last in _loops(instructions):
        body = [part for part in instructions if first <= part.address <= last]
        operations = {part.operation for part in body}
        if {"FFMA", "LDS"} <= operations:
            candidates.append((first, last, body))
    innermost = [
        body
        for first, last, body in candidates
        if not any(
            first <= other[0] and other[1] <= last and (first, last) != other[:2]
            for other in candidates
        )
    ]
    counted = [_count(body) for body in innermost]
    return max(counted, key=lambda loop: loop.fma, default=None)


def _function_lines(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = None, []
    for line in text.splitlines():
        match = _FUNCTION.match(line)
        if match:
            if name is not None:
                yield name, lines
            name, lines = match[1] or match[2], []
        elif name is not None:
            lines.append(line)
    if name is not None:
        yield name, lines


def _target(name: str, opcode: str, operands: str, labels: dict[str, int]) -> int | None:
    if opcode.split(".")[0] != "BRA":
        return None
    label = _LABEL_OPERAND.search(operands)
    if label:
        if label[1] not in labels:
            raise ValueError(f"{name}: a branch to {label[1]}, expected a label of the function")
        return labels[label[1]]
    address = _ADDRESS_OPERAND.search(operands)
    return int(address[1], 16) if address else None


def _loops(instructions: list[Instruction]) -> list[tuple[int, int]]:
    """First and last address of every loop: from the target of backward branches to the last of
    them."""
    ends: dict[int, int] = {}
    for part in instructions:
        if part.target is not None and part.target <= part.address:
            ends[part.target] = max(part.address, ends.get(part.target, 0))
    return list(ends.items())


def _count(body: list[Instruction]) -> Loop:
    fma = [part for part in body if part.operation == "FFMA"]
    inputs = [part for part in body if part.is_input_load]
    shared = [part for part in body if part.operation == "LDS" and not part.is_input_load]
    weights = [part for part in body if part.operation in ("LDG", "LD")]
    counted = {part.address for part in (*fma, *inputs, *shared, *weights)}
    others = collections.Counter(part.opcode for part in body if part.address not in counted)
    return Loop(
        instructions=len(body),
        fma=len(fma),
        input_loads=len(inputs),
        weight_shared_loads=len(shared),
        weight_global_loads=len(weights),
        branches=sum(part.operation == "BRA" for part in body) - 1,
        others=dict(sorted(others.items(), key=lambda item: (-item[1], item[0]))),
    )
