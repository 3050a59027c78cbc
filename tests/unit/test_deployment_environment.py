"""What Ray's processes get of the user's environment, and what the user's commands get of ours: nothing that hurts."""

from __future__ import annotations

from pathlib import Path

from agents.ray_environment import ray_environment, user_environment

USER = {
    "PATH": "/usr/bin",
    "HOME": "/home/someone",
    "RAY_ADDRESS": "10.0.0.1:6379",
    "RAY_worker_niceness": "19",
    "PYTHONPATH": "/their/code",
    "PYTHONSTARTUP": "/their/startup.py",
    "LD_PRELOAD": "/their/shim.so",
    "GANGMESH_TOKEN": "secret",
    "GANGMESH_DB": "postgresql://someone:password@db/journal",
    "GANGMESH_STATE": "/s",
    "BIG": "x" * 1_000_000,
}


def test_ray_gets_none_of_the_users_own() -> None:
    made = ray_environment(USER, token_file=Path("/s/ray-token"), deployment_id="abc", source=Path("/src"))
    assert (
        not {"RAY_ADDRESS", "PYTHONSTARTUP", "LD_PRELOAD", "GANGMESH_TOKEN", "GANGMESH_DB", "BIG"}
        & made.keys()
    )
    assert made["RAY_worker_niceness"] == "0"
    assert made["PYTHONPATH"] == "/src"
    assert made["RAY_AUTH_MODE"] == "token"
    assert made["GANGMESH_DEPLOYMENT"] == "abc"
    assert made["PATH"] == "/usr/bin"


def test_whoever_asks_the_checkpoint_store_has_its_credentials() -> None:
    theirs = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_ENDPOINT_URL": "http://s3",
        "GOOGLE_APPLICATION_CREDENTIALS": "/g.json",
    }
    made = ray_environment(
        {**USER, **theirs}, token_file=Path("/s/ray-token"), deployment_id="abc", source=None
    )
    assert theirs.items() <= made.items()


def test_an_installed_package_needs_no_path() -> None:
    made = ray_environment(USER, token_file=Path("/s/ray-token"), deployment_id="abc", source=None)
    assert "PYTHONPATH" not in made


def test_the_users_commands_get_their_environment_back_without_our_path() -> None:
    started_with = {**USER, "PYTHONPATH": "/src:/their/code"}
    assert user_environment(started_with, source=Path("/src")) == USER
    assert user_environment({**USER, "PYTHONPATH": "/src"}, source=Path("/src")) == {
        name: value for name, value in USER.items() if name != "PYTHONPATH"
    }
    assert user_environment(started_with, source=None) == started_with
