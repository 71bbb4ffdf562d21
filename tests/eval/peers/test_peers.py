"""Peers: dense runs never profit from reuse, ratios by hand, what is absent says why, the server's protocol."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.peers import llama_server
from eval.peers.base import Absent, Answer
from eval.peers.command import WARM_UP, measure, summary
from eval.peers.kvboost import KVBoost
from eval.peers.llama_server import LlamaServer
from eval.peers.ours import Ours
from eval.peers.vllm_cpu import VLLM
from eval.running.setting import Setting
from kvcomm import Segment, Slot, System
from kvcomm.hf.template import Template
from kvcomm.reuse.prompt import Prompt
from tests.eval.tiny_setting import tiny_setting


@pytest.fixture(scope="module")
def setting() -> Setting:
    return tiny_setting()


def prompts(setting: Setting, count: int) -> dict[str, list[Prompt]]:
    found = {}
    for n in range(count):
        ids = setting.tokenizer(f"Harbour {n} has a light that turns once a minute. " * 12)["input_ids"]
        document = Segment(tuple(ids))
        found[f"case {n}"] = [
            Template(who, [System(f"You are the {who}."), Slot("d"), "\nSpeak."], setting.tokenizer).fill(
                {"d": document}
            )
            for who in ("planner", "analyst")
        ]
    return found


class Recording:
    """Says what it was asked, in order; reuse is four times as fast and keeps three of four tokens.

    The same prompt asked again takes an eighth of the time, all of it reused.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self._last: Prompt | None = None

    def answer(self, prompt: Prompt, tokens: int, reuse: bool) -> Answer:
        self.calls.append((len(prompt), reuse))
        again, self._last = prompt is self._last, prompt
        if again and reuse:
            return Answer(0.125, (1, 2, 3, 4), len(prompt))
        return Answer(0.25, (1, 2, 3, 9), len(prompt) // 2) if reuse else Answer(1.0, (1, 2, 3, 4), 0)


def test_reuse_comes_first_and_is_compared_with_the_same_prompt_dense(setting: Setting) -> None:
    running, asked = Recording(), prompts(setting, WARM_UP + 2)
    rows = measure(running, asked, 4)
    reuses = [reuse for _, reuse in running.calls]
    assert reuses == [True] * (3 * (WARM_UP + 2)) + [False] * 2
    assert [row["case"] for row in rows] == ["case 3", "case 4"]
    found = summary(rows)
    assert found["ratio"]["value"] == 4 and found["kept"]["value"] == 0.75 and found["first_token"]["value"] == 1
    assert found["reused"]["value"] == pytest.approx(0.5, abs=0.01) and found["ratio"]["n"] == 2
    assert found["again_ratio"]["value"] == 8 and found["again"]["value"] == 1


def test_ours_leaves_nothing_behind_when_dense(setting: Setting) -> None:
    asked = next(iter(prompts(setting, 1).values()))
    with Ours().run(setting) as running:
        assert running.answer(asked[0], 2, reuse=False).reused == 0
        assert running.answer(asked[0], 2, reuse=True).reused == 0
        again = running.answer(asked[0], 2, reuse=True)
        assert again.reused == len(asked[0]) - 1
        assert again.tokens == running.answer(asked[0], 2, reuse=False).tokens


@pytest.mark.parametrize(("peer", "module"), [(KVBoost(), "kvboost"), (VLLM(), "vllm")])
def test_what_is_not_installed_says_how_to_get_it(
    peer: Any, module: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Absent, match="make peers"), peer.run(setting):
        pass


def test_without_a_server_llama_is_absent(setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(llama_server.PROGRAM, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Absent, match="llama-server"), LlamaServer().run(setting):
        pass


_SERVER = """#!{python}
import http.server, json, sys
if sys.argv[1:] == ["--version"]: sys.exit("version: 7")
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self): self.send_response(200); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200); self.end_headers()
        for n in range(asked["n_predict"]):
            self.wfile.write(b"data: " + json.dumps({{"tokens": [asked["prompt"][n]]}}).encode() + b"\\n\\n")
        last = {{"tokens": [], "timings": {{"cache_n": 7 if asked["cache_prompt"] else 0}}}}
        self.wfile.write(b"data: " + json.dumps(last).encode() + b"\\n\\n")
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[sys.argv.index("--cache-reuse") + 1] == "16"
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_the_server_is_started_asked_and_ended(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(_SERVER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(llama_server.PROGRAM, str(program))
    monkeypatch.setattr(llama_server, "wheel_file", lambda source: tmp_path / "model.gguf")
    default = Setting(setting.model, setting.tokenizer, "SmolLM2-135M-Instruct", setting.digest)
    prompt = next(iter(prompts(setting, 1).values()))[0]
    with LlamaServer(16).run(default) as running:
        reused, dense = (running.answer(prompt, 3, reuse=reuse) for reuse in (True, False))
        port = running.port
        assert running.version == "7"
    assert reused.tokens == dense.tokens == prompt.token_ids[:3]
    assert (reused.reused, dense.reused) == (7, 0) and reused.ttft_s > 0
    with pytest.raises(OSError):
        llama_server.http.client.HTTPConnection("127.0.0.1", port, timeout=1).connect()


def test_a_server_that_ends_at_once_is_named(setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(llama_server.PROGRAM, "/bin/false")
    monkeypatch.setattr(llama_server, "wheel_file", lambda source: tmp_path / "model.gguf")
    default = Setting(setting.model, setting.tokenizer, "SmolLM2-135M-Instruct", setting.digest)
    with pytest.raises(Absent, match="status 1"), LlamaServer().run(default):
        pass
