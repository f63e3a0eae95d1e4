"""The settings: one table for file, environment and flags, and faults that say what to do."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvferry.errors import KvferryError
from kvferryd import config as configuration
from kvferryd.config import Config, ConfigError, misspelt, reach, resolve
from kvferryd.config.types import Wrong, is_loopback, is_wildcard, split_address


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvferry.toml"


def refused(flags: dict[str, object] | None = None, environment: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(flags or {}, environment or {})[0]
    return caught.value


def test_without_a_word_the_defaults_are_those_of_the_design() -> None:
    config = resolve({}, {})[0]
    assert (config.rest, config.peer, config.device) == ("127.0.0.1:7410", "127.0.0.1:7411", "cpu")
    assert config.advertise == config.peer
    assert config.engine_socket == Path("/run/kvferry/engine.sock")
    assert config == Config()


def test_flags_win_over_the_environment_and_the_environment_over_the_file(file: Path) -> None:
    file.write_text('arena_mb = 1\nway = "direct"\nhistory = 7\n')
    environment = {"KVFERRY_CONFIG": str(file), "KVFERRY_ARENA_MB": "2", "KVFERRY_WAY": "staged"}
    config, origins = resolve({"arena_mb": "3"}, environment)
    assert (config.arena_mb, config.way, config.history) == (3, "staged", 7)
    assert origins["arena_mb"] == "flag --arena-mb"
    assert origins["way"] == "environment KVFERRY_WAY"
    assert origins["history"] == f"file {file}"
    assert origins["rest"] == "default"


def test_the_flag_config_wins_over_the_variable(file: Path) -> None:
    file.write_text("history = 7")
    assert resolve({"config": str(file)}, {"KVFERRY_CONFIG": "/not/there"})[0].history == 7


def test_an_empty_variable_is_no_word() -> None:
    assert resolve({}, {"KVFERRY_ARENA_MB": ""})[0].arena_mb == 512


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("checksum", "yes", True), ("checksum", " true\n", True), ("checksum", "OFF", False),
        ("lease_ttl_s", "2.5", 2.5), ("device", "cuda:3", "cuda:3"), ("rest", "[::1]:0", "[::1]:0"),
        ("log_format", "json", "json"),
        ("allow_peers", "10.0.0.0/8, worker-*.kv.svc  fd00::/8", ("10.0.0.0/8", "worker-*.kv.svc", "fd00::/8")),
        ("ucx", "TLS=rc,cuda_ipc UCX_NET_DEVICES=mlx5_0:1", {"TLS": "rc,cuda_ipc", "NET_DEVICES": "mlx5_0:1"}),
    ],
)  # fmt: skip
def test_a_variable_holds_text(name: str, raw: str, value: object) -> None:
    assert getattr(resolve({}, {f"KVFERRY_{name.upper()}": raw})[0], name) == value


def test_a_file_holds_the_types_of_toml(file: Path) -> None:
    file.write_text(
        'strict = true\ndeadline_s = 5\nallow_peers = ["::1", "a.b"]\n[ucx]\nTLS = "tcp"\nRCACHE_ENABLE = true'
    )
    config = resolve({"config": str(file)}, {})[0]
    assert (config.strict, config.deadline_s, config.allow_peers) == (True, 5.0, ("::1", "a.b"))
    assert config.ucx == {"TLS": "tcp", "RCACHE_ENABLE": "y"}


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("rest", "7410"), ("rest", "host:70000"), ("rest", "::1:7410"), ("peer", "[nonsense:]:1"),
        ("advertise", "10.0.0.1:0"), ("advertise", "0.0.0.0:7411"), ("engine_socket", "run/engine.sock"),
        ("engine_socket", "/" + "x" * 107), ("device", "cuda"), ("device", "gpu:0"), ("arena_mb", "-1"),
        ("arena_mb", "1.5"), ("arena_mb", "512MB"), ("way", "quick"), ("strict", "maybe"), ("allow_peers", " "),
        ("allow_peers", "10.0.0.1/8"), ("allow_peers", "10.0.0.1:7411"), ("allow_peers", "10.0.0.300"),
        ("allow_peers", "a/b c"), ("token_file", "/not/there"), ("log_level", "loud"), ("lease_ttl_s", "nan"),
        ("lease_ttl_s", "-1"), ("deadline_s", "3601"), ("nixl_threads", "65"), ("ucx", "TLS"), ("ucx", "tls=rc"),
        ("connect_timeout_s", "soon"), ("state", "x" * 5000), ("state", "/dev/null"), ("state", "/dev/null/in"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_its_name_its_origin_and_a_remedy(name: str, raw: str) -> None:
    error = refused(environment={f"KVFERRY_{name.upper()}": raw})
    assert error.code == "bad_config"
    assert error.field == name
    assert raw[:50] in error.value
    assert f"environment KVFERRY_{name.upper()}" in str(error)
    assert error.remedy


def test_all_faults_are_told_at_once(file: Path) -> None:
    file.write_text('arena_mb = "many"\narena = 3')
    error = refused({"config": str(file), "way": "quick"}, {"KVFERRY_STRICT": "maybe"})
    assert {setting.field for setting in error.settings} == {"arena_mb", "arena", "way", "strict"}
    for said in (f"file {file}", "flag --way", "environment KVFERRY_STRICT", "'many'", "did you mean arena_mb?"):
        assert said in str(error)


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest_name(file: Path) -> None:
    file.write_text("drain_timeout = 3")
    error = refused({"config": str(file)})
    assert (error.field, error.remedy) == ("drain_timeout", "did you mean drain_timeout_s?")


@pytest.mark.parametrize("text", ["arena_mb = ", "\udcff"])
def test_a_file_that_is_no_toml_is_refused(file: Path, text: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert "is not TOML" in str(refused({"config": str(file)}))


def test_a_file_that_is_not_there_is_refused() -> None:
    assert "No such file" in str(refused(environment={"KVFERRY_CONFIG": "/not/there.toml"}))


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text(32 * "x")
    return str(tmp_path / "secret")


def test_tls_files_go_together(tmp_path: Path) -> None:
    cert = tmp_path / "cert"
    cert.write_text("x")
    error = refused({"tls_cert": str(cert)})
    assert {setting.field for setting in error.settings} == {"tls_key", "tls_ca"}
    assert refused({"rest_tls": True}).field == "rest_tls"
    assert refused({"tls_cert": str(cert), "tls_key": "/not/there", "tls_ca": str(cert)}).field == "tls_key"
    assert resolve({"tls_cert": str(cert), "tls_key": str(cert), "tls_ca": str(cert)}, {})[0].tls


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    assert "is an empty file" in str(refused({"token_file": str(tmp_path / "token")}))


def test_listening_everywhere_needs_an_address_to_advertise(secret: str) -> None:
    assert refused({"peer": "0.0.0.0:7411", "peer_secret_file": secret}).field == "advertise"
    everywhere = {"peer": "[::]:7411", "advertise": "node-3:7411", "peer_secret_file": secret}
    assert resolve(everywhere, {})[0].advertise == "node-3:7411"


@pytest.mark.parametrize("address", ["10.0.0.1:7411", "0.0.0.0:7411", "[::]:7411", "*:7411", "node-3:7411"])
def test_peers_of_other_hosts_must_prove_who_they_are(address: str, secret: str) -> None:
    there = {"peer": address, "advertise": "node-3:7411"}
    error = refused(there)
    assert error.field == "peer"
    assert "peer_secret_file" in error.remedy
    assert resolve(there | {"peer_secret_file": secret}, {})[0].peer == address
    files = {"tls_cert": secret, "tls_key": secret, "tls_ca": secret}
    assert resolve(there | files, {})[0].tls
    assert refused(there | files | {"peer_secret_file": secret}).field == "peer_secret_file"


def test_a_secret_is_long_and_has_one_before_it_at_most(secret: str) -> None:
    for lines in ("short", "\n".join(3 * [32 * "x"]), f"{32 * 'x'}\nshort"):
        Path(secret).write_text(lines)
        assert refused({"peer_secret_file": secret}).field == "peer_secret_file"
    Path(secret).write_text(f"{32 * 'x'}\n\n{40 * 'y'}\n")
    assert resolve({"peer_secret_file": secret}, {})[0].peer_secret_file


@pytest.mark.parametrize("address", ["127.0.0.1:7411", "127.8.0.1:0", "localhost:7411", "[::1]:7411"])
def test_peers_of_this_host_need_no_proof(address: str) -> None:
    assert resolve({"peer": address, "advertise": "127.0.0.1:7411"}, {})[0].peer == address


def test_what_is_open_to_others_is_warned_of() -> None:
    assert list(Config().warnings()) == []
    assert [warning.split()[0] for warning in Config(rest="0.0.0.0:7410").warnings()] == ["REST"]


@pytest.mark.parametrize(("pod", "dialled"), [("10.1.2.3", "10.1.2.3:7411"), ("fd00::5", "[fd00::5]:7411")])
def test_one_manifest_has_brackets_for_pods_of_both_families(pod: str, dialled: str, secret: str) -> None:
    """`[$(POD_IP)]:7411`: without brackets the port could not be told from an address of IPv6."""
    environment = {f"KVFERRY_{name}": f"[{pod}]:7411" for name in ("ADVERTISE", "ROSTER")}
    environment |= {"KVFERRY_PEER": "*:7411", "KVFERRY_PEER_SECRET_FILE": secret}
    config = resolve({}, environment)[0]
    assert (config.advertise, config.roster) == (dialled, dialled)


def test_a_misspelt_variable_is_noticed_and_those_of_kubernetes_are_not() -> None:
    service = ["KVFERRY_SERVICE_HOST", "KVFERRY_PORT", "KVFERRY_PORT_7410_TCP_ADDR", "KVFERRY_SERVICE_PORT_REST"]
    environment = dict.fromkeys([*service, "KVFERRY_ARENAMB", "KVFERRY_CONFIG", "KVFERRY_REST", "PATH"], "x")
    assert list(misspelt(environment)) == [("KVFERRY_ARENAMB", "KVFERRY_ARENA_MB")]


@pytest.mark.parametrize(
    ("rest", "url"),
    [
        ("", "http://127.0.0.1:7410"),
        ("0.0.0.0:99", "http://127.0.0.1:99"),
        ("[::]:99", "http://127.0.0.1:99"),  # both families, as `*`
        ("*:99", "http://127.0.0.1:99"),
        ("[::1]:5", "http://[::1]:5"),
        ("node:1", "http://node:1"),
    ],
)
def test_commands_reach_the_daemon_by_its_own_settings(rest: str, url: str) -> None:
    assert reach({}, {"KVFERRY_REST": rest, "KVFERRY_DEVICE": "a fault elsewhere"}).url == url


@pytest.mark.parametrize("rest", ["0.0.0.0:99", "*:99", "[::]:99"])
def test_commands_dial_the_name_in_the_certificate(rest: str) -> None:
    files = {f"KVFERRY_TLS_{each}": __file__ for each in ("CERT", "KEY", "CA")}
    environment = {"KVFERRY_REST": rest, "KVFERRY_REST_TLS": "true", "KVFERRY_ADVERTISE": "[fd00::7]:7411", **files}
    assert reach({}, environment).url == "https://[fd00::7]:99"


def test_commands_refuse_an_address_that_is_none() -> None:
    with pytest.raises(KvferryError, match="KVFERRY_REST"):
        reach({}, {"KVFERRY_REST": "here"})


def test_addresses() -> None:
    assert split_address("[fd00::1]:5") == ("fd00::1", 5)
    with pytest.raises(Wrong):
        split_address("[10.0.0.7]:5")
    assert is_wildcard("[::]:1")
    assert not is_wildcard("127.0.0.1:1")
    assert is_loopback("127.3.0.1:1")
    assert is_loopback("localhost:1")
    assert not is_loopback("example.org:1")


def test_every_field_is_an_option_with_help_and_a_default_that_it_would_accept() -> None:
    for name, field in configuration.OPTIONS.items():
        default = getattr(Config(), name)
        assert field.description
        if written := configuration.written(default):
            assert getattr(resolve({name: written}, {})[0], name) == default


def test_every_setting_has_a_flag_in_both_spellings() -> None:
    from kvferryd.commands.cli import _parser

    parser: argparse.ArgumentParser = _parser()
    parsed = parser.parse_args(
        ["serve", "--arena-mb", "1", "--lease_ttl_s", "2", "--no-strict", "--ucx", "A=1", "--ucx", "B=2"]
    )
    config = resolve(vars(parsed), {})[0]
    assert (config.arena_mb, config.lease_ttl_s, config.strict, config.ucx) == (1, 2.0, False, {"A": "1", "B": "2"})
    assert set(configuration.OPTIONS) <= set(vars(parsed))


# ---- what this version cannot do ----


STRICT: dict[str, object] = {"strict": True, "ucx": {"TLS": "rc"}}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        *[
            ({"device": device, "arena_mb": 0, **more}, "arena_mb")
            for device in ("cpu", "cuda:0")
            for more in ({"way": "staged"}, STRICT)
        ],
        *[({**STRICT, "way": way}, "way") for way in ("direct", "mapped")],  # strict leaves nothing to be read directly
        ({"peer": "127.0.0.1:0"}, "peer"),  # a port of 0 cannot be dialled
        ({"max_leases": 10**9}, "max_leases"),  # each takes a word of registered memory, from the engine's start on
    ],
)
def test_what_cannot_be_done_is_refused(settings: dict[str, object], field: str) -> None:
    error = refused(settings)
    assert (error.code, error.field) == ("bad_config", field)


def test_strict_does_not_rest_on_transports_that_nobody_chose() -> None:
    """UCX would take TCP, over which it checks no key: tests/faults/test_strict_attacker.py reads the whole cache."""
    error = refused({"strict": True})
    assert (error.code, error.field) == ("bad_config", "strict")
    assert "TLS=rc,cuda_copy,cuda_ipc" in error.remedy
    assert not list(resolve({"strict": True, "ucx": {"TLS": "rc,cuda_ipc"}}, {})[0].warnings())
    (warning,) = resolve({"strict": True, "ucx": {"TLS": "rc,tcp"}}, {})[0].warnings()
    assert "does not hold over TCP" in warning
