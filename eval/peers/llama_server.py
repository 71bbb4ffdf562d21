"""llama.cpp's server on the GGUF that the default model is made from: its prefix cache, and with --cache-reuse."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eval.files.fetch import wheel_file
from eval.models.default import SMOLLM2
from eval.peers.base import Absent, Answer
from eval.running.setting import Setting
from kvcomm.reuse.prompt import Prompt

PROGRAM = "KVCOMM_LLAMA_SERVER"
CONTEXT = 4096
START_S = 60.0
CALL_S = 300.0


@dataclass(frozen=True)
class LlamaServer:
    """Fields: ``chunk``, --cache-reuse: runs of so many tokens are shifted to their new place; 0, prefixes alone."""

    chunk: int = 0

    @property
    def name(self) -> str:
        """As it is reported."""
        return f"llama.cpp, --cache-reuse {self.chunk}" if self.chunk else "llama.cpp, prefix"

    @contextmanager
    def run(self, setting: Setting) -> Iterator[_Running]:
        """Start the server on a port of its own and end it afterwards.

        Raises:
            Absent: there is no llama-server, it does not start, or the model is another than the GGUF's.
        """
        program = os.environ.get(PROGRAM) or shutil.which("llama-server")
        if program is None:
            raise Absent(f"there is no llama-server on the PATH; build llama.cpp, or name the program in {PROGRAM}")
        if setting.name != "SmolLM2-135M-Instruct":
            raise Absent(f"there is no GGUF of {setting.name}; llama.cpp is compared on the default model")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            program, "-m", str(wheel_file(SMOLLM2)), "--host", "127.0.0.1", "--port", str(port), "-c", str(CONTEXT),
            "-np", "1", "-ngl", "0", "-t", str(setting.describe()["threads"]), "--cache-reuse", str(self.chunk),
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(server, port)
            yield _Running(port, _version(program))
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise Absent(f"llama-server ended with status {server.returncode}; run it by hand to see why")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise Absent(f"llama-server was not ready after {START_S:.0f} s; run it by hand to see why")


def _version(program: str) -> str:
    """The first line of ``--version``, which goes to standard error."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=START_S)
    return (said.stderr or said.stdout).strip().partition("\n")[0].removeprefix("version: ")


@dataclass(frozen=True)
class _Running:
    port: int
    version: str

    def answer(self, prompt: Prompt, tokens: int, reuse: bool) -> Answer:
        """See Running; TTFT is that of the first streamed token."""
        asked = {
            "prompt": list(prompt.token_ids), "n_predict": tokens, "temperature": 0, "top_k": 1, "cache_prompt": reuse,
            "stream": True, "return_tokens": True,
        }  # fmt: skip
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)
        connection.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
        ttft_s, found, last = 0.0, [], {}
        for event in _events(connection.getresponse()):
            if not found and event.get("tokens"):
                ttft_s = time.perf_counter() - started
            found += event.get("tokens", [])
            last = event
        connection.close()
        return Answer(ttft_s, tuple(found), int(last.get("timings", {}).get("cache_n", 0)))


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise Absent(f"llama-server refused the prompt: {event['error']}")
            yield event
