"""Promises about the package as a whole: what importing it does, what its source has not, how long files are."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400
SOURCES = sorted((ROOT / "kvcomm").rglob("*.py"))
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "jsonpickle"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system"}
BANNED_CALLS |= {"numpy.load", "np.load", "joblib.load", "pd.read_pickle", "torch.save"}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a call's target, as far as it is written with names."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


# Tests that the package ships for stores of others; they check a store, not input.
SHIPPED_TESTS = {"kvcomm/store/testing.py"}


def findings(source: str, asserts: bool = False) -> list[str]:
    """What the package's source may not contain, with line numbers; ``asserts`` lets assert statements be."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Assert) and not asserts:
            found.append(f"{node.lineno}: assert vanishes under python -O; raise an error of kvcomm.errors")
        elif isinstance(node, ast.Call):
            target = dotted(node.func)
            if target in BANNED_CALLS:
                found.append(f"{node.lineno}: {target}()")
            shell = any(k.arg == "shell" and getattr(k.value, "value", True) is not False for k in node.keywords)
            if shell:
                found.append(f"{node.lineno}: shell=True")
        found += [f"{node.lineno}: import of {n}" for n in names if n.split(".")[0] in BANNED_MODULES]
        found += [f"{node.lineno}: import of {n}" for n in names if n in BANNED_CALLS]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_source_has_nothing_that_executes_data_and_no_assert(path: Path) -> None:
    shipped_test = path.relative_to(ROOT).as_posix() in SHIPPED_TESTS
    assert findings(path.read_text(encoding="utf-8"), asserts=shipped_test) == []


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from pickle import loads",
        "import shelve as s",
        "import marshal",
        "torch.load(f)",
        "from torch import load",
        "eval(x)",
        "exec(x)",
        "yaml.load(x)",
        "run(x, shell=True)",
        "run(x, shell=flag)",
        "assert x",
        "def f():\n    import dill",
    ],
)
def test_the_scan_sees(bad: str) -> None:
    assert findings(bad)


def test_the_scan_lets_pass() -> None:
    assert findings("model.eval()\nrun(x, shell=False)\nimport json\njson.load(f)\nre.compile('x')") == []


def tracked_sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True
    )
    if listed.returncode == 0:
        names = [Path(line) for line in listed.stdout.decode().splitlines()]
    else:  # an unpacked archive
        names = [p.relative_to(ROOT) for top in ("kvcomm", "eval", "examples") for p in (ROOT / top).rglob("*.py")]
    return [name for name in names if name.parts[0] != "tests" and (ROOT / name).is_file()]


def test_files_stay_short() -> None:
    sources = tracked_sources()
    assert len(sources) > 5
    long = {str(n): k for n in sources if (k := len((ROOT / n).read_text(encoding="utf-8").splitlines())) > MAX_LINES}
    assert long == {}, f"over {MAX_LINES} lines: split them by idea"


def test_import_does_not_import_torch() -> None:
    program = "import sys, kvcomm; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120).returncode == 0


def test_import_is_quick_and_touches_neither_transformers_nor_a_device() -> None:
    program = """
import json, sys, threading, time
import torch
before, threads = set(sys.modules), torch.get_num_threads()
start = time.perf_counter()
import kvcomm
seconds = time.perf_counter() - start
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps({
    "heavy": sorted(new & {"transformers", "vllm", "triton", "faiss", "matplotlib", "rich", "typer", "eval"}),
    "cuda": torch.cuda.is_initialized(), "threads": torch.get_num_threads() - threads,
    "live": threading.active_count(), "seconds": seconds,
}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("seconds") < 1.0
    assert said == {"heavy": [], "cuda": False, "threads": 0, "live": 1}


def test_import_changes_nothing_in_transformers() -> None:
    program = """
import transformers, transformers.cache_utils as c, transformers.modeling_rope_utils as r
def state():
    return {f"{m.__name__}.{k}": id(v) for m in (transformers, c, r) for k, v in vars(m).items() if callable(v)} | {
        f"{o.__qualname__}.{k}": id(v) for o in vars(c).values() if isinstance(o, type) for k, v in vars(o).items()}
before = state()
import kvcomm
after = state()
print({k for k in before if after.get(k) != before[k]})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_no_registry_host_or_home_in_tracked_text() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    homes = ("/" + "work/", "/" + "root/", "files.python" + "hosted.org", "pypi" + ".org/simple")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_bytes().decode("utf-8", "replace")
        assert not [h for h in homes if h in text], name


def test_command_line_says_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "kvcomm.cli"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 2)
    code = "import sys; sys.argv = ['kvcomm', 'version']; from kvcomm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "0.1.0")
