"""A prefill is handed over: the decoding engine starts without prefilling, and its answer is the one of one process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvcomm import Engine, Exact
from kvcomm.cli import app
from kvcomm.errors import (
    AccessDenied,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidInput,
    KVCommError,
    ProtocolError,
    StoreUnavailable,
)
from kvcomm.hf.handover import hand_over
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.serve.server import Server
from kvcomm.serve.service import local_door
from kvcomm.serve.worker import Worker
from kvcomm.serve.worker_client import WorkerClient
from kvcomm.serve.worker_session import WorkerSession
from kvcomm.transfer import layers
from kvcomm.transfer.bind import listen_unix
from kvcomm.transfer.remote import RemoteStore
from kvcomm.types import Segment
from tests.hf.engines import answer, engine_of
from tests.reuse.scene import tokens
from tests.serve.here import Proxy, cut_at, service_here

LENGTHS = (30, 1, 0, 90, 12)
NEW = 6


def prompt_of(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> Prompt:
    parts = [Part(Segment(tokens(n, seed + 10 * i)), f"writer/{i}") for i, n in enumerate(lengths)]
    return Prompt(tuple(parts))


@contextmanager
def running(path: Path, worker: Worker) -> Iterator[str]:
    server = Server(lambda wire: WorkerSession(worker, wire, local_door), [listen_unix(path)])
    server.start()
    try:
        yield f"unix:{path}"
    finally:
        server.stop(0.5)


def forwards(engine: Engine) -> list[int]:
    """Grows by the number of tokens of each forward of the engine's model."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        seen.append(int(ids.shape[1]))

    engine.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.fixture(scope="module")
def prefill_engine() -> Engine:
    return engine_of(policy=Exact(), learn=False)


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    return answer(engine_of(), prompt_of(), NEW)


@contextmanager
def pair(folder: Path, prefilling: Engine, **options: Any) -> Iterator[tuple[WorkerClient, Engine, Proxy]]:
    """A prefill worker, a proxy before it, and a decode worker's client and engine."""
    decoding = engine_of(policy=Exact())
    with running(folder / "w.sock", Worker(prefilling, "prefill")) as address:
        proxy = Proxy(folder, address)
        prefiller = WorkerClient(proxy.address)
        worker = Worker(decoding, "decode", prefiller=prefiller, **options)
        with running(folder / "d.sock", worker) as door:
            client = WorkerClient(door)
            try:
                yield client, decoding, proxy
            finally:
                client.close()
                prefiller.close()
                proxy.close()


def test_decode_starts_without_prefilling(
    tmp_path: Path, prefill_engine: Engine, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "PART_BYTES", 1000)  # a layer in many parts, none of a whole tensor
    prompt = prompt_of()
    with pair(tmp_path, prefill_engine) as (client, decoding, _):
        computed, theirs = forwards(decoding), forwards(prefill_engine)
        reply = client.generate(prompt, max_new_tokens=NEW)
        assert reply.token_ids == expected
        assert set(computed[:NEW]) == {1} and reply.reused == len(prompt) - 1 == reply.prompt_tokens - 1
        assert theirs == [len(prompt)]
        again = client.generate(prompt, max_new_tokens=NEW)  # held now, so nothing is asked for
        assert again.token_ids == expected and len(theirs) == 1
        longer = Prompt((*prompt.parts, *prompt_of(5, (40,)).parts))
        told = client.generate(longer, max_new_tokens=NEW)  # only the part that is new is sent
        assert told.token_ids == answer(decoding, longer, NEW) and told.reused == len(longer) - 1
        assert len(theirs) == 2


def test_layers_leave_while_the_next_ones_are_computed(tmp_path: Path, prefill_engine: Engine) -> None:
    prompt, decoding = prompt_of(2), engine_of(policy=Exact())
    blocks = prefill_engine.model.base_model.layers
    arrived = threading.Event()
    in_time: list[bool] = []
    hook = blocks[-1].register_forward_pre_hook(lambda *_: in_time.append(arrived.wait(10.0)))
    try:
        with running(tmp_path / "w.sock", Worker(prefill_engine, "prefill")) as address:
            client = WorkerClient(address)
            client.prefill(decoding, prompt)
            base = decoding.pool.get(prompt.parts[0].segment, next(iter(decoding.pool._arriving)).recipe)
            assert base is not None
            base.kv.layer(0)  # type: ignore[attr-defined]
            arrived.set()
            assert torch.isfinite(base.kv.keys).all()
            client.close()
    finally:
        hook.remove()
    assert in_time == [True]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 0.7, 0.99])
def test_a_connection_cut_anywhere_means_computing_here(
    tmp_path: Path, prefill_engine: Engine, expected: tuple[int, ...], share: float
) -> None:
    prompt = prompt_of()
    size = len(prompt) * prefill_engine.pool.fingerprint.bytes_per_token
    with pair(tmp_path, prefill_engine) as (client, decoding, proxy):
        proxy.answers = cut_at(int(share * size))
        computed = forwards(decoding)
        reply = client.generate(prompt, max_new_tokens=NEW)
    assert reply.token_ids == expected and reply.reused == 0
    assert max(computed) == len(prompt)
    assert not decoding.pool._arriving


def test_a_pass_ends_when_nobody_receives(prefill_engine: Engine) -> None:
    tried, finished = threading.Event(), []
    last = prefill_engine.model.base_model.layers[-1]
    hooks = [last.register_forward_pre_hook(lambda *_: tried.wait(10.0) and time.sleep(0.2)),
             last.register_forward_hook(lambda *_: finished.append(1))]  # fmt: skip

    def send(tensors: Any) -> None:
        tried.set()
        raise StoreUnavailable("the other side closed the connection")

    try:
        with pytest.raises(StoreUnavailable, match="closed"):
            hand_over(prefill_engine, prompt_of(), 0, send)
    finally:
        for hook in hooks:
            hook.remove()
    assert not finished


def test_damaged_bytes_are_not_used(tmp_path: Path, prefill_engine: Engine, expected: tuple[int, ...]) -> None:
    def damage(data: bytes, at: int) -> bytes:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if len(data) > 4000 else data

    with pair(tmp_path, prefill_engine) as (client, _, proxy):
        proxy.answers = damage
        reply = client.generate(prompt_of(), max_new_tokens=NEW)
    assert reply.token_ids == expected and reply.reused == 0


def test_no_prefill_worker_means_computing_here(tmp_path: Path, expected: tuple[int, ...]) -> None:
    nobody = WorkerClient(f"unix:{tmp_path / 'nobody.sock'}")
    worker = Worker(engine_of(policy=Exact()), "decode", prefiller=nobody)
    with running(tmp_path / "d.sock", worker) as door:
        client = WorkerClient(door)
        reply = client.generate(prompt_of(), max_new_tokens=NEW)
        client.close()
    assert reply.token_ids == expected and reply.reused == 0


def test_through_the_store(tmp_path: Path, expected: tuple[int, ...]) -> None:
    with service_here(tmp_path) as (_, address):
        theirs, ours = RemoteStore(address), RemoteStore(address)
        prefilling, decoding = (engine_of(policy=Exact(), store=store) for store in (theirs, ours))
        computed, pushed = forwards(decoding), forwards(prefilling)
        with running(tmp_path / "w.sock", Worker(prefilling, "prefill")) as at:
            worker = Worker(decoding, "decode", prefiller=WorkerClient(at), through_store=True)
            with running(tmp_path / "d.sock", worker) as door:
                client = WorkerClient(door)
                reply = client.generate(prompt_of(), max_new_tokens=NEW)
                client.close()
        assert reply.token_ids == expected and reply.reused == len(prompt_of()) - 1
        assert set(computed[:NEW]) == {1} and pushed == [len(prompt_of())]
        ours.close()
        theirs.close()


def refused(client: WorkerClient, ask: Callable[[WorkerClient], Any]) -> KVCommError:
    with pytest.raises(KVCommError) as found:
        ask(client)
    client.close()
    return found.value


def test_what_is_refused(tmp_path: Path, prefill_engine: Engine) -> None:
    prompt, model = prompt_of(), prefill_engine.pool.fingerprint
    other = engine_of("qwen2").pool.fingerprint
    with running(tmp_path / "w.sock", Worker(prefill_engine, "prefill")) as at:
        error = refused(WorkerClient(at), lambda c: c.generate(prompt, max_new_tokens=1))
        assert isinstance(error, ProtocolError) and "role prefill" in str(error)
        error = refused(WorkerClient(at), lambda c: c.prefill_to_store(other, prompt))
        assert isinstance(error, FingerprintMismatch)
        error = refused(WorkerClient(at), lambda c: c.prefill_to_store(model, prompt))
        assert isinstance(error, InvalidInput) and "no store" in str(error)
        error = refused(WorkerClient(at, "another"), lambda c: c.prefill_to_store(model, prompt))
        assert isinstance(error, AccessDenied)
        unknown = Prompt((Part(Segment((5, 4000)), "writer/0"),))
        error = refused(WorkerClient(at), lambda c: c.prefill_to_store(model, unknown))
        assert isinstance(error, InvalidInput)
    with pytest.raises(InvalidInput, match="role"):
        Worker(prefill_engine, "nothing")
    with pytest.raises(InvalidInput, match="store"):
        Worker(prefill_engine, "decode", through_store=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--host", "0.0.0.0"], "TLS and tokens are not set"),
        ([], "--socket or on --host"),
        (["--socket", "SOCKET", "--model", "/nowhere/at/all"], "does not load"),
    ],
)
def test_the_command_refuses(tmp_path: Path, options: list[str], why: str) -> None:
    given = [str(tmp_path / "w.sock") if option == "SOCKET" else option for option in options]
    model = [] if "--model" in given else ["--model", "unused"]
    command = [sys.executable, "-m", "kvcomm.cli", "worker", "--role", "both", *model, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and why in done.stderr.replace("\n", " "), done.stderr[-1000:]
    assert not (tmp_path / "w.sock").exists()


def test_the_command_names_a_model_whose_files_are_damaged(tmp_path: Path) -> None:
    engine = engine_of()
    engine.model.save_pretrained(tmp_path)
    engine.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    given = ["--role", "both", "--model", str(tmp_path), "--socket", str(tmp_path / "w.sock")]
    done = CliRunner().invoke(app, ["worker", *given])
    assert done.exit_code == 2 and "does not load" in done.stderr and not (tmp_path / "w.sock").exists()


def test_an_answer_ends_at_the_deadline_of_who_asked(tmp_path: Path) -> None:
    """And whoever waits behind it gets its place: the worker does not write on for nobody."""
    slow = engine_of(policy=Exact(), learn=False)
    slow.model.base_model.layers[0].register_forward_hook(lambda *_: time.sleep(0.01))
    prompt = prompt_of()
    with running(tmp_path / "w.sock", Worker(slow, "both")) as address:
        client = WorkerClient(address)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.generate(prompt, max_new_tokens=3500, deadline_s=1.0)  # half a minute and more
        reply = client.generate(prompt, max_new_tokens=2, deadline_s=60.0)
        assert reply.token_ids == answer(slow, prompt, 2) and time.monotonic() - began < 20.0
        client.close()
    assert not slow.pool._arriving


def test_why_a_prefill_does_not_come_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Although nobody waited for it yet."""
    decoding, other = engine_of(policy=Exact()), engine_of("qwen2", policy=Exact())
    with running(tmp_path / "w.sock", Worker(other, "prefill")) as address:
        client = WorkerClient(address)
        client.prefill(decoding, prompt_of())
        for _ in range(200):
            if not decoding.pool._arriving:
                break
            time.sleep(0.05)
        client.close()
    assert not decoding.pool._arriving and "start both with one model" in caplog.text


def test_no_thread_to_receive_with_means_computing_here(
    prefill_engine: Engine, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = engine_of(policy=Exact())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start")))
        WorkerClient("unix:/nowhere").prefill(decoding, prompt_of())
    assert not decoding.pool._arriving
    assert decoding.generate(prompt_of(), max_new_tokens=NEW, do_sample=False).token_ids == expected
