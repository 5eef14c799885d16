"""Applies mutations one by one and runs the tests that they name. See tools/mutations."""

import argparse
import pathlib
import random
import re
import signal
import subprocess
import sys

FOLDER = pathlib.Path("tests/mutations")
TIME_LIMIT = 300  # seconds; a test that hangs has noticed


class Mutation:
    def __init__(self, path):
        self.path = path
        self.name = str(path.relative_to(FOLDER).with_suffix(""))
        head = path.read_text().split("\n\n", 1)[0]
        self.what, self.target, self.test = (
            self._field(head, field) for field in ("What", "Target", "Test")
        )

    def _field(self, head, field):
        found = re.search(rf"^{field}: (.+)$", head, re.MULTILINE)
        if not found:
            raise SystemExit(f"{self.path}: the line '{field}: ...' is missing")
        return found.group(1)

    def folders(self):
        """The names of the folders whose sources it changes."""
        sources = re.findall(r"^--- a/(.+)$", self.path.read_text(), flags=re.MULTILINE)
        return sorted({pathlib.Path(source).parent.name for source in sources})

    def fits(self):
        """Whether every hunk's old lines are in the file. (One `git apply --check` each takes minutes for all.)"""
        for diff in re.split(r"^--- a/", self.path.read_text(), flags=re.MULTILINE)[1:]:
            source = pathlib.Path(diff.split("\n", 1)[0])
            if not source.exists():
                return False
            text = source.read_text()
            for hunk in re.split(r"^@@ .*$\n", diff, flags=re.MULTILINE)[1:]:
                old = "".join(line[1:] + "\n" for line in hunk.splitlines() if line[:1] in (" ", "-"))
                if old not in text:
                    return False
        return True

    def apply(self, *options):
        return subprocess.run(["git", "apply", *options, str(self.path)]).returncode == 0


def build(mutation):
    quiet = ["--noshow_progress", "--ui_event_filters=-info", "--show_result=0"]
    # What is left out may leave something unused. Sources of a folder are compiled as one (tools/build/fsdp_cc.bzl).
    lenient = [f"--per_file_copt=_sources/(.*/)?{folder}[.]cc$@-Wno-error" for folder in mutation.folders()]
    command = ["bazel", "build", *quiet, *lenient, f"//tests:{mutation.target}"]
    return subprocess.run(command).returncode == 0


def run(mutation):
    """What the test says of the program as it is: 'fails', 'passes', or why that is not known."""
    program = f"tests/{mutation.target}"
    try:
        done = subprocess.run(
            [program, f"--gtest_filter={mutation.test}"],
            cwd=f"bazel-bin/{program}.runfiles/fully_shard",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return "fails"
    if b"[ RUN      ]" not in done.stdout:
        return f"no test is named {mutation.test}"
    return "passes" if done.returncode == 0 else "fails"


def try_one(mutation):
    """'caught' where the test notices; else why it did not, or was not asked."""
    if not mutation.apply():
        return "does not apply"
    try:
        if not build(mutation):
            return "does not build"
        said = run(mutation)
    finally:
        mutation.apply("--reverse")
    return "caught" if said == "fails" else said


def chosen(arguments):
    every = [Mutation(path) for path in sorted(FOLDER.rglob("*.patch"))]
    if arguments.part:
        part, parts = map(int, arguments.part.split("/"))
        return every[part - 1 :: parts]
    if arguments.sample:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True)
        return random.Random(commit).sample(every, arguments.sample)
    if not arguments.names:
        return every
    known = {mutation.name: mutation for mutation in every}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        raise SystemExit(f"no such mutation: {', '.join(unknown)}")
    return [known[name] for name in arguments.names]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    mutations = chosen(arguments)
    if arguments.check:
        stale = [str(mutation.path) for mutation in mutations if not mutation.fits()]
        sys.exit("\n".join(["these mutations no longer apply:", *stale]) if stale else 0)
    if subprocess.run(["git", "diff", "--quiet", "HEAD"]).returncode != 0:
        raise SystemExit("the tree has changes: commit or stash them first")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a mutation is taken back
    caught = 0
    for mutation in mutations:
        said = try_one(mutation)
        caught += said == "caught"
        print(f"{said}: {mutation.name}: {mutation.what} ({mutation.test})", flush=True)
    print(f"{caught} caught, {len(mutations) - caught} not")
    sys.exit(caught != len(mutations))


if __name__ == "__main__":
    main()
