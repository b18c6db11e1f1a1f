"""What a script of a fresh clone says first when a package is missing: which, and the command that sets it up.

Imported before anything that may be missing; to import it is enough.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


# script: (what it imports, the extras of setup.cfg that bring it)
NEEDS = {
    **dict.fromkeys(("exercise", "step", "why"), (("numpy", "numba"), "plot")),  # and what the examples draw with
    "bench_cpu": (("numpy", "numba", "torch"), "torch"),
    "sweep_transformers": (("numba", "torch", "transformers"), "torch,hf,test"),
    "bench_context_parallel": (("numba", "torch"), "torch"),
    "bench_models": (("numba_cuda", "torch"), "cu13,torch"),
    "bench_host": (("numpy", "numba"), "test"),  # and what it measures: it asks for that itself
    **dict.fromkeys(("gpu_check", "bench_simt", "tune"), (("numpy", "numba_cuda", "cupy"), "cu13,test")),
    **dict.fromkeys(
        (
            "bench_forward",
            "bench_backward",
            "bench_lessons",
            "bench_precision",
            "bench_variants",
            "bench_varlen",
            "bench_decode",
            "compare",
        ),
        (("numba_cuda", "cupy", "torch"), "cu13,torch"),
    ),
}


def check(script, packages, extras):
    """Go on in .venv where packages are missing here and .venv is there; else say what installs them, and end."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return
    python = ROOT / ".venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    if python.exists() and Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        sys.exit(subprocess.run([python, *sys.argv]).returncode)
    sys.exit(
        f"scripts/{script} needs {', '.join(missing)}. This sets up .venv, where the script then runs by itself:\n"
        f"    python3 -m venv .venv\n    .venv/bin/python -m pip install -e '.[{extras}]'"
    )


def commit():
    """The commit that runs, for results; nothing where it cannot be told. A + says that files were changed."""
    try:
        asked = ["git", "-C", str(ROOT)]
        name = subprocess.run([*asked, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*asked, "status", "--porcelain", "-uno", "numba_flash"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(commit=name.stdout.strip() + "+" * bool(changed.stdout.strip()))


started = Path(getattr(sys.modules["__main__"], "__file__", "") or "").resolve()  # nothing where tests read a script
if started.parent == ROOT / "scripts" and started.name in NEEDS:
    check(started.name, *NEEDS[started.name])
