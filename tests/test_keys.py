"""A key's digest changes with each of its fields, is the same in every process, and cannot be had by joining others."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.keys import CacheKey, Recipe
from kvcomm.types import ModelFingerprint, Namespace, Segment

FINGERPRINT = ModelFingerprint("Llama abc", "w" * 64, "r" * 64, "float32", "", "t" * 64, 3, 2, 16)
RECIPE = Recipe("prompt", "coder/task", "p" * 64, True)
KEY = CacheKey.of(Namespace("default"), FINGERPRINT, Segment((1, 2, 3)), RECIPE)
VECTOR = "55ebdb052ca4c23269ee3c92a0330a129b4a8f37cedc9eaa8496ae63859456c6"
PROGRAM = "from tests.test_keys import KEY; print(KEY.digest)"


def test_each_recipe_field_changes_the_digest() -> None:
    changed: dict[str, Any] = {"origin": "decode", "context": "coder/plan", "preceding": "q" * 64, "exact": False}
    assert set(changed) == {field.name for field in fields(Recipe)}
    digests = {RECIPE.digest, *(replace(RECIPE, **{name: value}).digest for name, value in changed.items())}
    assert len(digests) == len(changed) + 1


def test_each_key_field_changes_the_digest() -> None:
    changed: dict[str, Any] = {
        "namespace": Namespace("other"),
        "fingerprint": replace(FINGERPRINT, weights="v" * 64),
        "content": Segment((1, 2, 4)).digest,
        "recipe": replace(RECIPE, exact=False),
    }
    assert set(changed) == {field.name for field in fields(CacheKey)}
    keys = [KEY, *(replace(KEY, **{name: value}) for name, value in changed.items())]
    assert len({key.digest for key in keys}) == len(set(keys)) == len(changed) + 1


def test_the_vector_is_stable() -> None:
    assert KEY.digest == VECTOR
    assert str(KEY) == f"default/{VECTOR[:16]}"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_the_digest_does_not_depend_on_the_process(seed: str) -> None:
    root = Path(__file__).parent.parent
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == VECTOR, done.stderr


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), min_size=2, max_size=2, unique=True))
def test_fields_do_not_run_into_each_other(pairs: list[tuple[str, str]]) -> None:
    one, other = (Recipe("prompt", context, preceding, True) for context, preceding in pairs)
    assert one.digest != other.digest


def test_a_key_needs_a_namespace_and_a_fingerprint() -> None:
    with pytest.raises(TypeError):
        CacheKey(content="x", recipe=RECIPE)  # type: ignore[call-arg]
