"""Compile every kernel ahead of time for GPUs that are not here, and fail where one spills registers.

    python -m benchmarks.compile_kernels            compile, print the table, write it to docs/kernels.md
    python -m benchmarks.compile_kernels --check    compile, print the table, write nothing

What is compiled is what would run: the launches that ``kvcomm.rope.launch`` makes for these shapes, with the types,
divisibilities and constants that Triton would find in their arguments. Registers and spills are read from the machine
code: NVIDIA's with the cuobjdump that Triton ships, AMD's from the metadata of the assembly.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvcomm.rope import LayerRope, RopeSpec
from kvcomm.rope.launch import Launch, launches
from kvcomm.rope.view import AddedOffset, KVView, LinearMap, Scales

DOC = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
LAYERS, HEADS, TOKENS, PAGE, BUCKETS = 32, 8, 512, 16, 36


@dataclass(frozen=True)
class Case:
    """One kernel as one kind of caller launches it. ``what`` is one of the keys of ``WHAT``."""

    what: str
    dtype: str
    head_dim: int = 128
    rotary_dim: int = 128
    interleaved: bool = False
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        partial = "" if self.rotary_dim == self.head_dim else f", {self.rotary_dim} turned"
        few = "" if self.tokens == TOKENS else f", {self.tokens} tokens"
        return f"{self.what}, D {self.head_dim}{partial}{', interleaved' if self.interleaved else ''}{few}"


WHAT = {
    "unrotate (cut)": "KV out of a paged cache into the unrotated frame",
    "place": "a base, turned, into a contiguous buffer",
    "place + offset": "the same plus an offset of the same dtype",
    "place + offset, paged": "the same into a paged cache",
    "place int8": "the same without an offset from int8 codes, a scale a token",
    "place int8 by dimension": "keys' scales a dimension, values' a token",
    "place linear": "base plus a linear map of it, float32 weights, into a paged cache",
    "place linear int8": "the same from int8 codes",
    "place linear, 16-bit W": "weights of the base's dtype",
}


def cases() -> Iterator[Case]:
    """All of them at head_dim 128; the largest users of registers at other sizes and pairings too."""
    for dtype in DTYPES:
        for what in WHAT:
            if not (what.endswith("16-bit W") and dtype == "fp32"):
                yield Case(what, dtype)
        for what in ("unrotate (cut)", "place + offset, paged", "place linear"):
            yield Case(what, dtype, 128, 128, True)
            yield Case(what, dtype, 64, 64)
            yield Case(what, dtype, 256, 256)
            yield Case(what, dtype, 80, 80)
            yield Case(what, dtype, 128, 64)
            yield Case(what, dtype, 256, 64, True)
        yield Case("place linear", dtype, tokens=32)  # smaller tiles
        yield Case("place linear", dtype, 256, 256, tokens=32)


def launch_of(case: Case, layers: int = LAYERS, device: str = "cpu", **to: bool) -> Launch:
    """The launch for a case. On the CPU its tensors are never read; contents are not set anywhere but in indices."""
    dim, dtype, tokens = case.head_dim, DTYPES[case.dtype], case.tokens
    spare = 19  # the buffer is longer than the segment, and pages are begun midway
    rope = LayerRope("default", (1.0,) * (case.rotary_dim // 2), 1.0, dim, case.interleaved)
    spec = RopeSpec((rope,) * layers)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def segment(layers: int, dtype: torch.dtype) -> KVView:
        kv = empty(2, layers, HEADS, tokens + spare, dim, dtype=dtype)
        return KVView.contiguous(kv[0][:, :, :tokens], kv[1][:, :, :tokens])

    positions = torch.arange(tokens, device=device)
    table = torch.arange(-(-(tokens + spare) // PAGE), dtype=torch.int32, device=device)
    pages = empty(2, layers, len(table), PAGE, HEADS, dim, dtype=dtype)
    paged = KVView.paged(pages[0], pages[1], table, tokens, spare - 2)
    if case.what.startswith("unrotate"):
        return launches(paged, segment(layers, dtype), positions, spec, inverse=True, **to)[0]
    base, scales = segment(layers, torch.int8 if "int8" in case.what else dtype), None
    if "int8" in case.what:
        by_token, by_dim = empty(layers, HEADS, tokens, 1), empty(layers, HEADS, 1, dim)
        scales = Scales(by_dim if case.what.endswith("dimension") else by_token, by_token)
    offset: AddedOffset | LinearMap | None = None
    factor = empty(layers - 1, 2)
    if "linear" in case.what:
        weights = empty(layers - 1, HEADS, 2 * dim, 2 * dim, dtype=dtype if "16-bit" in case.what else torch.float32)
        mean = empty(layers - 1, HEADS, BUCKETS, 2 * dim)
        offset = LinearMap(weights.mT, mean, positions.clamp_max(BUCKETS - 1), factor)
    elif "offset" in case.what:
        offset = AddedOffset(segment(layers - 1, dtype), factor)
    target = paged if "paged" in case.what or "linear" in case.what else segment(layers, dtype)
    return launches(base, target, positions, spec, scales=scales, offset=offset, **to)[0]


class Result(NamedTuple):
    """What the machine code uses. ``spills``: bytes of local memory, or on AMD spilled registers and scratch bytes."""

    case: Case
    target: str
    registers: int
    spills: int
    shared: int


def compile_one(case: Case, target: str) -> Result:
    """Compile a case for a target.

    Raises:
        RuntimeError: the compiler refused; its message follows.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, warp = TARGETS[target]
    launch = launch_of(case, hip=backend == "hip")
    constants: dict[str, Any] = dict(launch.constants)
    signature, attributes = {}, {}
    for parameter in launch.kernel.params:
        name, specialised = parameter.name, not parameter.do_not_specialize
        value = launch.arguments.get(name)
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            divisible = value.data_ptr() % 16 == 0
        elif name in constants or (value == 1 and specialised):
            signature[name] = "constexpr"
            constants.setdefault(name, 1)
            divisible = False
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"  # type: ignore[operator]
            divisible = specialised and value % 16 == 0  # type: ignore[operator]
        if divisible:
            attributes[(launch.kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    try:
        binary = triton.compile(source, target=GPUTarget(backend, arch, warp), options=launch.options)
    except Exception as error:
        raise RuntimeError(f"{case.name} {case.dtype} does not compile for {target}: {error}") from error
    registers, spills = _amd(binary.asm["amdgcn"]) if backend == "hip" else _nvidia(binary.asm["cubin"])
    return Result(case, target, registers, spills, int(binary.metadata.shared))


def _nvidia(cubin: bytes) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def _amd(assembly: str) -> tuple[int, int]:
    def read(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        if found is None:
            raise RuntimeError(f"the assembly does not say {name}")
        return int(found.group(1))

    spilled = read("vgpr_spill_count") + read("sgpr_spill_count") + read("private_segment_fixed_size")
    return read("vgpr_count"), spilled


def bytes_per_element(case: Case, layers: int = LAYERS) -> float:
    """Bytes of device memory moved for each key or value written: every input once, the output once."""
    size, dim = DTYPES[case.dtype].itemsize, case.head_dim
    total = float(size + (1 if "int8" in case.what else size))
    if "int8" in case.what:
        total += 4 / dim  # scales
    later = (layers - 1) / layers  # the first layer has no offset
    if "offset" in case.what:
        total += size * later
    if "linear" in case.what:
        weight = size if "16-bit" in case.what else 4
        total += (weight * 2 * dim + 4 * BUCKETS) / case.tokens * later  # W and the means
    return total + 4 * case.rotary_dim / (2 * dim * HEADS * layers)  # one table of cosines and sines for all layers


def table(results: list[Result]) -> str:
    """Markdown: a row a case and dtype; registers / shared KiB per target."""
    by_case: dict[Case, dict[str, Result]] = {}
    for result in results:
        by_case.setdefault(result.case, {})[result.target] = result
    head = f"| kernel | dtype | bytes an element | {' | '.join(TARGETS)} |\n|---|---|---|{'---|' * len(TARGETS)}"
    rows = []
    for case, found in by_case.items():
        cells = [
            f"{r.registers} / {r.shared / 1024:.0f}" + (f" **spills {r.spills}**" if r.spills else "")
            for r in found.values()
        ]
        rows.append(f"| {case.name} | {case.dtype} | {bytes_per_element(case):.2f} | {' | '.join(cells)} |")
    return "\n".join([head, *rows])


def write(text: str) -> None:
    """Put the table between the markers of docs/kernels.md."""
    document = DOC.read_text(encoding="utf-8")
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    DOC.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Compile everything; 1 where anything spills."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--only", default="", help="only cases whose name and dtype contain this")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this target; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    chosen = [case for case in cases() if options.only in f"{case.name} {case.dtype}"]
    todo = [(case, target) for case in chosen for target in options.target or TARGETS]
    with ProcessPoolExecutor(options.jobs) as pool:
        results = list(pool.map(compile_one, *zip(*todo, strict=True)))
    print(text := table(results))
    spilling = [result for result in results if result.spills]
    for result in spilling:
        print(f"{result.case.name} {result.case.dtype} on {result.target} spills {result.spills}", file=sys.stderr)
    if not (options.check or options.only or options.target or spilling):
        import triton

        write(f"Triton {triton.__version__}, {TOKENS} tokens, {HEADS} KV heads, {LAYERS} layers.\n\n{text}")
    return 1 if spilling else 0


if __name__ == "__main__":
    raise SystemExit(main())
