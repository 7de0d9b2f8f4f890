"""`/metrics`: what requests waited for, seen from HTTP, and the engine's counters as they stand at the scrape.

in     observations of emit and of the HTTP layer; the engine's status when scraped
out    Prometheus text, format 0.0.4
state  an own registry: histograms and counters; nothing of the engine's is copied between scrapes
owner  emit and the middleware add, on the loop
ready  at once
end    with the process; counters start anew with it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.sched.messages import EngineStatus

# OpenMetrics would spell the names' colon as an underscore: a dashboard would see other names than a person with curl.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60, 120)
_BETWEEN_TOKENS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 2, 5)
_WHOLE_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480)

_LAG_S: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5)

_COUNTERS: Final = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that began to run."),
    ("cached_prompt_tokens", "cached_tokens", "Prompt tokens whose KV was reused."),
    ("cached_host_prompt_tokens", "cached_host_tokens", "Of these, tokens that only the host tier had."),
    ("cached_storage_prompt_tokens", "cached_storage_tokens", "Of these, tokens that were prefetched from storage."),
    ("computed_prompt_tokens", "computed_tokens", "Prompt tokens run through the model, recomputation included."),
    ("generation_tokens", "output_tokens", "Tokens given to requests."),
    ("overrun_tokens", "overrun_tokens", "Tokens computed past a request's end and dropped."),
    ("steps", "steps", "Steps of the engine."),
    ("step_failures", "step_failures", "Steps that failed on the device."),
    ("retractions", "retractions", "Requests taken out of the batch to make room."),
    ("device_restarts", "device_restarts", "Restarts of the device worker."),
    ("host_copied_pages", "copied_pages", "Pages copied from the device to the host."),
    ("host_skipped_pages", "skipped_pages", "Copies to the host not made for lack of room."),
    ("storage_written_pages", "stored_pages", "Pages that storage has acknowledged."),
    ("storage_unwritten_pages", "unstored_pages", "Pages that storage did not take, given up."),
    ("storage_restarts", "storage_restarts", "Restarts of the storage agent."),
    ("storage_deadlines_missed", "storage_deadlines_missed", "Times that storage was too slow, or silent."),
    ("prefetch_useful_bytes", "prefetch_useful_bytes", "Prefetched before their request went on, and used by it."),
    ("prefetch_late_bytes", "prefetch_late_bytes", "Prefetched, but after their request had gone on."),
    ("prefetch_wasted_bytes", "prefetch_wasted_bytes", "Read from storage, and not used."),
    ("prefetch_cancelled_bytes", "prefetch_cancelled_bytes", "Found in storage, and not read: nobody waited any more."),
    ("prefetch_declined_bytes", "prefetch_declined_bytes", "Found in storage, and not read: the host had no room."),
    ("prefill_saved_milliseconds", "saved_ms", "Estimated time that computing the reused tokens would have taken."),
    ("integrity_alarms", "integrity_alarms", "Checks of the cache that found a fault."),
    ("late_masks", "late_masks", "Rows computed once more because their grammar's mask was late."),
    ("grammar_worker_restarts", "grammar_worker_restarts", "Restarts of the grammar worker."),
)
_GAUGES: Final = (
    ("num_requests_running", "running", "Requests in the running batch."),
    ("num_requests_waiting", "waiting", "Requests that wait to run."),
    ("waiting_tokens", "waiting_tokens", "Prompt tokens of waiting requests."),
    ("kv_pages", "pages_total", "Pages of the device's KV pool."),
    ("kv_pages_free", "pages_free", "Pages that nobody holds."),
    ("host_pages", "host_pages_total", "Pages of the host tier."),
    ("host_pages_free", "host_pages_free", "Pages of the host tier that hold nothing."),
    ("host_pages_cached", "host_pages_cached", "Pages of the host tier that can be matched."),
    ("storage_put_off_pages", "put_off_pages", "Pages to write when storage is usable and has nothing else to write."),
    ("kv_pages_cached", "pages_cached", "Pages that only the prefix index holds."),
)
# Of each window group, by the tokens of its window.
_WINDOW_GAUGES: Final = (
    ("window_pages", "pages_total", "Device pages of layers with a window."),
    ("window_pages_free", "pages_free", "Of these, pages that nobody holds."),
    ("window_pages_cached", "pages_cached", "Of these, pages that only the prefix index holds."),
    ("window_pages_claimed", "pages_claimed", "Of these, pages that running requests may need at once."),
    ("window_host_pages", "host_pages_total", "Pages of the host tier for layers with a window."),
    ("window_host_pages_cached", "host_pages_cached", "Of these, pages that can be matched."),
    ("window_saved_bytes", "saved_bytes", "Device memory that pages for all tokens would take more."),
)
_WINDOW_COUNTERS: Final = (
    ("window_copied_pages", "copied_pages", "Pages of layers with a window copied from the device to the host."),
    ("window_short_matches", "short_matches", "Requests that could reuse less than other layers had."),
)


class _EngineCollector(Collector):
    """Reads the engine's status when somebody scrapes."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, field, text in _COUNTERS:
            yield CounterMetricFamily(f"headrace:{name}", text, value=getattr(status, field))
        for name, field, text in _GAUGES:
            yield GaugeMetricFamily(f"headrace:{name}", text, value=getattr(status, field))
        for family, table in ((CounterMetricFamily, _WINDOW_COUNTERS), (GaugeMetricFamily, _WINDOW_GAUGES)):
            for name, field, text in table:
                metric = family(f"headrace:{name}", text, labels=["window_tokens"])
                for group in status.window_groups:
                    metric.add_metric([str(group.window_tokens)], getattr(group, field))
                yield metric
        by_tier = {"host": status.cached_host_tokens, "storage": status.cached_storage_tokens}
        by_tier["device"] = status.cached_tokens - sum(by_tier.values())
        cached = CounterMetricFamily("headrace:cached_bytes", "KV that was reused, by its tier.", labels=["tier"])
        for tier, tokens in by_tier.items():
            cached.add_metric([tier], tokens // max(status.page_tokens, 1) * status.page_bytes)
        yield cached
        about = "Time that requests waited until their first token, by cause; together it is all of that time."
        waited = CounterMetricFamily("headrace:first_token_wait_milliseconds", about, labels=["cause"])
        for cause, waited_ms in status.waited_ms.items():
            waited.add_metric([cause], waited_ms)
        yield waited
        pages = max(status.pages_total, 1)
        used = status.pages_total - status.pages_free - status.pages_cached
        yield GaugeMetricFamily("headrace:kv_usage_ratio", "Share of pages that requests hold.", value=used / pages)
        age_s = status.last_step_age_ms / 1000
        about = "Time since the device last answered, while it has steps to do: a hang shows here. 0 while idle."
        yield GaugeMetricFamily("headrace:last_step_age_seconds", about, value=age_s)
        yield GaugeMetricFamily("headrace:ready", "1 while requests are served.", value=float(status.phase == "ready"))

    def describe(self) -> Iterator[Metric]:
        # Without this the registry would collect once to learn the names, before the engine has a status.
        return iter(())


class Metrics:
    """The server's own observations, and the registry that is scraped."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        registry = CollectorRegistry()
        registry.register(_EngineCollector(status))
        self._registry = registry
        self._first_token = Histogram(
            "headrace:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            registry=registry,
            buckets=_FIRST_TOKEN_S,
        )
        self._between_tokens = Histogram(
            "headrace:inter_token_latency_seconds",
            "Between a choice's tokens.",
            registry=registry,
            buckets=_BETWEEN_TOKENS_S,
        )
        self._whole = Histogram(
            "headrace:e2e_request_latency_seconds",
            "From a request's arrival to a choice's end.",
            registry=registry,
            buckets=_WHOLE_S,
        )
        self._queue = Histogram(
            "headrace:request_queue_time_seconds",
            "From submission to the launch of the first chunk.",
            registry=registry,
            buckets=_FIRST_TOKEN_S,
        )
        self._finished = Counter(
            "headrace:request_finished", "Choices that ended, by reason.", ["finished_reason"], registry=registry
        )
        self._http = Counter(
            "headrace:http_requests", "HTTP answers, by endpoint and status.", ["endpoint", "status"], registry=registry
        )
        self._slow_readers = Counter(
            "headrace:slow_reader_aborts", "Streams ended because their client did not read.", registry=registry
        )
        self._lag = Histogram(
            "headrace:loop_lag_seconds",
            "How late the event loop's clock tick came: how long something held the loop.",
            registry=registry,
            buckets=_LAG_S,
        )
        self._collections = Histogram(
            "headrace:gc_pause_seconds",
            "Garbage collections, by generation.",
            ["generation"],
            registry=registry,
            buckets=_LAG_S,
        )
        self._longest_lag_s = 0.0
        Gauge(
            "headrace:loop_lag_max_seconds",
            "The longest lag since the last scrape.",
            registry=registry,
        ).set_function(self._take_longest_lag)
        self.in_flight = Gauge("headrace:http_requests_in_flight", "HTTP requests being answered.", registry=registry)

    def first_token(self, waited_s: float) -> None:
        self._first_token.observe(waited_s)

    def next_tokens(self, gap_s: float) -> None:
        self._between_tokens.observe(gap_s)

    def queued(self, waited_s: float) -> None:
        self._queue.observe(waited_s)

    def finished(self, reason: str, lasted_s: float) -> None:
        self._finished.labels(reason).inc()
        self._whole.observe(lasted_s)

    def answered(self, endpoint: str, status: int) -> None:
        """`endpoint` is a route of the table, never a path that a client made up: labels stay few."""
        self._http.labels(endpoint, str(status)).inc()

    def slow_reader(self) -> None:
        self._slow_readers.inc()

    def lag(self, late_s: float) -> None:
        self._lag.observe(late_s)
        self._longest_lag_s = max(self._longest_lag_s, late_s)

    def collected(self, generation: int, took_s: float) -> None:
        self._collections.labels(str(generation)).observe(took_s)

    def _take_longest_lag(self) -> float:
        longest_s, self._longest_lag_s = self._longest_lag_s, 0.0
        return longest_s

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
