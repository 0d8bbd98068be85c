"""A batch, and one model spread over workers, on a real Ray: the same repos as without, and the same ledger."""

from __future__ import annotations

import json
from pathlib import Path

from .clusters import needs_ray, run_alone

_DRIVER = """
import json, os, signal, sys
from pathlib import Path
import precconv
from tests.clusters import start_ray
from tests.hub import faults
from tests.hub.server import HubServer
from tests.hub_models import HEADER, batch_of, keyed, llama, object_of, published

home, SAID = Path(sys.argv[1]), {}


def batch(sources, mark, engine):
    hub.fail(faults.cut(HEADER + 1000), method="GET", path=object_of(hub, "acme/cut-once"), times=3)
    options = {"to": "fp16", "push": "tester/{name}-" + mark, "output_dir": home / f"out-{mark}"}
    options["workers"] = 2 if engine == "ray" else 1
    report = precconv.convert_many(sources, engine=engine, **options)
    again = precconv.convert_many(report_done(report), engine=engine, **options)
    ledger = (home / f"out-{mark}" / "precconv-batch.jsonl").read_text()
    ends = sorted((r["source"], r["event"], r.get("error", {}).get("message", "")) for r in map(json.loads,
                  ledger.splitlines()) if r["event"] != "started")
    names = [r.removesuffix(f"-{mark}") for r in hub.repos() if r.endswith(f"-{mark}") and keyed(hub, r)]
    return {
        "ends": ends, "names": names, "again": {r.outcome for r in again.results} == {"skipped"},
        "commits": [len(keyed(hub, f"{n}-{mark}")) for n in names],
        "files": [{p: d.hex() for p, d in published(hub, f"{n}-{mark}").items()} for n in names],
        "left": sorted(os.listdir(home / f"out-{mark}")), "token": hub.tokens.write in ledger,
    }


def report_done(report):
    return [r.planned.source for r in report.results if r.outcome == "done"]


def kill_one():
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        if Path("/proc", entry, "cmdline").read_text().startswith("ray::convert_shard"):
            os.kill(int(entry), signal.SIGKILL)
            SAID["killed"] = True
            return


def spread(source, target):
    try:
        precconv.convert(source, to="fp16", push=target, engine="ray", workers=2)
    except precconv.PrecconvError as e:
        return str(e)
    return len(keyed(hub, target)), published(hub, target) == published(hub, "tester/alone")


with HubServer(home / "hub", xet=False) as hub:
    os.environ.update(hub.environment(home / "hf", token=hub.tokens.write, xet=False))
    sources = [s for s in batch_of(hub) if s != "acme/cut-always"]
    hub.create("acme/long", llama(4))
    hub.create("acme/overflows", llama(4, large=2))
    start_ray()
    SAID["ray"] = batch(sources, "ray", "ray")
    SAID["here"] = batch(sources, "here", "inline")
    precconv.convert("acme/long", to="fp16", push="tester/alone")
    SAID["spread"] = spread("acme/long", "tester/spread")
    hub.fail(faults.before(kill_one), method="POST", path="/tester/retried.git/info/lfs/objects/batch")
    SAID["retried"] = spread("acme/long", "tester/retried")
    SAID["overflows"] = spread("acme/overflows", "tester/overflows")
    SAID["kept"] = keyed(hub, "tester/overflows")
SAID["stages"] = [p.name for p in home.rglob(".*precconv-part")]
(home / "said.json").write_text(json.dumps(SAID))
"""


@needs_ray
def test_the_same_is_published_from_a_ray_cluster_and_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(_DRIVER)
    done = run_alone(tmp_path / "driver.py")
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert len(said["ray"]["names"]) == 8
    assert said["ray"] == said["here"]
    assert set(said["ray"]["commits"]) == {1}
    assert (said["ray"]["again"], said["ray"]["token"], said["ray"]["left"]) == (True, False, ["precconv-batch.jsonl"])
    assert said["spread"] == said["retried"] == [1, True]
    assert said["killed"] is True
    assert "tensor 'model.layers.0.self_attn.q_proj.weight': 1 of 1024 finite values" in said["overflows"]
    assert said["kept"] == said["stages"] == []
