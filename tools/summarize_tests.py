"""Counts test cases: prints the slowest, what failed, then "N passed, N failed" as the last line. Exits 1 on failure or on no
test.

Usage: summarize_tests.py FOLDER, which holds Bazel's build events (events.json) and one line "passed NAME" or
"failed NAME" per script (scripts).
"""

import collections
import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree as xml


SLOWEST = 10  # so many are named

seconds = {}  # of each case, by name


def cases_of(path):
    """Yields (outcome, name) for each case of a test.xml."""
    for case in xml.parse(path).iter("testcase"):
        name = ".".join(part for part in (case.get("classname"), case.get("name")) if part)
        seconds[name] = float(case.get("time") or 0)
        if case.find("failure") is not None or case.find("error") is not None:
            yield "failed", name
        elif case.find("skipped") is not None:
            yield "skipped", name
        elif case.get("status") != "notrun":
            yield "passed", name


def outcomes_of_test(label, result):
    """Yields (outcome, name) for each case of one test program; a program that failed has at least one failed case."""
    outcomes = []
    for output in result.get("testActionOutput", []):
        if output["name"] == "test.xml":
            path = urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
            try:
                outcomes += cases_of(path)
            except (OSError, xml.ParseError):
                pass  # the program died while it wrote; its status counts below
    if result["status"] not in ("PASSED", "FLAKY") and all(outcome != "failed" for outcome, _ in outcomes):
        outcomes.append(("failed", result["status"].lower()))
    return [(outcome, f"{label} {name}") for outcome, name in outcomes]


def bazel_outcomes(path):
    """Yields (outcome, name) for everything that Bazel built and ran."""
    if not path.exists():
        yield "failed", "bazel did not start"
        return
    end = "no end"
    failures = 0
    for line in path.read_text().splitlines():
        event = json.loads(line)
        kind = event["id"]
        if "testResult" in kind and "testResult" in event:
            outcomes = outcomes_of_test(kind["testResult"]["label"], event["testResult"])
            failures += any(outcome == "failed" for outcome, _ in outcomes)
            yield from outcomes
        elif "targetCompleted" in kind and not event.get("completed", {}).get("success"):
            failures += 1
            yield "failed", f"{kind['targetCompleted']['label']} does not build"
        elif "finished" in event:
            end = event["finished"].get("exitCode", {}).get("name", end)
    if end != "SUCCESS" and not failures:
        yield "failed", f"bazel: {end}"


def script_outcomes(path):
    """Yields (outcome, name) for each script that ran."""
    if path.exists():
        for line in path.read_text().splitlines():
            yield line.split(" ", 1)


def main():
    folder = pathlib.Path(sys.argv[1])
    outcomes = [*bazel_outcomes(folder / "events.json"), *script_outcomes(folder / "scripts")]
    for name in sorted(seconds, key=seconds.get, reverse=True)[:SLOWEST]:
        print(f"{seconds[name]:7.1f} s  {name}")
    count = collections.Counter(outcome for outcome, _ in outcomes)
    for outcome, name in outcomes:
        if outcome == "failed":
            print(f"FAILED {name}")
    if not count["passed"] and not count["failed"]:
        print("FAILED no test ran")
        count["failed"] = 1
    skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
    print(f"{count['passed']} passed, {count['failed']} failed{skipped}")
    sys.exit(1 if count["failed"] else 0)


main()
