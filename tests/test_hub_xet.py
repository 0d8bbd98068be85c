"""The tests' own Hub against the real client in a process of its own, through Xet and, for comparison, through LFS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from .hub import faults, refusals
from .hub.server import HubServer
from .processes import HANG

RANDOM = np.random.default_rng(0)
NOISE = RANDOM.standard_normal(200_000, dtype=np.float32).tobytes()
SEEDED = RANDOM.bytes(300_000)
FILES = {"noise.safetensors": NOISE, "zeros.safetensors": bytes(300_000) + NOISE[:100_000]}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path / "home"


def client(code: str, environment: Mapping[str, str], cwd: Path) -> str:
    """What a program says that uses the client; it fails the test when it fails."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, encoding="utf-8", timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BOTH_WAYS = """
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi, HfFileSystem, hf_hub_download
api = HfApi()
Path("seeded.bin").write_bytes(Path(hf_hub_download("acme/model", "seeded.bin")).read_bytes())
api.upload_folder(folder_path=".", repo_id="tester/new", allow_patterns=["*.safetensors", "*.bin"])
addition = CommitOperationAdd("again.safetensors", "noise.safetensors")
api.preupload_lfs_files("tester/new", additions=[addition])
api.create_commit("tester/new", [addition], commit_message="again")
for name in ("noise.safetensors", "zeros.safetensors"):
    data = Path(name).read_bytes()
    assert Path(hf_hub_download("tester/new", name)).read_bytes() == data
    assert HfFileSystem().cat_file("tester/new/" + name, start=70_000, end=70_100) == data[70_000:70_100]
"""


@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_large_files_go_both_ways(xet: bool, hub: HubServer, home: Path) -> None:
    hub.create("tester/new")
    hub.create("acme/model", {"seeded.bin": SEEDED}, private=True)
    client(BOTH_WAYS, hub.environment(home, token=hub.tokens.write, xet=xet), home.parent)
    sent = {**FILES, "again.safetensors": NOISE, "seeded.bin": SEEDED}
    assert {name: hub.read("tester/new", name) for name in sent} == sent
    assert bool(hub.seen("POST", "^/v1/shards")) is bool(hub.seen("GET", "^/xorbs/")) is xet
    assert bool(hub.seen("PUT", "^/objects/")) is not xet
    assert hub.bytes_of_weights() > 1_000_000


TO_AND_FRO = """
from pathlib import Path
from huggingface_hub import HfApi, hf_hub_download
HfApi().upload_file(path_or_fileobj="noise.safetensors", path_in_repo="noise.safetensors", repo_id="tester/new")
assert Path(hf_hub_download("tester/new", "noise.safetensors")).read_bytes() == Path("noise.safetensors").read_bytes()
"""


def test_xet_gets_over_failures_lost_answers_and_cuts(hub: HubServer, home: Path) -> None:
    hub.create("tester/new")
    rules = [
        hub.fail(faults.lost(500), method="POST", path="^/v1/shards"),
        hub.fail(faults.cut(1000), method="GET", path="^/xorbs/"),
    ]
    client(TO_AND_FRO, hub.environment(home, token=hub.tokens.write), home.parent)
    assert [rule.left for rule in rules] == [0, 0]
    assert [e.status for e in hub.seen("POST", "^/v1/shards")] == [500, 200]
    assert hub.read("tester/new", "noise.safetensors") == NOISE


SAYS = """
from huggingface_hub import HfApi
try:
    HfApi().upload_file(path_or_fileobj="noise.safetensors", path_in_repo="noise.safetensors", repo_id="tester/new")
except Exception as error:
    print(type(error).__mro__[0].__name__, error)
"""


@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_a_refusal_of_the_storage_has_the_hubs_words_only_without_xet(xet: bool, hub: HubServer, home: Path) -> None:
    hub.create("tester/new")
    path = "/xet-write-token/" if xet else "/objects/batch"
    hub.fail(faults.refuse(refusals.storage_quota()), path=path, times=9)
    said = client(SAYS, hub.environment(home, token=hub.tokens.write, xet=xet), home.parent)
    assert said.split()[0] == ("ConnectionError" if xet else "HfHubHTTPError")
    assert "403 Forbidden" in said
    assert ("storage limit reached" in said) is not xet


def test_a_client_that_asks_who_runs_it_hears_what_it_can_read(hub: HubServer, home: Path) -> None:
    environment = hub.environment(home, token=hub.tokens.write)
    del environment["HF_HUB_DISABLE_TELEMETRY"]
    said = client("from huggingface_hub import HfApi\nprint(HfApi().whoami()['name'])", environment, home.parent)
    assert said == "tester"
    assert {e.status for e in hub.seen("GET")} == {200}
