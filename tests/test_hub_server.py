"""The tests' own Hub against the real client: what a repo goes through, and who may do what.

The client is in this process, and without Xet: see ``hub.fixture``.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    HfFileSystem,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub import errors as hf
from safetensors.numpy import save

from .hub.server import HubServer

REPO = "acme/model"
CONFIG = b'{"dtype": "float32"}'
SHARDS = {
    f"model-0000{n}-of-00002.safetensors": save({f"layer.{n}": np.arange(5000, dtype=np.float32) * n}) for n in (1, 2)
}
FIRST, SECOND = SHARDS
INDEX = {"metadata": {"total_size": 40000}, "weight_map": {"layer.1": FIRST, "layer.2": SECOND}}
FILES = {"config.json": CONFIG, "model.safetensors.index.json": json.dumps(INDEX).encode(), **SHARDS}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def folder(root: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


# Writing


def test_a_new_repo_has_the_hubs_first_commit_and_cannot_be_made_twice(hub: HubServer, hub_api: HfApi) -> None:
    assert hub_api.whoami()["name"] == "tester"
    assert hub_api.create_repo(REPO, private=True).repo_id == REPO
    hub_api.create_repo(REPO, exist_ok=True)
    with pytest.raises(hf.HfHubHTTPError) as caught:
        hub_api.create_repo(REPO)
    assert caught.value.response.status_code == 409
    assert (hub.files(REPO), hub.repo(REPO).private) == ([".gitattributes"], True)


def test_a_small_file_is_in_the_commit_and_a_large_one_is_an_object(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO)
    made = hub_api.upload_file(path_or_fileobj=CONFIG, path_in_repo="config.json", repo_id=REPO)
    hub_api.upload_file(path_or_fileobj=io.BytesIO(SHARDS[FIRST]), path_in_repo=FIRST, repo_id=REPO)
    assert hub.read(REPO, "config.json") == CONFIG
    assert hub.read(REPO, FIRST) == SHARDS[FIRST]
    assert [c.oid for c in hub.commits(REPO)][1] == made.oid
    (small, large) = hub_api.get_paths_info(REPO, ["config.json", FIRST])
    assert getattr(small, "lfs", None) is None
    assert getattr(large, "lfs", {}).get("sha256") == sha256(SHARDS[FIRST])
    assert [e.received for e in hub.seen("PUT", "^/objects/")] == [len(SHARDS[FIRST])]


def test_a_folder_is_one_commit_and_the_same_folder_again_is_none(
    hub: HubServer, hub_api: HfApi, tmp_path: Path
) -> None:
    hub.create(REPO)
    source = folder(tmp_path / "model", {**FILES, "README.md": b"---\nlicense: mit\n---\n", "sub/notes.txt": b"hi"})
    hub_api.upload_folder(folder_path=source, repo_id=REPO, commit_message="all")
    assert [c.title for c in hub.commits(REPO)] == ["all", "initial commit"]
    assert {path: hub.read(REPO, path) for path in FILES} == FILES
    sent = len(hub.seen("PUT"))
    hub_api.upload_folder(folder_path=source, repo_id=REPO)
    assert len(hub.commits(REPO)) == 2
    assert len(hub.seen("PUT")) == sent == 2


def test_shards_sent_one_by_one_are_one_commit(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO, {"old.bin": b"old"})
    operations: list[CommitOperationAdd | CommitOperationDelete] = [CommitOperationDelete("old.bin")]
    for name, data in SHARDS.items():
        addition = CommitOperationAdd(name, data)
        hub_api.preupload_lfs_files(REPO, additions=[addition])
        operations.append(addition)
    assert hub.files(REPO) == [".gitattributes", "old.bin"]
    hub_api.create_commit(REPO, operations, commit_message="two shards")
    assert [c.title for c in hub.commits(REPO)] == ["two shards", "change 1", "initial commit"]
    assert hub.files(REPO) == [".gitattributes", *SHARDS]
    assert hub.read(REPO, "old.bin", hub.commits(REPO)[1].oid) == b"old"


def test_an_object_in_parts_is_put_together(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO)
    hub.site.part = 8000
    hub_api.upload_file(path_or_fileobj=SHARDS[FIRST], path_in_repo=FIRST, repo_id=REPO)
    assert [e.received for e in sorted(hub.seen("PUT", "/parts/"), key=lambda e: e.path)] == [
        8000,
        8000,
        len(SHARDS[FIRST]) - 16000,
    ]
    assert hub.read(REPO, FIRST) == SHARDS[FIRST]


def test_a_commit_on_another_parent_than_the_last_is_refused(hub: HubServer, hub_api: HfApi) -> None:
    parent = hub.create(REPO, FILES)
    hub.commit(REPO, {"theirs.txt": b"1"})
    addition = CommitOperationAdd("ours.txt", b"2")
    with pytest.raises(hf.HfHubHTTPError, match="A commit has happened since") as caught:
        hub_api.create_commit(REPO, [addition], commit_message="ours", parent_commit=parent)
    assert caught.value.response.status_code == 412
    assert "ours.txt" not in hub.files(REPO)


def test_branches_and_tags_come_and_go(hub: HubServer, hub_api: HfApi) -> None:
    first = hub.create(REPO, FILES)
    hub_api.create_branch(REPO, branch="bf16")
    hub_api.create_branch(REPO, branch="bf16", exist_ok=True)
    hub_api.create_tag(REPO, tag="v1")
    made = hub_api.upload_file(path_or_fileobj=b"1", path_in_repo="only.txt", repo_id=REPO, revision="bf16")
    refs = hub_api.list_repo_refs(REPO)
    assert {b.name: b.target_commit for b in refs.branches} == {"main": first, "bf16": made.oid}
    assert {t.name: t.target_commit for t in refs.tags} == {"v1": first}
    assert [c.commit_id for c in hub_api.list_repo_commits(REPO, revision="bf16")][:2] == [made.oid, first]
    assert "only.txt" not in hub.files(REPO)
    hub_api.delete_branch(REPO, branch="bf16")
    hub_api.delete_tag(REPO, tag="v1")
    assert not hub_api.revision_exists(REPO, "bf16")
    assert not hub_api.revision_exists(REPO, "v1")


def test_a_repo_can_be_deleted(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO)
    hub.create("tester/data", {"a.csv": b"1"}, kind="datasets")
    hub_api.delete_repo(REPO)
    hub_api.delete_repo("tester/data", repo_type="dataset")
    assert hub.repos() == hub.repos("datasets") == []


def test_commits_at_the_same_time_are_a_chain(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO)
    names = [f"{n}.txt" for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: hub_api.upload_file(path_or_fileobj=b"1", path_in_repo=name, repo_id=REPO), names))
    assert hub.files(REPO) == [".gitattributes", *names]
    assert len(hub.commits(REPO)) == 9


# Pull requests


def test_a_commit_as_a_pull_request_leaves_main_as_it_is_until_it_is_merged(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO, {"config.json": CONFIG})
    addition = CommitOperationAdd(FIRST, SHARDS[FIRST])
    made = hub_api.create_commit(REPO, [addition], commit_message="to bf16", commit_description="how", create_pr=True)
    assert (made.pr_num, made.pr_revision) == (1, "refs/pr/1")
    assert FIRST not in hub.files(REPO)
    assert hub.read(REPO, FIRST, "refs/pr/1") == SHARDS[FIRST]
    (pull,) = hub.pull_requests(REPO)
    assert (pull.title, pull.description, pull.author, pull.status) == ("to bf16", "how", "tester", "open")
    assert hub_api.get_discussion_details(REPO, 1).title == "to bf16"
    hub_api.merge_pull_request(REPO, 1)
    assert FIRST in hub.files(REPO)
    assert pull.status == "merged"


def test_discussions_are_listed_by_kind_state_and_author_page_by_page(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO)
    hub.site.page = 2
    for n in range(3):
        hub_api.create_pull_request(REPO, title=f"pull {n}")
    hub_api.create_discussion(REPO, title="question")
    hub_api.comment_discussion(REPO, 1, "done")
    hub_api.change_discussion_status(REPO, 1, "closed")
    listed = hub_api.get_repo_discussions
    assert [d.title for d in listed(REPO)] == ["question", "pull 2", "pull 1", "pull 0"]
    assert [d.num for d in listed(REPO, discussion_type="pull_request", discussion_status="open")] == [3, 2]
    assert [d.num for d in listed(REPO, discussion_status="closed", author="tester")] == [1]
    assert list(listed(REPO, author="guest")) == []
    assert [p.status for p in hub.pull_requests(REPO)] == ["closed", "draft", "draft"]


def test_a_stranger_may_open_a_pull_request_but_not_commit(hub: HubServer, in_process: HubServer) -> None:
    hub.create(REPO)
    stranger = HfApi(token=in_process.tokens.stranger)
    addition = CommitOperationAdd("a.txt", b"1")
    with pytest.raises(hf.HfHubHTTPError) as caught:
        stranger.create_commit(REPO, [addition], commit_message="mine")
    assert caught.value.response.status_code == 403
    stranger.create_commit(REPO, [CommitOperationAdd("a.txt", b"1")], commit_message="mine", create_pr=True)
    assert [p.author for p in hub.pull_requests(REPO)] == ["stranger"]
    assert len(hub.commits(REPO)) == 1


# Reading


def test_a_snapshot_has_the_files_and_a_second_one_gets_no_weights(hub: HubServer, in_process: HubServer) -> None:
    commit = hub.create(REPO, FILES)
    path = Path(snapshot_download(REPO))
    assert path.name == commit
    assert {name: (path / name).read_bytes() for name in FILES} == FILES
    assert in_process.bytes_of_weights() == sum(map(len, SHARDS.values()))
    in_process.requests.clear()
    assert Path(snapshot_download(REPO)) == path
    assert hub.seen("GET", "/revision/main") == hub.requests != []
    assert hub.bytes_of_weights() == 0


def test_a_file_at_a_commit_is_the_one_of_that_commit(hub: HubServer, in_process: HubServer) -> None:
    old = hub.create(REPO, FILES)
    in_process.commit(REPO, {"config.json": b"new"})
    assert Path(hf_hub_download(REPO, "config.json", revision=old)).read_bytes() == CONFIG
    assert Path(hf_hub_download(REPO, "config.json")).read_bytes() == b"new"


def test_a_range_of_a_file_is_all_that_is_sent(hub: HubServer, in_process: HubServer) -> None:
    hub.create(REPO, FILES)
    files = HfFileSystem(token=in_process.tokens.read)
    with files.open(f"{REPO}/{FIRST}", cache_type="none") as file:
        file.seek(100)
        assert file.read(200) == SHARDS[FIRST][100:300]
    assert hub.bytes_of_weights() == 200
    assert [e.range for e in hub.seen("GET", "^/objects/")] == ["bytes=100-299"]
    assert [e.with_token for e in hub.seen("GET", "^/objects/")] == [False]


def test_a_listing_goes_over_pages(hub: HubServer, hub_api: HfApi) -> None:
    names = [f"a/{n}.txt" for n in range(5)]
    hub.create(REPO, dict.fromkeys(names, b"1"))
    hub.site.page = 2
    assert [f.path for f in hub_api.list_repo_tree(REPO, recursive=True)] == [".gitattributes", "a", *names]
    assert len(hub.seen("GET", "/tree/")) == 4
    assert [f.path for f in hub_api.list_repo_tree(REPO, "a")] == names


def test_the_headers_of_safetensors_are_read_without_their_weights(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO, FILES)
    found = hub_api.get_safetensors_metadata(REPO)
    assert found.weight_map == INDEX["weight_map"]
    assert found.files_metadata[SECOND].tensors["layer.2"].shape == [5000]
    if hasattr(hub_api, "get_sharded_safetensors_metadata"):  # since 2.0
        assert dict(hub_api.get_sharded_safetensors_metadata(REPO).parameter_count) == {"F32": 10000}


def test_a_renamed_repo_is_found_under_its_old_name(hub: HubServer, hub_api: HfApi) -> None:
    hub.create("acme/first", FILES)
    hub.rename("acme/first", "acme/second")
    hub_api.move_repo("acme/second", REPO)
    assert hub_api.model_info("acme/first").id == REPO
    assert Path(hf_hub_download("acme/second", FIRST)).read_bytes() == SHARDS[FIRST]
    hub_api.upload_file(path_or_fileobj=b"1", path_in_repo="new.bin", repo_id="acme/first")
    assert hub.read(REPO, "new.bin") == b"1"
    assert {e.status for e in hub.requests if "acme/first" in e.path} == {307}


def test_repos_are_listed_to_those_who_may_see_them_and_their_owner_may_change_that(
    hub: HubServer, hub_api: HfApi
) -> None:
    for name in ("acme/model", "acme/other", "guest/model"):
        hub.create(name)
    hub_api.update_repo_settings(REPO, private=True, gated="manual")
    assert (hub.repo(REPO).private, hub.repo(REPO).gated) == (True, True)
    stranger = HfApi(token=hub.tokens.stranger)
    assert [m.id for m in stranger.list_models(author="acme")] == ["acme/other"]
    assert [m.id for m in hub_api.list_models(search="model")] == ["acme/model", "guest/model"]
    hub_api.auth_check(REPO)
    with pytest.raises(hf.RepositoryNotFoundError):
        stranger.auth_check(REPO)


# Saying no

Call = Callable[[HfApi], object]


def config_of(repo: str, revision: str = "main", path: str = "config.json") -> Call:
    return lambda api: api.hf_hub_download(repo, path, revision=revision)


def upload_to(repo: str) -> Call:
    return lambda api: api.upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id=repo)


NO: dict[str, tuple[Call, str | bool, type[hf.HfHubHTTPError], int]] = {
    "a missing repo": (config_of("acme/none"), "read", hf.RepositoryNotFoundError, 404),
    "a missing repo, without a token": (config_of("acme/none"), False, hf.RepositoryNotFoundError, 401),
    "a private repo": (config_of("acme/private"), "stranger", hf.RepositoryNotFoundError, 404),
    "a private repo, without a token": (config_of("acme/private"), False, hf.RepositoryNotFoundError, 401),
    "a gated repo": (config_of("acme/gated"), "stranger", hf.GatedRepoError, 403),
    "a gated repo, without a token": (config_of("acme/gated"), False, hf.GatedRepoError, 401),
    "a missing revision": (config_of(REPO, revision="none"), "read", hf.RevisionNotFoundError, 404),
    "a missing file": (config_of(REPO, path="none.json"), "read", hf.RemoteEntryNotFoundError, 404),
    "a disabled repo": (lambda api: api.model_info("acme/disabled"), "write", hf.DisabledRepoError, 403),
    "a wrong token": (lambda api: api.model_info(REPO), "wrong", hf.HfHubHTTPError, 401),
    "writing with a read token": (upload_to(REPO), "read", hf.HfHubHTTPError, 403),
    "writing to an organisation as a reader of it": (upload_to(REPO), "guest", hf.HfHubHTTPError, 403),
    "writing without a token": (upload_to(REPO), False, hf.HfHubHTTPError, 401),
    "creating a repo in another's namespace": (lambda api: api.create_repo("acme/x"), "guest", hf.HfHubHTTPError, 403),
}


@pytest.mark.parametrize(("call", "token", "error", "status"), [*NO.values()], ids=[*NO])
def test_the_hub_says_no_to(
    call: Call, token: str | bool, error: type[hf.HfHubHTTPError], status: int, in_process: HubServer
) -> None:
    for name in (REPO, "acme/private", "acme/gated", "acme/disabled"):
        private, gated = name.endswith("private"), name.endswith("gated")
        in_process.create(name, {"config.json": CONFIG}, private=private, gated=gated)
    in_process.repo("acme/disabled").disabled = True
    before = {name: in_process.commits(name) for name in in_process.repos()}
    with pytest.raises(error) as caught:
        call(HfApi(token=getattr(in_process.tokens, token) if isinstance(token, str) else token))
    assert caught.value.response.status_code == status
    assert {name: in_process.commits(name) for name in in_process.repos()} == before


def test_members_read_what_is_private_or_gated_and_so_does_who_was_let_in(in_process: HubServer) -> None:
    for name in ("acme/private", "acme/gated"):
        in_process.create(name, {"config.json": CONFIG}, private=name == "acme/private", gated=name == "acme/gated")
        assert config_of(name)(HfApi(token=in_process.tokens.guest))
    stranger = HfApi(token=in_process.tokens.stranger)
    assert stranger.model_info("acme/gated").gated == "manual"
    in_process.repo("acme/gated").allowed.add("stranger")
    assert config_of("acme/gated")(stranger)
