"""Scenario of OpenTelemetry: spans of vLLM and of lmc's server, at one collector."""

import base64
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from checks import check
from harness import TOKENS, Server, VllmServe, ask, eventually

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# What the caller of a request sends with it, where it records a trace.
CONTEXT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}


class Collector(BaseHTTPRequestHandler):
    """Reads messages as OpenTelemetry's definitions have them, in protobuf and in JSON."""

    spans = []
    faults = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            self.take(body)
        except Exception as error:  # Whatever is wrong with it.
            Collector.faults.append(f"{self.path}: {error!r}")
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def take(self, body):
        from google.protobuf import json_format
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        message = trace_service_pb2.ExportTraceServiceRequest()
        if self.headers["Content-Type"] == "application/json":
            # Ids are hexadecimal there, and bytes of protobuf's JSON are in base 64.
            json_format.ParseDict(with_bytes(json.loads(body)), message)
        else:
            message.ParseFromString(body)
        for of_process in message.resource_spans:
            for of_part in of_process.scope_spans:
                Collector.spans += of_part.spans

    def log_message(self, *_):
        pass


def with_bytes(value):
    """A message whose ids are in base 64."""
    if isinstance(value, list):
        return [with_bytes(one) for one in value]
    if not isinstance(value, dict):
        return value
    ids = ("traceId", "spanId", "parentSpanId")
    return {key: base64.b64encode(bytes.fromhex(one)).decode() if key in ids else with_bytes(one)
            for key, one in value.items()}


def spans(run):
    """vLLM, with lmc's own connector, and lmc's server send a collector the spans of a request, all of
    them in its caller's trace."""
    if run.args.peer or not run.args.package:
        return
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{collector.server_port}"
    server = Server(run.args, "--otlp-endpoint", url)
    server.start()
    env = dict(os.environ, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf")
    flags = [*TOKENS, "--kv-transfer-config", server.own_transfer_config(),
             "--otlp-traces-endpoint", f"{url}/v1/traces"]
    try:
        with VllmServe(run.model, *flags, paths=[run.args.package], env=env) as vllm:
            vllm.ready()
            for names in ({"lmc.lookup", "lmc.store"}, {"lmc.retrieve", "llm_request"}):
                check("spans: ids are those without a connector",
                      ask(run, vllm, CONTEXT) == run.plain["float32", 2][2])
                # What is stored is found by the next.
                found = eventually(lambda names=names: names <= {span.name for span in traced()})
                check(f"spans: {', '.join(sorted(names))} are in the caller's trace", found,
                      str(sorted({span.name for span in Collector.spans})))
        for span in traced():
            if span.name.startswith("lmc."):
                check(f"spans: {span.name} is below the caller's span",
                      span.parent_span_id.hex() == CALLER
                      and 0 < span.start_time_unix_nano <= span.end_time_unix_nano, str(span))
        check("spans: each message is one of OpenTelemetry's", not Collector.faults,
              str(Collector.faults))
        server.stop()
    finally:
        collector.shutdown()
        collector.server_close()


def traced():
    return [span for span in Collector.spans if span.trace_id.hex() == TRACE]

