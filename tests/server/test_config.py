"""Settings: what is allowed, what is refused with which words, what the environment adds, what logs may show."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from headrace.sched import policies
from headrace.server.config import RULES, BadSetting, SchedulePolicy, Settings, flag_of, settings_from
from headrace.server.flags import MANUAL


def refusal(flags: Mapping[str, str | bool], environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(BadSetting) as caught:
        settings_from(flags, environ or {})
    return str(caught.value)


def test_defaults_are_valid_and_stay_on_this_machine() -> None:
    settings = settings_from({}, {})
    assert (settings.host, settings.port, settings.model_name) == ("127.0.0.1", 30000, "smollm2-135m-instruct")
    assert not settings.exposed
    assert settings.warnings() == []


def test_every_field_has_a_rule_and_a_place_in_the_manual() -> None:
    fields = {field.name for field in msgspec.structs.fields(Settings)} - {"cache"}
    assert set(RULES) == fields
    assert sorted(flag.field for group in MANUAL.values() for flag in group) == sorted(fields)


def test_text_from_the_command_line_becomes_numbers() -> None:
    settings = settings_from({"port": "0", "mem_fraction_static": "0.5", "disable_radix_cache": True}, {})
    assert (settings.port, settings.mem_fraction_static, settings.disable_radix_cache) == (0, 0.5, True)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("port", "65536", "from 0 to 65535"),
        ("port", "-1", "from 0 to 65535"),
        ("port", "http", "a whole number"),
        ("port", "", "a whole number"),
        ("dtype", "half", "auto, float32 or bfloat16"),
        ("mem_fraction_static", "1", "above 0 and below 1"),
        ("mem_fraction_static", "nan", "above 0 and below 1"),
        ("page_size", "12", "a power of two from 1 to 256"),
        ("chunked_prefill_size", "0", "or -1"),
        ("request_timeout_s", "inf", "from 0 to 1e+06"),
        ("drain_timeout_s", "-0.5", "from 0 to 3600"),
        ("host", "http://0.0.0.0", "an address or a host name alone"),
        ("served_model_name", "a\nb", "a name"),
        ("model_path", "", "`headrace models list`"),
        ("quantization", "awq", "none or q8"),
        ("schedule_policy", "priority", "least-work, fcfs, lpm, dfs-weight, lof, random or hrrn"),
        ("target_itl_ms", "0", "ms from 1 to 10000"),
        ("priority_scheduling_preemption_threshold", "-1", "a whole number from 0"),
        ("max_running_requests", "0", "from 1 to 1024"),
    ],
)
def test_a_wrong_value_is_refused_with_the_flag_the_value_and_what_is_allowed(
    field: str, value: str, allowed: str
) -> None:
    message = refusal({field: value})
    assert message.startswith(f"{flag_of(field)} {value}" if value else f'{flag_of(field)} ""')
    assert allowed in message


@pytest.mark.parametrize("field", ["port", "max_running_requests", "page_size"])
def test_a_bool_is_not_a_number(field: str) -> None:
    values: dict[str, Any] = {field: True}
    with pytest.raises(BadSetting, match=flag_of(field)):
        Settings(**values)


def test_a_context_larger_than_the_cache_is_refused_before_anything_is_loaded() -> None:
    message = refusal({"context_length": "4096", "max_total_tokens": "2048"})
    assert "--max-total-tokens 4096 or more" in message
    assert "--context-length 2048 or less" in message


def test_a_queue_too_short_for_one_prompt_is_refused() -> None:
    assert "--max-queued-tokens 4096 or more" in refusal({"context_length": "4096", "max_queued_tokens": "100"})


def test_a_target_for_the_gap_needs_the_measurements_of_the_warm_up() -> None:
    assert "leave out --skip-server-warmup" in refusal({"target_itl_ms": "50", "skip_server_warmup": True})


def test_a_missing_chat_template_is_named() -> None:
    assert "/no/such.jinja: there is no such file" in refusal({"chat_template": "/no/such.jinja"})


def test_a_huge_chat_template_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "weights.jinja"
    template.write_bytes(b" " * ((1 << 20) + 1))
    assert "Is this the right file?" in refusal({"chat_template": str(template)})


def test_a_refused_key_is_not_shown() -> None:
    message = refusal({"api_key": "short"})
    assert "short" not in message.replace("--api-key", "")
    assert "8 to 512 printable ASCII characters" in message


def test_the_admin_key_must_differ_from_the_users_key() -> None:
    assert "--admin-api-key is the same" in refusal({"api_key": "a" * 16, "admin_api_key": "a" * 16})


def test_keys_come_from_the_environment_and_a_flag_wins() -> None:
    environ = {"HEADRACE_API_KEY": "from-the-environment", "HEADRACE_ADMIN_API_KEY": "another-of-these"}
    settings = settings_from({"api_key": "from-the-flags"}, environ)
    assert (settings.api_key, settings.admin_api_key) == ("from-the-flags", "another-of-these")


def test_the_cache_folder_comes_from_the_environment(tmp_path: Path) -> None:
    assert settings_from({}, {"HEADRACE_CACHE": str(tmp_path)}).cache == tmp_path


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "server.example"])
def test_an_exposed_server_without_a_key_is_warned_of(host: str) -> None:
    settings = settings_from({"host": host}, {})
    assert settings.exposed
    assert "--api-key" in settings.warnings()[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_a_loopback_address_is_not_exposed(host: str) -> None:
    assert not settings_from({"host": host}, {}).exposed


def test_an_exposed_server_with_a_key_needs_no_warning() -> None:
    assert settings_from({"host": "0.0.0.0", "api_key": "k" * 20}, {}).warnings() == []


def test_keys_never_appear_in_logs_or_server_info() -> None:
    settings = settings_from({"api_key": "sesame-sesame", "admin_api_key": "open-sesame"}, {})
    assert "sesame" not in repr(settings)
    assert "sesame" not in str(settings.public())
    assert settings.public()["api_key"] == "(set)"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"model_path": "/models/Tiny.Q8_0.gguf"}, "Tiny.Q8_0"),
        ({"model_path": "./tiny.gguf", "served_model_name": "mine"}, "mine"),
        ({}, "smollm2-135m-instruct"),
    ],
)
def test_the_model_is_called_by_its_served_name_else_by_its_own(flags: dict[str, str], name: str) -> None:
    assert settings_from(flags, {}).model_name == name


def test_priorities_preempt_only_where_they_are_switched_on() -> None:
    assert Settings().preempt_above is None
    assert Settings(enable_priority_scheduling=True).preempt_above == 10
    assert Settings(enable_priority_scheduling=True, disable_priority_preemption=True).preempt_above is None


def test_a_switch_that_does_nothing_alone_is_warned_of() -> None:
    (warning,) = Settings(schedule_low_priority_values_first=True).warnings()
    assert warning.startswith("--schedule-low-priority-values-first does nothing without --enable-priority-scheduling")


def test_policies_of_the_flag_are_those_of_the_scheduler() -> None:
    assert set(get_args(SchedulePolicy)) == set(get_args(policies.SchedulePolicy))
