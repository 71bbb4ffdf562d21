"""The service's sources run no data and check nothing by assert; no secret reaches a log or an error."""

import ast
import logging
from pathlib import Path

import pytest

import kvcomm
from kvcomm.errors import AccessDenied
from kvcomm.serve.tokens import TokenFile
from kvcomm.transfer.auth import Token, read_token
from kvcomm.types import Namespace

PACKAGE = Path(kvcomm.__file__).parent
SOURCES = sorted([*(PACKAGE / "serve").glob("*.py"), *(PACKAGE / "transfer").glob("*.py")])
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "yaml", "dill", "cloudpickle", "joblib", "xmlrpc"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "torch.load", "torch.save", "__import__", "os.system", "os.umask"}
WEAK = {"CERT_NONE", "check_hostname", "_create_unverified_context", "TLSv1", "TLSv1_1", "PROTOCOL_TLS"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_source_runs_no_data_and_weakens_no_check(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not {n.split(".")[0] for n in names} & FORBIDDEN_IMPORTS
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS
        if isinstance(node, ast.Attribute):
            assert node.attr not in WEAK


def test_there_are_sources() -> None:
    assert {"auth.py", "tls.py", "bind.py", "tokens.py", "audit.py", "web.py"} <= {path.name for path in SOURCES}


def test_a_canary_secret_is_in_no_log_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    canary = "C4nary" + "x" * 37
    said = []
    with caplog.at_level(logging.DEBUG), TokenFile(tmp_path / "tokens", create=True) as file:
        token = file.create(Namespace("one"), ["read"])
        for wrong in (Token(token.identity, canary), Token("0" * 16, canary)):
            with pytest.raises(AccessDenied) as error:
                file.check(wrong)
            said.append(f"{error.value!r} {wrong!r} {wrong}")
        for text in (f"kvc_{canary}", canary, f"kvc_{'0' * 16}_{canary} "):
            with pytest.raises(AccessDenied) as error:
                file.authenticate(text.encode())
            said.append(repr(error.value))
        for text in (f"kvc_{canary}", canary):
            with pytest.raises(AccessDenied) as error:
                read_token(None, {"KVCOMM_TOKEN": text})
            said.append(repr(error.value))
    assert "C4nary" not in "".join(said) + caplog.text
    assert not any(b"C4nary" in path.read_bytes() for path in tmp_path.iterdir())
