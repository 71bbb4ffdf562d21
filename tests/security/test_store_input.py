"""Files made by an enemy: a typed error, soon, with bounded memory; and no code in the package that could run them."""

import ast
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import xxhash

import kvcomm
from kvcomm.errors import CorruptEntry
from kvcomm.store import DiskStore
from kvcomm.store.codec import BytesSource, EntryReader, EntryWriter
from kvcomm.store.testing import sample

PACKAGE = Path(kvcomm.__file__).parent
SOURCES = [*sorted((PACKAGE / "store").glob("*.py")), PACKAGE / "store_cli.py", PACKAGE / "cli.py"]
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "yaml", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "torch.load", "torch.save", "yaml.load", "__import__"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_source_has_nothing_that_runs_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not {n.split(".")[0] for n in names} & FORBIDDEN_IMPORTS
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS
        if path.name != "testing.py":
            assert not isinstance(node, ast.Assert)


class Boom:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.exit, ("a pickle was loaded",))


def forged(**changes: str) -> bytes:
    """A file whose checksum is right and whose header says something else."""
    key, entry = sample(1)
    data = b"".join(b"".join(part) for part in EntryWriter(key, entry, "raw", 1.0, None))
    length = struct.unpack_from("<I", data, 12)[0]
    text = data[112 : 112 + length].decode().rstrip()
    for name, value in changes.items():
        start = text.index(f'"{name}":') + len(name) + 3
        end = min(i for i in (text.find(",", start), text.find("}", start)) if i > 0)
        text = text[:start] + value + text[end:]
    header = text.encode().ljust(-(-(112 + len(text)) // 64) * 64 - 112)
    rest = data[112 + length :]
    start_bytes = struct.pack("<8sHHIIIQ", *struct.unpack_from("<8sHHI", data), 3, 0, 112 + len(header) + len(rest))
    bound = start_bytes + data[32:96]
    return bound + xxhash.xxh3_128_digest(bound + header) + header + rest


ENEMIES = {
    "pickle": pickle.dumps(Boom()),
    "pickle in place of frames": forged() [:960] + pickle.dumps(Boom()),
    "many tokens": forged(tokens=str(2**22)),
    "too many tokens": forged(tokens=str(2**22 + 1)),
    "huge tokens": forged(tokens="9" * 4000),
    "float tokens": forged(tokens="3.0"),
    "negative tokens": forged(tokens="-3"),
    "many layers": forged(n_layers="4096"),
    "huge heads": forged(n_kv_heads=str(2**16)),
    "wide": forged(head_dim=str(2**16)),
    "all huge": forged(tokens=str(2**22), n_layers="4096", n_kv_heads=str(2**16), head_dim=str(2**16)),
    "unknown dtype": forged(dtype='"object"'),
    "integer dtype": forged(dtype='"int64"'),
    "not a dtype": forged(dtype='"load"'),
    "lossy": forged(encoding='"int8"'),
    "infinite time": forged(created_s="Infinity"),
    "deep": forged(group="[" * 20000 + "]" * 20000),
    "other namespace": forged(namespace='"two"'),
    "path": forged(namespace='"../../etc"'),
}  # fmt: skip


@pytest.mark.parametrize("name", ENEMIES)
def test_enemy_is_refused_soon_and_with_little_memory(name: str) -> None:
    data = ENEMIES[name]
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(CorruptEntry):
        EntryReader(BytesSource(data), "one", sample(1)[0]).verify()
    took = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert took < 0.1  # 10 ms untraced; tracing makes it several times slower


def test_forging_itself_works() -> None:
    EntryReader(BytesSource(forged()), "one", sample(1)[0]).verify()


def test_checks_hold_without_asserts(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.put(*sample(1))
    (path,) = (p for p in (tmp_path / "entries").rglob("*") if p.is_file())
    good = path.read_bytes()
    path.write_bytes((good[:700] + pickle.dumps(Boom())).ljust(len(good), b"\0")[: len(good)])
    code = (
        "import sys\nfrom kvcomm.errors import CorruptEntry\nfrom kvcomm.store import DiskStore\n"
        "from kvcomm.keys import CacheKey, Recipe\nfrom kvcomm.types import *\n"
        "m = ModelFingerprint('Test', 'w' * 64, 'r' * 64, 'float32', '', 't' * 64, 2, 2, 4)\n"
        "s = Segment(tuple(1009 + i for i in range(3)))\n"
        "k = CacheKey.of(Namespace('one'), m, s, Recipe('isolated', '', 'neutral', False))\n"
        f"store = DiskStore({str(tmp_path)!r})\n"
        "try:\n    store.get(k)\nexcept CorruptEntry:\n    print('refused', store.get(k))\n"
    )
    result = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "refused None\n"
