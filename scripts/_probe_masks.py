import os, sys, time, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
from _gpu import pool
import test_gates as gates
from numba_flash.gpu import compiled


def report(job):
    name, config = job
    wrong, regs = [], []
    try:
        t = time.perf_counter()
        ptx = compiled.to_ptx(config, gates.MACHINES[config.kernel][0].cc)
        t = time.perf_counter() - t
        blocks = max(config.blocks_per_sm, 1) if isinstance(config, gates.MmaBackwardConfig) else 1
        for target in gates.MACHINES[config.kernel]:
            if config.shared_bytes * blocks > target.shared_bytes:
                continue
            arch = compiled.architecture(target.cc)
            with tempfile.TemporaryDirectory() as folder:
                made = gates.machine_code(config, ptx, arch, Path(folder))
            wrong += gates.complaints(config, made, target, arch)
            regs.append(made.registers)
        return f"{name:34} {config.tile_m}x{config.tile_n} regs {regs} {t:.1f}s {wrong if wrong else 'ok'}"
    except Exception as e:
        return f"{name:34} {e!r}"[:300]


if __name__ == "__main__":
    jobs = {
        **dict(gates.reading_gates()),
        **{k: v for k, v in gates.backward_gates() if k.endswith(("-reading", "-masked"))},
    }
    jobs["wgmma-plain-64"] = gates.of_row("wgmma", gates.TABLES["wgmma"][0])
    t = time.perf_counter()
    for line in pool().map(report, sorted(jobs.items(), key=lambda x: "wgmma" not in x[0])):
        print(line, flush=True)
    print(f"{len(jobs)} in {time.perf_counter() - t:.0f} s")
