"""An engine in a container image: what docker is asked for, what the worker sees, and what is left of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from fidelab.core import Status
from fidelab.core.errors import EngineError
from fidelab.core.registry import Registry
from fidelab.engines import ENGINES
from fidelab.environments import container
from fidelab.environments.container import existing_paths, find_image, link_targets
from fidelab.environments.environment import locate
from fidelab.environments.queries import ask
from fidelab.environments.trial import Trial, try_out
from fidelab.models.tiny import make_tiny
from tests.captures import sample
from tests.environments.conftest import ROOT, Second
from tests.environments.fake_docker import FakeDocker
from tests.present import present
from tests.run.harness import Done, cli, compare, fake_file, write_inputs

IMAGE = ("--image", "engine:1")
DIGEST = "sha256:" + "d" * 64


def install(folder: Path, python: str, patch: pytest.MonkeyPatch) -> FakeDocker:
    """A docker on PATH whose image ``engine:1`` has numpy and no fidelab, and a cache of this test's own."""
    guarded = [folder / "room", folder / "cache", ROOT / "src", ROOT / "k16v8"]
    made = FakeDocker(folder / "docker", python, guarded)
    patch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    patch.setenv("FIDELAB_CACHE", str(folder / "cache"))
    patch.delenv("FIDELAB_CONTAINER", raising=False)
    return made


@pytest.fixture
def docker(second: Second, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    return install(tmp_path, second.python, monkeypatch)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    return tmp_path / "room"


def refused(done: Done, *said: str) -> None:
    """One line, exit code 2, and nothing was begun."""
    assert done.code == 2, done
    [line] = done.err.splitlines()
    assert all(words in line for words in said), line
    assert not list((done.cwd / "runs").glob("2*"))


FLAGS = (*IMAGE, "--no-floor", "--threads", "1")


@pytest.fixture(scope="module")
def plain(second: Second, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Done, FakeDocker]]:
    """A reference and a candidate in an image; nothing is run beside them."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        made = install(folder, second.python, patch)
        yield compare(folder / "room", "tilt[q=0.6]", flags=FLAGS, windows=8, limit=2), made


def test_arms_run_in_an_image_in_which_nothing_is_installed(plain: tuple[Done, FakeDocker]) -> None:
    done, docker = plain
    assert done.code == 0, done.err
    assert done.axis("tilt[q=0.6]", "kld").value("mean") == pytest.approx(0.0204, rel=0.01)
    assert len(docker.runs("fidelab.workers.child")) == 2  # the reference and the candidate
    assert len(docker.runs("fidelab.workers.ask")) == 1
    assert docker.alive() == []


def test_a_worker_sees_fidelab_and_the_captures_and_writes_nowhere_else(plain: tuple[Done, FakeDocker]) -> None:
    done, docker = plain
    for run in docker.runs("fidelab.workers.child"):
        assert [path for path, writable in run.mounts.items() if writable] == [str(done.cwd / "runs" / "captures")]
        assert str(ROOT / "src" / "fidelab") in run.mounts
        assert str(done.cwd) not in run.mounts
        link = run.env["PYTHONPATH"]
        assert link in run.mounts
        assert (Path(link) / "fidelab").is_symlink()


def test_a_container_has_the_user_the_threads_and_no_network(plain: tuple[Done, FakeDocker]) -> None:
    _, docker = plain
    for run in docker.runs("fidelab.workers.child"):
        assert run.flags["--user"] == [f"{os.getuid()}:{os.getgid()}"]
        assert run.flags["--network"] == ["none"]
        assert run.flags["--pull"] == ["never"]
        assert run.env["OMP_NUM_THREADS"] == "1"
        assert {"--rm", "--init", "--interactive"} <= set(run.switches)
        assert not {"--gpus", "--device"} & set(run.flags)
        assert run.image == "sha256:" + "1" * 64  # by content: the name may be given to another one meanwhile


def test_the_digest_of_the_image_is_in_the_report_and_makes_other_captures(docker: FakeDocker, room: Path) -> None:
    def again() -> tuple[Done, int]:
        done = compare(room, "tilt[q=0.6]", flags=FLAGS, windows=4, limit=2)
        return done, len(docker.runs("fidelab.workers.child"))

    done, workers = again()
    assert (done.report["reference"]["ran"]["image"], workers) == ({"name": "engine:1", "digest": DIGEST}, 2)
    assert again()[1] == 2
    docker.say(images={"engine:1": {"Id": "sha256:" + "2" * 64, "RepoDigests": []}})
    done, workers = again()
    assert (done.report["reference"]["ran"]["image"]["digest"], workers) == ("sha256:" + "2" * 64, 4)
    assert "engine:1" in (done.folder / "report.html").read_text()


def test_the_resolved_file_of_a_run_names_the_image(plain: tuple[Done, FakeDocker]) -> None:
    done, _ = plain
    resolved = yaml.safe_load((done.folder / "config.resolved.yaml").read_text())
    assert resolved["engine"] == {"name": "fake", "image": "engine:1"}


def test_one_arm_alone_runs_in_an_image_with_its_own_variables(docker: FakeDocker, room: Path) -> None:
    arm = "kv=tilt[q=0.6],engine=fake,image=engine:1,name=there,env.FAKE_MODE=a b"
    done = compare(room, "tilt[q=0.7]", flags=["--candidate", arm, "--no-floor"], windows=8, limit=2)
    assert done.arm("there")["status"] == "ok"
    [run] = docker.runs("fidelab.workers.child")
    assert run.env["FAKE_MODE"] == "a b"


def test_arms_that_differ_in_their_images_alone_stand_side_by_side(docker: FakeDocker, room: Path) -> None:
    second = {"engine:2": {"Id": "sha256:" + "2" * 64, "RepoDigests": []}}
    docker.say(images={"engine:1": {"Id": "sha256:" + "1" * 64, "RepoDigests": []}} | second)
    arms = [f"kv=tilt[q=0.6],engine=fake,image=engine:{n}" for n in (1, 2)]
    flags = [word for arm in arms for word in ("--candidate", arm)]
    done = compare(room, "tilt[q=0.6]", flags=[*flags, "--no-floor"], windows=4, limit=2)
    assert done.code == 0, done.err
    assert [done.arm(f"fake engine:{n} tilt[q=0.6]")["ran"]["image"]["name"] for n in (1, 2)] == [
        "engine:1",
        "engine:2",
    ]
    assert len(docker.runs("fidelab.workers.child")) == 2


def test_an_image_that_is_missing_leaves_the_other_arms_theirs(docker: FakeDocker, room: Path) -> None:
    arm = "kv=tilt[q=0.6],engine=fake,image=other:2,name=there"
    done = compare(room, "tilt[q=0.7]", flags=["--candidate", arm, "--no-floor"], windows=8, limit=2)
    assert done.arm("there")["status"] == "not_supported"
    assert "docker pull other:2" in done.arm("there")["reason"]
    assert done.arm("tilt[q=0.7]")["status"] == "ok"


@pytest.mark.full
def test_a_real_model_is_read_through_its_links_and_cannot_be_written(docker: FakeDocker, room: Path) -> None:
    docker.say(python=sys.executable)
    write_inputs(room)
    model = make_tiny(room / "hub" / "snapshot", "Q8_0", positions=64)
    blob = room / "hub" / "blob"
    weights = model / "model.safetensors"
    weights.rename(blob)
    weights.symlink_to("../blob")
    sizes = ("--axes", "kld", "--windows", 2, "--n-ctx", 32, "--control", "none", "--no-floor", "--threads", 1)
    flags = ("--engine", "hf", "--device", "cpu", "--dtype", "float32", "--text", "text.txt", *IMAGE)
    done = cli("compare", model, "--reference", "f32", "--kv", "int8", *sizes, *flags, cwd=room)
    assert done.code == 0, done.err
    assert done.arm("int8")["status"] == "ok", done.arm("int8")
    for run in docker.runs("fidelab.workers.child"):
        assert run.mounts[str(model)] is False
        assert run.mounts[str(blob)] is False


def test_a_file_that_an_option_names_is_seen(docker: FakeDocker, room: Path) -> None:
    room.mkdir()
    answers = room / "answers.json"
    answers.write_text(json.dumps([["prompt", "yes"]]))
    done = compare(
        room, "exact", flags=[*IMAGE, "--no-floor", "--engine-arg", f"answers={answers}"], windows=2, limit=2
    )
    assert done.code == 0, done.err
    assert done.arm("exact")["status"] == "identical"


def test_a_worker_that_is_ended_leaves_no_container(docker: FakeDocker, room: Path) -> None:
    flags = [*IMAGE, "--no-floor", "--engine-arg", "hang=tilt[q=0.6]:1", "--deadline", "5"]
    done = compare(room, "tilt[q=0.6]", flags=flags, windows=4, limit=2)
    assert "deadline" in done.arm("tilt[q=0.6]")["reason"]
    names = {run.flags["--name"][0] for run in docker.runs("fidelab.workers.child")}
    assert len(names) == 2
    [removed] = [call for call in docker.calls if call[0] == "rm"]  # what ended by itself needs no help
    assert removed[1] == "--force"
    assert removed[2] in names
    assert docker.alive() == []


def test_an_engine_that_does_not_answer_leaves_no_container(docker: FakeDocker, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 600\n")
    slow.chmod(0o755)
    environment = locate("fake", image="engine:1", python=str(slow))
    message = r"in image engine:1\) did not start within 2 s"
    with pytest.raises(EngineError, match=message), ask(environment, limit=2.0):
        pass
    assert docker.alive() == []


@pytest.mark.parametrize(
    ("files", "podman", "flags"),
    [
        ("crw-rw-rw- 1 0 0 195, 255 Nov 22 2026 /dev/nvidiactl", False, ("--gpus", "all")),
        ("crw-rw-rw- 1 0 0 195, 255 Nov 22 2026 /dev/nvidiactl", True, ("--device", "nvidia.com/gpu=all")),
        (
            "crw-rw---- 1 0 44 226, 128 Nov 22 2026 /dev/dri/renderD128\ncrw-rw---- 1 0 110 235, 0 Nov 22 /dev/kfd",
            False,
            ("--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "110", "--group-add", "44"),
        ),
        ("", False, ()),
    ],
    ids=["nvidia", "nvidia-podman", "amd", "none"],
)
def test_gpus_are_handed_over_to_arms_that_run_on_one(
    files: str, podman: bool, flags: tuple[str, ...], docker: FakeDocker
) -> None:
    ls = docker.folder / "ls"
    ls.write_text(f"#!/bin/sh\ncat <<'END'\n{files}\nEND\n")
    ls.chmod(0o755)
    docker.say(version="podman version 6.0.0" if podman else "Docker version 29.0.0")
    environment = locate("fake", image="engine:1")
    for device, expected in (("cuda:1", flags), ("cpu", ())):
        arm = sample.ARM.__class__(**{**vars(sample.ARM), "device": device})
        made = present(environment.container(arm))
        words = made.command("python3", "m")
        given = tuple(
            word
            for flag, value in pairwise(words)
            if flag in ("--gpus", "--device", "--group-add")
            for word in (flag, value)
        )
        assert given == expected
        assert ("keep-id" in words) is (podman and os.getuid() != 0)


def test_where_the_daemon_runs_as_the_user_its_root_is_that_user(docker: FakeDocker) -> None:
    docker.say(security="[name=seccomp,profile=builtin name=rootless name=cgroupns]")
    made = present(locate("fake", image="engine:1").container())
    words = made.command("python3", "m")
    assert words[words.index("--user") + 1] == "0:0"


@pytest.mark.full
def test_a_trial_in_an_image_runs_each_format_and_keeps_nothing(docker: FakeDocker, tmp_path: Path) -> None:
    environment = locate("fake", image="engine:1")
    environment.remember({}, {"any": "it did not run"})  # there is no folder of fidelab's that it could be kept in
    assert environment.failing({}) == {}
    found = try_out(environment, tmp_path / "logs")
    assert found["exact"] == Trial(Status.OK)
    assert all(list(run.mounts.values()).count(True) == 1 for run in docker.runs("fidelab.workers.child"))
    assert docker.alive() == []


def test_a_shim_folder_of_the_user_goes_before_the_packages_of_the_image(docker: FakeDocker, room: Path) -> None:
    shim = room / "shim"
    shim.mkdir(parents=True)
    (shim / "unused_module.py").write_text("x = 1\n")
    done = compare(room, "exact", flags=[*IMAGE, "--no-floor", "--pythonpath", shim], windows=2, limit=2)
    assert done.report["reference"]["ran"]["pythonpath"][0]["folder"] == "shim"
    assert all(run.mounts[str(shim)] is False for run in docker.runs())


def test_a_path_with_a_comma_is_one_mount() -> None:
    assert container._mount("/a,b/c", read_only=True) == 'type=bind,"source=/a,b/c","target=/a,b/c",readonly'


def test_the_published_digest_is_that_of_the_repository_that_was_named(docker: FakeDocker) -> None:
    published = ["mirror/other@sha256:aa", "docker.io/vllm/engine@sha256:bb"]
    docker.say(images={"vllm/engine:1": {"Id": "sha256:cc", "RepoDigests": published}})
    assert find_image("vllm/engine:1").digest == "sha256:bb"
    docker.say(images={"vllm/engine:1": {"Id": "sha256:cc", "RepoDigests": None}})
    assert find_image("vllm/engine:1").digest == "sha256:cc"


def test_paths_of_options_are_found_inside_json(tmp_path: Path) -> None:
    draft = json.dumps({"model": str(tmp_path), "n": 3, "other": ["/no/such/path"]})
    assert existing_paths([draft, "relative", str(tmp_path / "absent"), "{not json"]) == [str(tmp_path)]


def test_links_out_of_a_folder_are_followed_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("x")
    (tmp_path / "step").symlink_to("blob")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").symlink_to("../step")
    (tmp_path / "model" / "inside").symlink_to("weights")
    (tmp_path / "model" / "broken").symlink_to("/no/such/file")
    assert set(link_targets(tmp_path / "model")) == {str(tmp_path / name) for name in ("model", "step", "blob")}


def test_an_image_that_is_not_there_is_one_line_that_says_how_to_pull(docker: FakeDocker, room: Path) -> None:
    done = compare(room, "tilt", flags=["--image", "vllm/vllm-openai:v9"])
    refused(done, "image vllm/vllm-openai:v9 is not there", "docker pull vllm/vllm-openai:v9")


def test_without_docker_and_podman_it_is_said(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("FIDELAB_CONTAINER", raising=False)
    refused(compare(room, "tilt", flags=IMAGE), "docker or podman", "FIDELAB_CONTAINER")


def test_a_daemon_that_refuses_is_quoted(docker: FakeDocker, room: Path) -> None:
    docker.say(refusal="Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?")
    refused(compare(room, "tilt", flags=IMAGE), "Cannot connect to the Docker daemon", "docker info")


def test_a_daemon_that_does_not_answer_is_not_waited_for(
    docker: FakeDocker, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "_LIMIT", 1.0)
    docker.say(silent=True)
    refused(compare(room, "tilt", flags=IMAGE), "docker did not answer within 1 s")


def test_the_program_can_be_chosen(docker: FakeDocker, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = FakeDocker(docker.folder.with_name("other"), sys.executable, [], name="mine")
    monkeypatch.setenv("FIDELAB_CONTAINER", str(other.file))
    assert find_image("engine:1").program == str(other.file)
    monkeypatch.setenv("FIDELAB_CONTAINER", "no-such-program")
    refused(compare(room, "tilt", flags=IMAGE), "FIDELAB_CONTAINER=no-such-program")


@pytest.mark.parametrize("name", ["--privileged", "a b", "-v/:/host", ""])
def test_a_name_that_docker_would_take_for_a_flag_is_refused(name: str, docker: FakeDocker, room: Path) -> None:
    refused(compare(room, "tilt", flags=[f"--image={name}"]), "is not a valid image reference")
    assert docker.calls == []


def test_an_image_without_numpy_is_told_so(docker: FakeDocker, second: Second, room: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{second.python}" -S "$@"\n')
    bare.chmod(0o755)
    docker.say(python=str(bare))
    refused(compare(room, "tilt", flags=IMAGE), "in image engine:1", "has no numpy")


def test_a_file_that_names_an_image_is_asked_for_first(
    docker: FakeDocker, room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    engine, axes = {"name": "fake", "image": "engine:1"}, {"kld": {"windows": 1, "n_ctx": 16}}
    file = fake_file(room, engine=engine, candidates=["tilt"], axes=axes, control="none", floor=0, twins=0)
    refused(cli("compare", "-f", file, cwd=room), "image 'engine:1' is an image whose programs would be run", "--trust")
    assert docker.calls == []
    assert cli("compare", "-f", file, "--trust", file, cwd=room).code == 0


def test_the_flags_of_an_image_belong_to_an_engine() -> None:
    from fidelab.config.schema import ArmConfig, Experiment

    with pytest.raises(ValueError, match="image belongs to an engine: write engine=NAME next to it"):
        Experiment.model_validate({"model": "m", "candidates": ["kv=exact,image=engine:1"]})
    arm = Experiment.model_validate({"model": "m", "candidates": ["engine=fake,image=a/b:1@sha256:00"]}).candidates[0]
    assert isinstance(arm, ArmConfig)
    assert present(arm.engine).image == "a/b:1@sha256:00"


@pytest.mark.full
def test_the_engines_of_an_image_are_listed(
    docker: FakeDocker, second: Second, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.mkdir()
    few = {name: ENGINES._table[name] for name in ("hf", "vllm")}
    monkeypatch.setattr("fidelab.environments.listing.ENGINES", Registry("engine", few))
    for python, problems in ((sys.executable, {"vllm"}), (second.python, {"hf", "vllm"})):
        docker.say(python=python)
        places = json.loads(cli("setup", "engines", "--image", "engine:1", "--json", cwd=room).out)["engines"]
        assert {place["name"] for place in places} == {"image engine:1"}
        assert {place["engine"] for place in places if place["problem"]} == problems
        said = [place["problem"] or "" for place in places]
        assert not any(f"{word} install" in why for why in said for word in ("pip", "engines"))
    assert docker.alive() == []


def test_the_list_refuses_an_image_that_is_not_there(docker: FakeDocker, room: Path) -> None:
    room.mkdir()
    refused(cli("setup", "engines", "--image", "other:2", cwd=room), "docker pull other:2")
