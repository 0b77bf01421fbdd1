"""deploy/: each file by the tool that reads it, and every metric it names against those that the server exports.

promtool is in Debian's package prometheus, nginx in nginx, systemd-analyze in systemd.
"""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from fake_openai import FakeOpenAI
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from qengine.bench.serve.options import LoadOptions
from qengine.bench.serve.process import free_port
from qengine.bench.serve.run import measure
from qengine.engine.stats import EngineStats
from qengine.errors import QEngineError
from qengine.server import metrics as server_metrics
from qengine.server.gpu_metrics import GpuReading
from qengine.server.metrics import Facts, ServerMetrics

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "qengine.json"
METRIC = re.compile(r"qengine:[a-zA-Z0-9_]+")
PROCESS = re.compile(r"\bprocess_[a-z_]+")


def tool(name, package):
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed; apt-get install {package}")
    return path


def run(*command, **more):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **more)
    return done.returncode, done.stdout + done.stderr


class FakeEngine:
    stats = EngineStats(*[1] * len(fields(EngineStats)))
    is_running, errored = True, False


@pytest.fixture
def exported(monkeypatch):
    """Sample names of a server on a GPU that has served, failed and been left."""
    monkeypatch.setattr(server_metrics, "read_facts", lambda llm: Facts(1, 1, 1, {"model": "m"}))
    monkeypatch.setattr(ServerMetrics, "gpu", lambda self: GpuReading(0, "card", 0.5, 1, 2))
    made = ServerMetrics(FakeEngine())
    made.begin("/v1/completions").end("stop")
    made.error("server_error", 500)
    body, _ = made.text()
    return {sample.name for family in text_string_to_metric_families(body.decode()) for sample in family.samples}


def dashboard():
    return json.loads(DASHBOARD.read_text())


def expressions():
    """Of every panel, with Grafana's variables as Prometheus would get them."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    return [expr.replace("$__rate_interval", "1m").replace("$instance", ".*") for expr in found]


def test_the_dashboards_metrics_exist(exported):
    assert len(expressions()) > 40
    for expr in expressions():
        names = METRIC.findall(expr) + PROCESS.findall(expr)
        assert names, expr
        assert set(names) <= exported, expr


def test_the_dashboard_is_whole():
    """Unique ids, no panel over another, every panel with a title, a source and a query."""
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert {one["name"] for one in board["templating"]["list"]} == {"datasource", "instance"}
    assert METRIC.findall(json.dumps(board["templating"])) == ["qengine:healthy"] * 2


def test_the_alerts_metrics_exist(exported):
    rules = yaml.safe_load((PROMETHEUS / "qengine.rules.yml").read_text())
    alerts = {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}
    assert {"QEngineDown", "QEngineErrors", "QEngineGpuBusy", "QEnginePrefixCacheMisses"} <= set(alerts)
    for expr in alerts.values():
        assert METRIC.findall(expr)
        assert set(METRIC.findall(expr)) <= exported


def test_the_documents_table_has_every_metric(exported):
    """docs/serving.md names what the server exports, and nothing else."""
    text = (DEPLOY.parent / "docs" / "serving.md").read_text()
    named = set(re.findall(r"^\| `(qengine:[a-z0-9_]+)` \|", text, re.MULTILINE))
    base = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported if not name.endswith("_created")}
    assert named == {name for name in base if name.startswith("qengine:")}


def test_the_dashboards_expressions_parse(tmp_path):
    promtool = tool("promtool", "prometheus")
    rules = [{"record": f"panel:{index}", "expr": expr} for index, expr in enumerate(expressions())]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    code, output = run(promtool, "check", "rules", path)
    assert code == 0, output


@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", "qengine.rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "qengine.rules.test.yml"),
    ],
)
def test_prometheus(command):
    code, output = run(tool("promtool", "prometheus"), *command, cwd=PROMETHEUS)
    assert code == 0, output
    assert "SUCCESS" in output


def test_the_exposition_is_what_prometheus_expects(exported):
    """promtool's linter on a whole scrape; it knows no colons in names, which vLLM's have too."""
    registry = CollectorRegistry()
    made = ServerMetrics(FakeEngine(), registry)
    made.begin("/v1/completions").end("stop")
    code, output = run(tool("promtool", "prometheus"), "check", "metrics", input=made.text()[0].decode())
    problems = [line for line in output.splitlines() if line and "should not contain ':'" not in line]
    allowed = ("qengine:kv_cache_usage_perc", "qengine:cpu_cache_usage_perc")
    assert [line for line in problems if not line.startswith(allowed)] == [], output
    assert code in (0, 3), output


def test_systemd():
    """The unit alone: its programs and the user are not on this machine."""
    analyze = tool("systemd-analyze", "systemd")
    code, output = run(analyze, "verify", DEPLOY / "systemd" / "qengine.service")
    lines = [line for line in output.splitlines() if "qengine.service" in line]
    expected = "Command /opt/qengine/bin/qengine is not executable: No such file or directory"
    assert [line for line in lines if expected not in line] == [], output
    text = (DEPLOY / "systemd" / "qengine.service").read_text()
    assert "Restart=on-failure" in text
    assert "KillSignal=SIGTERM" in text
    assert code in (0, 1)


def test_the_unit_waits_longer_than_the_server_drains():
    settings = pytest.importorskip("qengine.server.settings")
    text = (DEPLOY / "systemd" / "qengine.service").read_text()
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1])
    assert stop > settings.ServerSettings().drain_timeout + 20


def test_the_units_options_are_the_servers():
    from typer.main import get_command

    from qengine.cli.main import app

    text = (DEPLOY / "systemd" / "qengine.env").read_text()
    options = re.search(r"^QENGINE_OPTIONS=(.*)$", text, re.MULTILINE)[1].split()
    known = {name for parameter in get_command(app).commands["serve"].params for name in parameter.opts}
    assert {option for option in options if option.startswith("--")} <= known


def nginx_folder(folder, **replaced):
    """The site inside a configuration of its own, unprivileged, with parts replaced; returns the configuration."""
    site = (DEPLOY / "nginx" / "qengine.conf").read_text()
    for old, new in replaced.values():
        assert re.search(old, site), old
        site = re.sub(old, new, site)
    (folder / "site.conf").write_text(site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temp = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    main = folder / "nginx.conf"
    main.write_text(
        f"pid {folder}/nginx.pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temp}\ninclude {folder}/site.conf;\n}}\n"
    )
    return main


def test_nginx(tmp_path):
    """`nginx -t`, with a certificate made here."""
    nginx = tool("nginx", "nginx")
    code, output = run(
        tool("openssl", "openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
        "/CN=llm.example.org", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem",
    )  # fmt: skip
    assert code == 0, output
    main = nginx_folder(
        tmp_path,
        certificate=("ssl_certificate [^;]+;", f"ssl_certificate {tmp_path}/cert.pem;"),
        key=("ssl_certificate_key [^;]+;", f"ssl_certificate_key {tmp_path}/key.pem;"),
        ports=(r"listen (\[::\]:)?(80|443)", r"listen \g<1>2\2"),
    )
    code, output = run(nginx, "-t", "-c", main, "-p", tmp_path)
    assert code == 0, output
    assert "warn" not in output


@pytest.fixture
def proxied(tmp_path):
    """(a server of known times, the address of nginx before it). Without TLS: that is not what is tested."""
    nginx = tool("nginx", "nginx")
    server, port = FakeOpenAI(first=0.2, between=0.2), free_port()
    with server:
        main = nginx_folder(
            tmp_path,
            upstream=(r"127\.0\.0\.1:8000", f"127.0.0.1:{server.port}"),
            plain=(r"(?s)server \{\s+listen 80;.*?\n\}", ""),
            ports=(r"listen 443 ssl http2;\s+listen \[::\]:443 ssl http2;", f"listen 127.0.0.1:{port};"),
            tls=(r"ssl_(certificate|certificate_key|protocols) [^;]+;", ""),
        )
        process = subprocess.Popen([nginx, "-c", main, "-p", tmp_path, "-g", "daemon off;"])
        try:
            yield server, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


def test_nginx_streams(proxied):
    """Each token passes as it comes, and a client that goes away ends its request behind the proxy."""
    server, url = proxied
    for _ in range(100):
        with contextlib.suppress(QEngineError):
            measured = asyncio.run(measure(LoadOptions(base_url=url, num_prompts=2, output_len=(4, 4), warmup=0)))
            break
        time.sleep(0.05)
    for outcome in measured.outcomes:
        assert outcome.error is None, outcome
        assert outcome.first < 0.38, "the first token waited for the second"
        assert min(outcome.gaps) > 0.1, "tokens came together"
    asyncio.run(measure(LoadOptions(base_url=url, num_prompts=1, output_len=(50, 50), warmup=0, timeout=0.5)))
    deadline = time.monotonic() + 5
    while server.open and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.open == 0, "the request goes on though nobody reads it"


def test_metrics_are_not_shown_outside(proxied):
    _, url = proxied
    code = None
    for _ in range(100):
        try:
            code = urllib.request.urlopen(f"{url}/metrics", timeout=5).status
        except urllib.error.HTTPError as error:
            code = error.code
        except OSError:
            time.sleep(0.05)  # nginx starts
            continue
        break
    assert code == 403
