"""Settings: where they come from, which one wins, and how a mistake is told."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from supervise_daemon.config import (
    FILES,
    ConfigError,
    Settings,
    default_name,
    load_settings,
    make_spec,
    parse_duration,
    parse_signals,
)
from supervise_daemon.job_spec import JobSpec


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings file of this machine takes part."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("supervise_daemon.config.FILES", FILES[:1])


def spec(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, yaml: str | bytes | None = None) -> JobSpec:
    if yaml is not None:
        Path("supervise.yaml").write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
    settings, _ = load_settings(flags or {}, environ or {}, None)
    return make_spec(("python", "t.py"), settings, environ or {}, Path.cwd())


def test_flag_beats_environment_beats_file_beats_default() -> None:
    """Each layer in turn decides the grace."""
    assert spec().grace_s == 30
    assert spec(yaml="grace: 40").grace_s == 40
    assert spec(environ={"SUPERVISE_GRACE": "50"}, yaml="grace: 40").grace_s == 50
    assert spec({"grace": "60"}, {"SUPERVISE_GRACE": "50"}, "grace: 40").grace_s == 60


@pytest.mark.parametrize(
    "flags, environ, yaml",
    [({}, {}, "garce: 5"), ({}, {"SUPERVISE_GARCE": "5"}, None), ({"garce": 5}, {}, None)],
)
def test_an_unknown_key_names_the_nearest_one(flags: dict[str, Any], environ: dict[str, str], yaml: str | None) -> None:
    """Wherever it comes from, a typing mistake is an error that shows the right word."""
    with pytest.raises(ConfigError, match=r"'garce'.*did you mean 'grace'\?"):
        spec(flags, environ, yaml)


def test_variables_that_we_set_for_a_job_are_no_settings() -> None:
    """A supervise started inside a supervised job is not confused by its environment."""
    from supervise_hooks.contract import env

    inherited = {
        value: "/x"
        for name, value in vars(env).items()
        if name.isupper() and value not in (env.ON_SUPERVISOR_DEATH, env.CHECKPOINTS)
    }
    assert spec(environ={**inherited, "SUPERVISE_ON_SUPERVISOR_DEATH": "flush"}).grace_s == 30


@pytest.mark.parametrize(
    "yaml, named",
    [
        ("max_crashes: many", "max_crashes"),
        ("max_crashes: 1.5", "max_crashes"),
        ("max_crashes: -1", "max_crashes"),
        ("keep_last: 0", "keep_last"),
        ("grace: soon", "grace"),
        ("grace: -5", "grace"),
        ("grace: [1]", "grace"),
        ("requeue: slrum", "requeue"),
        ("launcher: mpi", "launcher"),
        ("fresh: perhaps", "fresh"),
        ("signals: [TERM]", "signals"),
        ("signals: {TERM: explode}", "signals.TERM"),
        ("name: ../../etc", "name"),
        ("name: ''", "name"),
        ("resume_argument: --load", "resume_argument"),
        ('resume_argument: "--load \'{path}"', "resume_argument"),
    ],
)
def test_a_wrong_value_is_one_error_with_key_and_value(yaml: str, named: str) -> None:
    """The message names the key; nothing starts with a default instead."""
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        spec(yaml=yaml)


@pytest.mark.parametrize("yaml", ["- grace: 5", "just text", "grace: [", b"grace: \xff\xfe", b"\x00"])
def test_a_file_that_is_no_mapping_is_one_clear_error(yaml: str | bytes) -> None:
    """A list, a word, broken YAML, no UTF-8, a NUL: the file is named."""
    with pytest.raises(ConfigError, match=r"cannot read supervise\.yaml"):
        spec(yaml=yaml)


def test_an_unreadable_or_missing_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    """What was asked for by name must be there."""
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        load_settings({}, {}, str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="cannot read .*: Is a directory"):
        load_settings({}, {}, str(tmp_path))
    assert spec(yaml="").grace_s == 30
    if os.getuid() != 0:
        Path("supervise.yaml").chmod(0)
        with pytest.raises(ConfigError, match="Permission denied"):
            spec()


@pytest.mark.parametrize("spelled", ["usr1", "USR1", "SIGUSR1", "sigusr1", " Usr1 ", "10"])
def test_equal_spellings_of_a_signal_are_accepted(spelled: str) -> None:
    """C71: with or without SIG, in any case, or by number."""
    rules, ignored = parse_signals({spelled: "preempt:2m"}, 30)
    assert [(rule.number, rule.name, rule.action, rule.grace_s) for rule in rules] == [
        (signal.SIGUSR1, "SIGUSR1", "preempt", 120)
    ]
    assert ignored == ()


@pytest.mark.parametrize("spelled", ["SIGFOO", "USR9", "KILL", "STOP", "0", "-1", "CHLD", "SEGV", "", "99999", "²"])
def test_unknown_and_uncatchable_signals_are_rejected(spelled: str) -> None:
    """C71: never a silent default."""
    with pytest.raises(ConfigError, match="cannot use signal"):
        parse_signals({spelled: "preempt"}, 30)


def test_numbers_as_keys_in_yaml_are_signals_too() -> None:
    """YAML reads `10:` as a number."""
    found = spec(yaml="signals: {10: flush}")
    assert {rule.name: rule.action for rule in found.signals}["SIGUSR1"] == "flush"


def test_rules_merge_over_the_defaults_and_the_last_spelling_counts() -> None:
    """One changed signal leaves the others; an ignored one is absorbed, for its default action would end us."""
    found = spec({"signals": {"SIGTERM": "ignore", "hup": "preempt"}})
    assert {rule.name: rule.action for rule in found.signals} == {
        "SIGUSR1": "preempt",
        "SIGUSR2": "flush",
        "SIGINT": "stop",
        "SIGHUP": "preempt",
    }
    assert found.ignored_signals == (signal.SIGTERM,)
    again = spec({"signals": {"15": "stop"}}, yaml="signals: {TERM: ignore}")
    assert {rule.name: rule.action for rule in again.signals}["SIGTERM"] == "stop"
    assert again.ignored_signals == ()


@pytest.mark.parametrize(
    "text, seconds", [("90", 90), ("90s", 90), ("2m", 120), ("1.5h", 5400), ("1 d", 86400), (7, 7), (0.5, 0.5), ("3min", 180)]
)
def test_durations(text: float | str, seconds: float) -> None:
    """Numbers are seconds; s, m, min, h, d."""
    assert parse_duration(text, "grace") == seconds


@pytest.mark.parametrize("text", ["", "s", "1x", "-1", "1h30m", "inf", "nan", "1e9", True])
def test_what_is_no_duration(text: Any) -> None:
    """Refused by name."""
    with pytest.raises(ConfigError, match="grace"):
        parse_duration(text, "grace")


def test_the_name_is_stable_and_tells_runs_apart(tmp_path: Path) -> None:
    """The same command in the same folder is the same run; Slurm's ids beat it; odd words make a usable name."""
    argv = ("python", "-u", "my train.py", "--lr", "1")
    assert default_name(argv, {}, tmp_path) == default_name(argv, {}, tmp_path)
    assert default_name(argv, {}, tmp_path).startswith("my_train-")
    assert default_name(argv, {}, tmp_path) != default_name((*argv, "x"), {}, tmp_path)
    assert default_name(argv, {}, tmp_path) != default_name(argv, {}, tmp_path / "other")
    assert default_name(argv, {"SLURM_JOB_ID": "7"}, tmp_path) == "slurm-7"
    assert (
        default_name(argv, {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, tmp_path) == "slurm-7_3"
    )
    settings, _ = load_settings({}, {}, None)
    for odd in (("",), ("sh", "-c", "a b"), ("\udcff",), ("日本.py",), (".py",)):
        assert make_spec(odd, settings, {}, tmp_path).argv == odd


def test_the_example_file_holds_the_defaults() -> None:
    """What supervise.example.yaml shows is what happens without it."""
    example = (Path(__file__).parents[2] / "supervise.example.yaml").read_text()
    plain = spec()
    assert spec(yaml=example) == plain


def test_the_example_file_says_what_the_defaults_are() -> None:
    """supervise.example.yaml is the documentation of every default: it must not drift from them."""
    example = Path(__file__).parent.parent.parent / "supervise.example.yaml"
    assert load_settings({}, {}, str(example))[0] == Settings()
