"""All speeds beside their floors, in one run of less than 25 minutes on two cores: results/bench.json.

``python -m benchmarks.bench [--only splice,ttft] [--small] [--out results/bench.json]``. Nothing else may run on the
machine meanwhile. With ``--only`` the other parts of an existing file stay as they are.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import doubling, first_call, memory, offset, recompute, splice, ttft
from benchmarks.common import SMALL, Size
from benchmarks.team import Team
from eval.files.output import write_json
from eval.running.setting import Setting

PARTS = ("splice", "offset", "recompute", "ttft", "doubling", "memory", "first_call")
_OF_A_TEAM = ("ttft", "doubling", "memory")


def run(parts: list[str], size: Size, model: str | None = None) -> dict[str, Any]:
    """The named parts; times in seconds, memory in bytes."""
    setting = Setting.load(model)
    found: dict[str, Any] = {}
    engine = setting.engine()
    if "splice" in parts:
        found["splice"] = splice.measure(engine, size)
    if "offset" in parts:
        found["offset"] = offset.measure(engine, size)
    if "recompute" in parts:
        found["recompute"] = recompute.measure(setting, engine, size)
    if any(part in parts for part in _OF_A_TEAM):
        team = Team.build(setting, size)
        team.learn()
        if "ttft" in parts:
            found |= ttft.measure(team)
        if "doubling" in parts:
            found["doubling"] = doubling.measure(setting, team)
        if "memory" in parts:
            found["memory"] = memory.measure(team)
    if "first_call" in parts:
        found["first_call"] = first_call.measure(setting, size, model)
    return found | {"setting": setting.describe() | {"size": asdict(size)}}


def main() -> None:
    """Run the parts and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--small", action="store_true", help="a run of seconds, whose figures mean nothing")
    parser.add_argument("--model", help="HuggingFace id or folder; SmolLM2-135M-Instruct unless given")
    parser.add_argument("--out", type=Path, default=Path("results/bench.json"))
    chosen = parser.parse_args()
    parts = chosen.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown parts {unknown}; choose from {', '.join(PARTS)}")
    started = time.perf_counter()
    result = run(parts, SMALL if chosen.small else Size(), chosen.model)
    about = result.pop("setting")
    command = shlex.join(["python", "-m", "benchmarks.bench", *sys.argv[1:]])
    about |= {"command": command, "wall_s": time.perf_counter() - started}
    held = json.loads(chosen.out.read_text()) if chosen.out.exists() and len(parts) < len(PARTS) else {}
    made = held.get("made", {}) | {part: about for part in parts}
    write_json(chosen.out, held | result | {"made": made})
    print(json.dumps({name: value for name, value in result.items() if name != "ttft_details"}, indent=1))


if __name__ == "__main__":
    main()
