"""The environment report: complete, JSON-ready, and without paths."""

import json
import subprocess
from pathlib import Path

import qerl
from qerl import env_info
from qerl.env_info import collect_env, env_text


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    result = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return result.stdout.strip()


def pretend_package(root: Path, monkeypatch) -> None:
    (root / "qerl").mkdir()
    source = root / "qerl" / "__init__.py"
    source.write_text("")
    monkeypatch.setattr(qerl, "__file__", str(source))


def test_the_commit_and_local_changes_are_reported(tmp_path, monkeypatch):
    pretend_package(tmp_path, monkeypatch)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "qerl/__init__.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    facts = collect_env()
    assert facts["commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert facts["modified"] is False
    (tmp_path / "qerl" / "__init__.py").write_text("changed = True\n")
    assert collect_env()["modified"] is True


def test_outside_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    pretend_package(tmp_path, monkeypatch)
    facts = collect_env()
    assert facts["commit"] is None
    assert facts["modified"] is None


def test_a_machine_without_git_is_no_error(tmp_path, monkeypatch):
    pretend_package(tmp_path, monkeypatch)
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect_env()["commit"] is None


def test_the_report_is_json_ready_and_holds_no_path(monkeypatch):
    monkeypatch.setenv("QERL_MODELS", "/somewhere/models")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    facts = collect_env()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["variables"]["QERL_MODELS"] == "set"
    assert facts["variables"]["OMP_NUM_THREADS"] == "3"
    text = env_text(facts)
    assert "/somewhere" not in text
    assert str(Path.home()) not in text
    assert f"qerl {qerl.__version__}" in text


def test_a_missing_package_is_null(monkeypatch):
    monkeypatch.setattr(env_info, "PACKAGES", ("torch", "no-such-package"))
    versions = collect_env()["versions"]
    assert versions["no-such-package"] is None
    assert versions["torch"]


def test_whether_the_cpu_multiplies_bfloat16_is_in_its_flags(monkeypatch):
    texts = {
        "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 avx512vbmi\n": True,
        "flags\t\t: fpu avx2 amx_bf16\n": True,
        "flags\t\t: fpu avx2 avx512f\n": False,
        "Features\t: fp asimd bf16\n": None,
    }
    for text, expected in texts.items():
        monkeypatch.setattr(Path, "exists", lambda path: True)
        monkeypatch.setattr(Path, "read_text", lambda path, text=text, **_: text)
        assert env_info.cpu_multiplies_bfloat16() is expected
