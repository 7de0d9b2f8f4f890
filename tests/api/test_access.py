"""Who may ask what: keys over the whole route table, hosts, browsers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from api.scripted import ScriptedEngine, request_bytes, serving

from headrace.sched.messages import Overloaded
from headrace.server.access import Access, is_loopback
from headrace.server.app import ROUTES, build_app

KEY = {"Authorization": "Bearer user-key"}
ADMIN = {"Authorization": "Bearer admin-key"}
HI = {"messages": [{"role": "user", "content": "hi"}]}


def paths() -> list[tuple[str, str, Access]]:
    """Every method and path of the route table; a stream that does not end by itself is asked for its head."""
    return [
        ("HEAD" if path == "/cache/events" else method, path.replace("{model:.+}", "tiny"), route.access)
        for route in ROUTES
        for path in route.paths.split()
        for method in route.methods.split()
    ]


async def test_without_the_key_every_route_but_the_probes_is_closed() -> None:
    async with serving(ScriptedEngine(), api_keys=("user-key",)) as served:
        registered = {resource.canonical for resource in build_app(served.api).router.resources()}
        listed = {path for route in ROUTES for path in route.paths.split()}
        assert registered == {path.replace("{model:.+}", "{model}") for path in listed}
        for method, path, access in paths():
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
                status, _, _ = await served.ask(method, path, HI if method == "POST" else None, headers)
                assert (status == 401) == (access is not Access.OPEN), (method, path, headers)


async def test_paths_that_do_not_exist_are_closed_too() -> None:
    async with serving(ScriptedEngine(), api_keys=("user-key",)) as served:
        assert (await served.ask("GET", "/nothing"))[0] == 401
        assert (await served.ask("GET", "/nothing", headers=KEY))[0] == 404


async def test_with_the_key_every_route_is_open() -> None:
    async with serving(ScriptedEngine(), api_keys=("user-key",)) as served:
        for method, path, _ in paths():
            status, _, _ = await served.ask(method, path, HI if method == "POST" else None, KEY)
            assert status != 401, (method, path)


async def test_an_admin_key_keeps_users_from_changing_the_server() -> None:
    async with serving(ScriptedEngine(), api_keys=("user-key",), admin_api_key="admin-key") as served:
        for method, path, access in paths():
            body = HI if method == "POST" else None
            user, _, _ = await served.ask(method, path, body, KEY)
            admin, _, _ = await served.ask(method, path, body, ADMIN)
            assert (user == 401) == (access is Access.ADMIN), (method, path)
            assert admin != 401, (method, path)
        assert (await served.ask("POST", "/abort_request", {"abort_all": True}, KEY))[0] == 401
        assert (await served.ask("POST", "/abort_request", {"abort_all": True}, ADMIN))[0] == 200


async def test_an_admin_key_alone_leaves_the_rest_open() -> None:
    async with serving(ScriptedEngine(), admin_api_key="admin-key") as served:
        assert (await served.ask("POST", "/v1/chat/completions", HI))[0] == 200
        assert (await served.ask("POST", "/flush_cache"))[0] == 401


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Basic abc", "Bearer none"])
async def test_without_keys_any_authorization_passes(header: str) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, _ = await served.ask("POST", "/v1/chat/completions", HI, {"Authorization": header})
    assert status == 200


async def test_several_keys_have_caches_of_their_own() -> None:
    async with serving(ScriptedEngine(), api_keys=("key-one", "key-two")) as served:
        for key in ("key-one", "key-two", "key-one"):
            await served.ask("POST", "/v1/chat/completions", HI, {"Authorization": f"Bearer {key}"})
        one, two, again = (submit.cache_salt for submit in served.engine.submits)
    assert one == again != two and "key" not in one


async def test_with_one_key_the_cache_is_shared() -> None:
    async with serving(ScriptedEngine(), api_keys=("user-key",)) as served:
        await served.ask("POST", "/v1/chat/completions", HI, KEY)
        assert served.engine.submits[0].cache_salt == ""


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:30000", 200),
        ("localhost:8080", 200),
        ("[::1]:30000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:30000", 403),
        ("192.168.1.5:30000", 403),
        ("[2001:db8::1]:30000", 403),
    ],
)
async def test_a_server_on_loopback_answers_only_to_its_own_names(host: str, status: int) -> None:
    async with serving(ScriptedEngine()) as served:
        assert (await served.ask("GET", "/v1/models", headers={"Host": host}))[0] == status


async def test_a_server_for_others_answers_to_any_name() -> None:
    async with serving(ScriptedEngine(), host="0.0.0.0") as served:
        assert (await served.ask("GET", "/v1/models", headers={"Host": "gpu.example"}))[0] == 200


async def test_a_page_of_another_site_changes_nothing() -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, _ = await served.ask("GET", "/flush_cache", headers={"Sec-Fetch-Site": "cross-site"})
        assert status == 403 and served.engine.flushes == 0


@pytest.mark.parametrize(("host", "loopback"), [("::1", True), ("127.3.4.5", True), ("0.0.0.0", False), ("::", False)])
def test_loopback_is_known_by_its_address(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


async def test_the_access_log_has_a_line_a_request_and_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "headrace")
    async with serving(ScriptedEngine(), api_keys=("user-key",)) as served:
        headers = {**KEY, "X-Request-ID": "abc"}
        await served.raw(request_bytes("GET", "/v1/models?key=hidden%0a&x", headers=headers))
        await served.raw(request_bytes("GET", "/no%0Athing%1b[31m", headers=headers))
    lines = [record.getMessage() for record in caplog.records if record.name == "headrace.http"]
    assert len(lines) == 2
    assert lines[0].startswith("GET /v1/models 200 ") and lines[0].endswith("id=abc")
    assert "\\n" in lines[1] and "\n" not in lines[1] and "\x1b" not in lines[1]
    everything = caplog.text
    assert "user-key" not in everything and "hidden" not in everything


async def test_errors_of_the_server_are_logged_as_warnings(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(ScriptedEngine(refuse=Overloaded("full\nforged line", 1))) as served:
        await served.ask("POST", "/v1/chat/completions", HI)
    records: list[Any] = [record for record in caplog.records if record.name == "headrace.http"]
    assert [record.levelname for record in records] == ["WARNING"]
    assert "\n" not in records[0].getMessage()
