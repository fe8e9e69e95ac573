"""Options of ``serve`` commands: where they come from, what is refused, and that every command has the same."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from mlsys_core.cli.main import run as mlsys
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.plugins import installed_plugins
from mlsys_open_inference.extension import OipOptions
from mlsys_score.extension import ScoreOptions
from mlsys_serving.cli import ServerOptions, announce, serve_command
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import ServerAddress, TlsConfig
from mlsys_serving.models.app import DEFAULT_CONFIG
from mlsys_serving.tracing import TraceConfig

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("--port", "1", MLSYS_SERVE_PORT="2")``: what a command with all groups was given."""

    def run(*arguments: str, **environment: str) -> dict[str, Any]:
        given: dict[str, Any] = {}
        app = typer.Typer()

        @app.command()
        @serve_command("models")
        def serve(
            models: Annotated[list[str] | None, typer.Argument(help="Models.")] = None,
            max_waiting: Annotated[int, typer.Option(min=0, help="Queue.")] = 5,
            *,
            server: ServerOptions,
            extensions: Extensions,
        ) -> None:
            """Serve words."""
            given.update(
                models=models, max_waiting=max_waiting, server=server, oip=extensions.options("open-inference")
            )

        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        typer.main.get_command(app).main(list(arguments), standalone_mode=False)
        return given

    return run


def test_defaults_are_the_fronts_own(run: Run) -> None:
    given = run()
    assert given == {"models": None, "max_waiting": 5, "server": ServerOptions(), "oip": OipOptions()}
    config = given["server"].http_config(base=DEFAULT_CONFIG)
    assert config.max_body_nbytes == DEFAULT_CONFIG.max_body_nbytes
    assert config.open_paths == DEFAULT_CONFIG.open_paths
    assert config.connections == DEFAULT_CONFIG.connections, "one set of defaults"


def test_all_reach_the_front(run: Run, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\n\n two \n")
    (tmp_path / "keys").chmod(0o600)
    given = run(
        *("--host", "localhost", "--port", "0", "--api-key", "one", "--api-key-file", str(tmp_path / "keys")),
        *("--tls-certificate", "c.pem", "--tls-key", "k.pem", "--tls-client-ca", "ca.pem"),
        *("--cors-origin", "https://a.example", "--cors-origin", "https://b.example", "--allowed-host", "models.lan"),
        *("--max-body-bytes", "7", "--max-connections", "8", "--header-timeout-s", "1.5", "--body-timeout-s", "2"),
        *("--write-timeout-s", "3", "--keep-alive-timeout-s", "4", "--request-timeout-s", "5"),
        *("--drain-timeout-s", "6", "--log-level", "warning", "--log-format", "json"),
        *("--otlp-endpoint", "http://collector:4318"),
        *("--grpc-port", "0", "--model-control", "--max-waiting", "9", "a", "b"),
    )
    config = given["server"].http_config(title="words")
    assert config.title == "words"
    assert config.api_keys == {"one", "two"}
    assert config.tls == TlsConfig(certificate=Path("c.pem"), key=Path("k.pem"), client_ca=Path("ca.pem"))
    assert config.cors_origins == ("https://a.example", "https://b.example")
    assert config.allowed_hosts == ("models.lan",)
    limits = config.connections
    assert (config.max_body_nbytes, limits.max_connections, limits.header_timeout_s) == (7, 8, 1.5)
    assert (limits.body_timeout_s, limits.write_timeout_s, limits.keep_alive_timeout_s) == (2, 3, 4)
    assert (config.request_timeout_s, config.drain_timeout_s) == (5, 6)
    assert (config.log_level, config.log_format) == ("warning", "json")
    assert config.traces == TraceConfig("http://collector:4318")
    assert (given["oip"].grpc_port, given["oip"].model_control) == (0, True)
    assert (given["max_waiting"], given["models"]) == (9, ["a", "b"])


def test_the_nearer_source_wins(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "words.toml"
    path.write_text('port = 1\nmax-connections = 1\nmax_waiting = 1\napi_key = "from-file"\nhost = "h1"\n')
    path.chmod(0o600)
    given = run(
        *("--config", str(path), "--port", "4"),
        MLSYS_SERVE_PORT="2",
        MLSYS_MODELS_PORT="3",
        MLSYS_SERVE_MAX_CONNECTIONS="2",
        MLSYS_MODELS_MAX_CONNECTIONS="3",
        MLSYS_MODELS_MAX_WAITING="3",
        MLSYS_SERVE_HOST="h2",
    )
    server = given["server"]
    assert (server.port, server.max_connections, given["max_waiting"], server.host) == (4, 3, 3, "h2")
    assert server.api_key == ["from-file"], "a string is one key, not its letters"
    said = capsys.readouterr().err
    for part in (
        "port = 4 (flag)",
        "max_connections = 3 (environment)",
        "host = h2 (environment)",
        "api_key = *** (file)",
    ):
        assert part in said
    assert "from-file" not in said


def test_several_keys_in_a_variable_are_split_at_spaces(run: Run) -> None:
    assert run(MLSYS_SERVE_API_KEY="one two")["server"].keys() == ["one", "two"]


@pytest.mark.parametrize("variable", ["MLSYS_SERVE_API_KEY", "MLSYS_MODELS_API_KEY"])
@pytest.mark.parametrize("value", ["", "  "])
def test_a_key_set_to_nothing_does_not_open_the_server(variable: str, value: str, run: Run) -> None:
    with pytest.raises(InvalidInputError, match=f"{variable} is set, but empty"):
        run(**{variable: value})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ports = 1", "no setting 'ports'"),
        ("config = 'x'", "no setting 'config'"),
        ("help = true", "no setting 'help'"),
        ("port = true", "'port' is a whole number, got True"),
        ("port = 8000.5", "'port' is a whole number"),
        ("port = '80'", "'port' is a whole number"),
        ("header_timeout_s = true", "is a number"),
        ("host = 5", "'host' is a string"),
        ("host = ['a']", "'host' is a string"),
        ("model_control = 1", "is true or false"),
        ("api_key = [1]", "a string or a list of such"),
        ("api_key = [['a']]", "a string or a list of such"),
        ("port = 1\nmax-waiting = 1\nmax_waiting = 2", "comes twice"),
        ("port =", "cannot be read"),
        ("a = " + "[" * 100_000, "cannot be read"),
        ("a = '" + "x" * 2**20 + "'", "at most 1 MiB"),
    ],
)
def test_a_file_is_checked_as_flags_are(line: str, says: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "words.toml"
    path.write_text(line)
    with pytest.raises(InvalidInputError, match=says) as caught:
        run("--config", str(path))
    assert len(str(caught.value)) < 1500


def test_a_file_may_have_a_number_for_seconds_and_lists(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "words.toml"
    path.write_text("header_timeout_s = 3\nmodels = ['a']\nmodel_control = true\ncors-origin = ['https://a.example']\n")
    given = run("--config", str(path))
    assert (given["server"].header_timeout_s, given["models"], given["oip"].model_control) == (3.0, ["a"], True)
    assert given["server"].cors_origin == ["https://a.example"]


def test_a_file_out_of_range_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "orca.toml"
    path.write_text("port = 70000\n")
    assert mlsys(["orca", "serve", "--config", str(path)]) == 2
    assert "'--port'" in capsys.readouterr().err


def test_files_with_keys_that_others_may_read_are_named(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, settings = tmp_path / "keys", tmp_path / "words.toml"
    keys.write_text("k")
    settings.write_text("api_key = 'a-secret'")
    for mode, is_warned in ((0o600, False), (0o640, True), (0o644, True)):
        keys.chmod(mode)
        settings.chmod(mode)
        run("--api-key-file", str(keys), "--config", str(settings))["server"].keys()
        said = capsys.readouterr().err
        assert said.count("warning: others may read the keys") == 2 * is_warned
        assert "a-secret" not in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"log_format": "xml"}, "--log-format is text or json"),
        ({"log_level": "loud"}, "--log-level is one of debug, info, warning, error"),
        ({"api_key": [""]}, "an API key is empty"),
        ({"api_key_file": Path("/no/such/file")}, "cannot be read"),
        ({"api_key_file": Path("/dev/null")}, "there is no key in"),
        ({"tls_certificate": Path("c")}, "go together"),
        ({"tls_key": Path("k")}, "go together"),
        ({"tls_client_ca": Path("ca")}, "needs --tls-certificate"),
        ({"cors_origin": ["example.org"]}, "--cors-origin 'example.org' is no origin"),
        ({"cors_origin": [""]}, "--cors-origin is empty"),
        ({"allowed_host": ["", "a"]}, "--allowed-host is empty"),
        ({"allowed_host": ["http://example.org/"]}, "--allowed-host 'http://example.org/' is no name of a host"),
        ({"allowed_host": ["example.org:8000"]}, "is no name of a host"),
        ({"header_timeout_s": 0.0}, "--header-timeout-s is a finite number of seconds above 0"),
        ({"request_timeout_s": -1}, "--request-timeout-s is a finite number"),
        ({"request_timeout_s": float("nan")}, "--request-timeout-s is a finite number"),
    ],
)
def test_a_refusal_names_the_option_and_not_the_field(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        ServerOptions(**options).http_config(base=DEFAULT_CONFIG)


def test_console_is_still_taken_for_text() -> None:
    assert ServerOptions(log_format="console").http_config().log_format == "console"


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": ["k"]}, False),
    ],
)
def test_a_server_open_to_a_network_says_so_in_one_line(
    options: dict[str, Any], is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ServerOptions(port=0, **options)
    with server.bind(server.http_config()) as bound:
        assert isinstance(bound.address, ServerAddress)
    said = capsys.readouterr().err
    assert said.count("\n") == is_warned
    assert ("whoever reaches" in said) == is_warned


def test_the_port_of_grpc_is_held_and_a_busy_one_names_its_option() -> None:
    options = OipOptions(grpc_port=0)
    with options.hold("127.0.0.1"):
        assert options.notes("") == [f"gRPC on 127.0.0.1:{options.grpc_port}"]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", options.grpc_port))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match="--grpc-port"), OipOptions(grpc_port=port).hold("127.0.0.1"):
            pass
    with OipOptions().hold("127.0.0.1"):
        assert OipOptions().notes("") == []


@pytest.mark.parametrize("subsystem", ["orca", "batchmaker", "dvabatch"])
def test_every_server_has_the_same_options(subsystem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mlsys([subsystem, "serve", "--help"]) == 0
    said = capsys.readouterr().out
    groups = [ServerOptions] if subsystem == "orca" else [ServerOptions, OipOptions]
    for group in groups:
        for field in (field for field in fields(group) if field.init):
            assert f"--{field.name.replace('_', '-')} " in said, field.name
    for option in ("--config", "--max-waiting"):
        assert option in said


@pytest.mark.parametrize(
    "arguments",
    [["orca", "serve"], ["batchmaker", "serve", "/no/such/folder"], ["dvabatch", "serve", "no-such-model"]],
    ids=lambda arguments: arguments[0],
)
def test_every_server_refuses_a_busy_port_before_it_looks_for_a_model(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert mlsys([*arguments, "--port", str(taken.getsockname()[1])]) == 1
    said = capsys.readouterr().err
    assert "is in use by another process" in said
    assert "no-such-model" not in said.splitlines()[-1]


LOADING = """
    import io, os, signal, sys, typer
    from mlsys_serving.cli import serve_command

    app = typer.Typer()

    @app.command()
    @serve_command("words")
    def serve():
        try:
            import ends
        except BaseException:
            raise ImportError("kept")

    class Terminal(io.RawIOBase):
        is_quiet = {when!r} != "line"

        def writable(self):
            return True

        def write(self, data):
            os.write(2, data)
            if not self.is_quiet:
                self.is_quiet = True
                os.kill(os.getpid(), signal.SIGTERM)
            return len(data)

    sys.stderr = io.TextIOWrapper(io.BufferedWriter(Terminal()), line_buffering=True)
    app()
"""


@pytest.mark.parametrize("when", ["line", "import"])
def test_sigterm_while_a_line_is_written_or_a_module_imported_ends_with_one_line(when: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    command = [sys.executable, "-c", textwrap.dedent(LOADING).format(when=when)]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})
    assert set(ran.stderr.splitlines()) == {  # the terminal above repeats a line whose write is interrupted
        "  settings: all by default",
        "mlsys: stopped by SIGTERM before it was ready",
    }
    assert ran.returncode == 128 + signal.SIGTERM


def test_clients_cannot_load_models_of_worker_processes() -> None:
    with pytest.raises(InvalidInputError, match="leave out --model-control"):
        OipOptions(model_control=True).check(has_instances=True)


def test_a_server_of_models_needs_a_front() -> None:
    with pytest.raises(InvalidInputError, match="pip install mlsys-open-inference"):
        Extensions().check(needs_front=True)


def test_all_servers_say_alike_where_they_listen(capsys: pytest.CaptureFixture[str]) -> None:
    announce(ServerAddress("127.0.0.1", 8000), Extensions())
    registry = installed_plugins().registry
    announce(
        ServerAddress("127.0.0.1", 8000),
        Extensions.of("models", registry, open_inference=OipOptions(grpc_port=8001), score=ScoreOptions(no_ui=True)),
    )
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "listening on http://127.0.0.1:8000",
        "listening on http://127.0.0.1:8000",
        "  gRPC on 127.0.0.1:8001",
    ]
