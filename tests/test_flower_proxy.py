"""The shipped nginx configuration, in a real nginx before a real SuperLink: nodes pass, everybody else does not."""

import http.client
import shutil
import ssl
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from coterie.flower.credentials import make_node_key
from coterie.flower.lab import LINK, NAME, Lab, free_ports, listens

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
SHIPPED = Path(__file__).parents[1] / "examples" / "deploy" / "nginx.conf"

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(NGINX is None, reason="there is no nginx"),
]

# A message of 6 MB, there and back: more than one of the pieces that Flower makes of an array.
APP = {
    "pyproject.toml": """
[project]
name = "echo"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "echo:server"
clientapp = "echo:client"

[tool.flwr.app.config]
""",
    "echo.py": """
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    sent = np.arange(1_500_000, dtype=np.float32)
    content = RecordDict({"x": ArrayRecord({"x": Array(sent)})})
    (node,) = grid.get_node_ids()
    numbers = list(grid.push_messages([Message(content, dst_node_id=node, message_type="query", ttl=60)]))
    while not (answers := list(grid.pull_messages(numbers))):
        time.sleep(0.5)
    assert np.array_equal(answers[0].content["x"]["x"].numpy(), 2 * sent)


@client.query()
def query(message, context):
    twice = Array(2 * message.content["x"]["x"].numpy())
    return Message(RecordDict({"x": ArrayRecord({"x": twice})}), reply_to=message)
""",
}


def until(true, seconds, what):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.2)


def filled_in(lab, port):
    """The shipped file with its marked lines filled in for a lab."""
    certificates, text = lab.folder / "certificates", SHIPPED.read_text()
    for old, new in {
        "127.0.0.1:8000": lab.address,
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "federation.example.org": "localhost",
        "/etc/coterie/server.pem": str(certificates / "server.pem"),
        "/etc/coterie/server.key": str(certificates / "server.key"),
        "/etc/coterie/ca.crt": str(certificates / "ca.crt"),
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def nginx(lab, port, folder):
    """The command line of an nginx in the foreground that needs no rights and writes to its folder only."""
    folder.mkdir()
    (folder / "site.conf").write_text(filled_in(lab, port))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    (folder / "nginx.conf").write_text(
        "daemon off; master_process off; pid nginx.pid; error_log error.log;\nevents {}\n"
        "http {\naccess_log access.log;\n"
        + "".join(f"{kind}_temp_path {kind};\n" for kind in kinds)
        + "include site.conf;\n}\n"
    )
    return [NGINX, "-p", f"{folder}/", "-c", str(folder / "nginx.conf")]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    """A lab whose only node talks to its SuperLink through nginx, and the port of nginx."""
    folder = tmp_path_factory.mktemp("proxied")
    lab = Lab(folder / "lab")
    lab.prepare(1)
    (port,) = free_ports(1)
    with (lab.folder / "home" / "config.toml").open("a") as config:
        root = lab.folder / "certificates" / "ca.crt"
        config.write(f'\n[superlink.proxy]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{root}"\n')
    commands = lab.commands()
    node = [f"127.0.0.1:{port}" if part == lab.address else part for part in commands["site0"]]
    with ExitStack() as stack:

        def start(name, command):
            log = stack.enter_context((lab.folder / "logs" / name).open("wb"))
            process = subprocess.Popen(command, env=lab.environment, stdout=log, stderr=log)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)

        start(LINK, commands[LINK])
        start("nginx", nginx(lab, port, folder / "nginx"))
        until(lambda: listens(lab.settings["ports"][LINK]) and listens(port), 90, "SuperLink and nginx")
        lab.register()
        start("site0", node)
        until(lambda: lab.online() == ["site0"], 90, "a node through nginx")
        yield lab, port


def test_a_node_works_through_the_proxy(proxied, tmp_path):
    lab, _ = proxied
    for name, text in APP.items():
        (tmp_path / name).write_text(text)
    run = lab.flwr("run", str(tmp_path), NAME)
    assert run["success"], run

    def status():
        return lab.flwr("list", NAME, "--run-id", str(run["run-id"]))["runs"][0]["status"]

    until(lambda: status().startswith("finished"), 90, "the run")
    assert status() == "finished:completed"


def test_the_operators_commands_are_refused_through_it(proxied, tmp_path):
    lab, _ = proxied
    make_node_key(tmp_path / "stranger")
    for name, text in APP.items():
        (tmp_path / name).write_text(text)
    register = ("supernode", "register", str(tmp_path / "stranger.pub"))
    for command in (register, ("run", str(tmp_path)), ("list",)):
        told = lab.flwr(*command, "proxy")
        assert not told["success"] and "403" in str(told), told
    assert lab.flwr("list", NAME)["success"] and lab.flwr(*register, NAME)["success"]


OTHERS = [
    ("POST", "/v1/control/start-run"),
    ("POST", "/v1/control/register-node"),
    ("POST", "/v1/runtime/acquire-task"),
    ("POST", "/v1/fleet/register-node"),
    ("GET", "/v1/fleet/pull-messages"),
    ("POST", "/v1/fleet/pull-messages?x"),
    ("POST", "/v1/fleet/pull-messages/"),
    ("POST", "/v1/fleet/../control/start-run"),
    ("POST", "/v1/fleet/%2e%2e/control/start-run"),
    ("POST", "/v1/control/../fleet/pull-messages"),
    ("POST", "//v1/fleet/pull-messages"),
    ("GET", "/health"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
]


def test_nothing_else_passes(proxied):
    lab, port = proxied
    trust = ssl.create_default_context(cafile=str(lab.folder / "certificates" / "ca.crt"))

    def status(method, path):
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=10)
        connection.request(method, path)
        answer = connection.getresponse().status
        connection.close()
        return answer

    assert {request: status(*request) for request in OTHERS} == dict.fromkeys(OTHERS, 403)
    assert status("POST", "/v1/fleet/pull-messages") != 403  # the SuperLink refuses this one: it is not signed
