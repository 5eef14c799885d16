"""Breaks the library at drawn places and looks whether tests notice. See tools/mutations."""

import argparse
import datetime
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time

import mutants

LAYERS = [*pathlib.Path(__file__).with_name("layers").read_text().split(), "fake_device", "programs"]
SURVIVORS = pathlib.Path("tests/mutation_survivors.txt")
HANGS = 150  # seconds; a test that takes longer has noticed
TIME_AT_A_LANDING = 120  # seconds for the tests of one mutant
OBJECTS_AT_A_LANDING = 4  # that may have to be compiled for one mutant: what many folders include is drawn at night

# The program that has the tests of a folder: that of the longest name which the folder begins with.
PROGRAMS = {
    "tests/checkpoint": "checkpoint_test",
    "tests/deferred_init": "on_demand_test",
    "tests/device_mesh": "device_mesh_test",
    "tests/dtensor": "dtensor_test",
    "tests/experts": "experts_test",
    "tests/programs": "trainer_test",
    "tests/programs/planner": "planning_test",
    "tests/programs/trainer/page": "run_report_test",
    "tests/fake_device": "planning_test",
    "tests/fully_shard": "fully_shard_test",
    "tests/fully_shard/protocol": "shard_versions_test",
    "tests/on_accelerator": "on_accelerator_test",
    "tests/on_demand": "on_demand_test",
    "tests/optim": "optim_test",
    "tests/tensor_parallel": "tensor_parallel_test",
}

# Test suites that see what the rooms of a layer do. Those of its own tests are asked after the room's and before all others,
# those of other layers last.
ALSO_SEE = {
    "checkpoint": "PackedCheckpoint StagesCheckpoint",
    "deferred_init": "DeferredModels DeferredInit DeferredMemory DeferredTensorParallel",
    "device_mesh": "CustomCollectives CustomCollectivesBetweenRanks SixteenBitGradients TransportErrors Errors HybridMesh "
    "MeshOnAccelerator",
    "dtensor": "WritesBesideEntries ImplicitReplicationOfEntries ShardedEntries ShardedDropout TensorParallelReplicated",
    "fake_device": "PlannedStep PolicySearch",
    "fully_shard": "Training GradientSyncEffects PrefetchEffects ScopeEffects HybridSharding FullParams StaleCopies "
    "FreezingEffects MixedPrecision RecursionEffects AutoShard AbortedBackward InterruptedBackward Owing "
    "ReshardToWorld StartValues InPlace ShardWriteOperators MemberWrites UnusedParams ExplicitUnshardEffects "
    "ReshardAfterForwardEffects ReshardAfterBackwardEffects SummonDetails UnlikeRanks BufferDtype "
    "FullPrecision Autograd ParameterOrder CountersOfSteps Hooks Offloaded EntriesAsLeaves LateParameters "
    "GradientsOfRanks MistakesOfRanks StreamPrograms HostExchange Launches OffloadedShards",
    "on_demand": "BufferDtype DeferredInit DTensorGradients MixedPrecision DeferredTensorParallel FailedBackward",
}


class Tests:
    """Which suites there are, and in which files."""

    def __init__(self):
        self.suites = {}  # of each file of tests
        self.includes = {}  # of each file of the library and of tests
        tracked = subprocess.check_output(["git", "ls-files", *(f"{layer}/*" for layer in [*LAYERS, "tests"])], text=True)
        for file in map(pathlib.Path, tracked.split()):
            if file.suffix not in (".cc", ".h") or not file.exists():
                continue
            text = file.read_text()
            self.includes[file] = {pathlib.Path(each) for each in re.findall(r'^#include "(.+)"', text, re.MULTILINE)}
            if program_of(file):
                self.suites[file] = set(re.findall(r"^TEST(?:_F|_P)?\((\w+),", text, re.MULTILINE))

    def asked(self, file):
        """(program, suites) in the order in which they are asked what they say of a change of `file`."""
        layer, room, own = file.parts[0], file.parent, file.with_suffix(".h")
        beside = [each for each in self.suites if each.is_relative_to(f"tests/{layer}")]
        also = set(ALSO_SEE.get(layer, "").split())
        by_nearness = [
            {test: self.suites[test] for test in beside if test.stem == f"{file.stem}_test" or own in self.includes[test]},
            {test: self.suites[test] for test in beside if test.parent == "tests" / room},
            {test: self.suites[test] & also for test in beside},
            {test: self.suites[test] for test in beside},
            {test: suites & also for test, suites in self.suites.items()},
        ]
        done = set()
        for files in by_nearness:
            of_program = {}
            for test in files:
                of_program.setdefault(program_of(test), set()).update(files[test] - done)
            for program, suites in sorted(of_program.items(), key=lambda item: item[0] != program_of("tests" / room / "x")):
                done |= suites
                if suites:
                    yield program, sorted(suites)

    def objects(self, file):
        """The folders of what is compiled anew when `file` changes, since the files of each are compiled as one."""
        met, open_ = {file}, [file]
        while open_:
            header = open_.pop()
            more = {each for each, includes in self.includes.items() if header in includes} - met
            met |= more
            open_ += more
        return {each.parent for each in met if each.suffix == ".cc"}


def program_of(test):
    folders = [folder for folder in PROGRAMS if pathlib.Path(test).is_relative_to(folder)]
    return PROGRAMS[max(folders, key=len)] if folders else None


def build(program, objects):
    """Whether it builds. What is left out may leave something unused, so warnings are none where it is compiled."""
    names = [str(folder.relative_to(folder.parts[0])).replace(".", folder.parts[0], 1) for folder in objects]
    places = "|".join(f"{folder.parts[0]}/[^/]*_sources/{name}" for folder, name in zip(objects, names))
    lenient = [f"--per_file_copt=({places})[.]cc$@-Wno-error"] if objects else []
    with tempfile.TemporaryFile() as said:
        command = ["bazel", "build", "--noshow_progress", *lenient, f"//tests:{program}"]
        return subprocess.run(command, stdout=said, stderr=said).returncode == 0


def run(program, tests, until):
    """Which of them fails, '' where none does, None where time is up before the last."""
    command = [pathlib.Path(f"bazel-bin/tests/{program}").absolute(), f"--gtest_filter={tests}", "--gtest_fail_fast"]
    with tempfile.NamedTemporaryFile() as said:
        folder = f"bazel-bin/tests/{program}.runfiles/fully_shard"
        process = subprocess.Popen(
            command, cwd=folder, stdout=said, stderr=said, start_new_session=True, preexec_fn=keep_the_machine_safe
        )
        current, began = "", time.monotonic()
        try:
            while True:
                ended = finished(process)
                text = pathlib.Path(said.name).read_text(errors="replace")
                cases = re.findall(r"^\[ RUN      \] (.+)$", text, re.MULTILINE)
                if cases and current != cases[-1]:
                    current, began = cases[-1], time.monotonic()
                if ended and process.returncode != 0:
                    failed = re.search(r"^\[  FAILED  \] ([^\s,]+)", text, re.MULTILINE)
                    return failed.group(1) if failed else current or "the start of the program"
                if ended:
                    return ""
                if time.monotonic() - began > HANGS:
                    return current
                if time.monotonic() > until and time.monotonic() - began < HANGS / 5:
                    return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def keep_the_machine_safe():
    """A broken program may take memory or disk without end: then it is what ends."""
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 30, 8 << 30))


def finished(process):
    try:
        process.wait(2)
        return True
    except subprocess.TimeoutExpired:
        return False


def try_one(mutant, tests, seconds):
    """What becomes of it: 'caught', 'survived' or 'does not compile', and by which program's test or why."""
    file = pathlib.Path(mutant.file)
    source = file.read_text()
    objects, built = tests.objects(file), set()
    until = None
    try:
        file.write_text(mutant.applied(source))
        for program, suites in tests.asked(file):
            if program not in built and not build(program, objects):
                return "does not compile", ""
            built.add(program)
            until = until or time.monotonic() + seconds
            failed = run(program, ":".join(f"{suite}.*:*/{suite}.*" for suite in suites), until)
            if failed:
                return "caught", f"{program} {failed}"
            if failed is None or time.monotonic() > until:
                return "survived", f"what ran in {seconds} seconds; its name as an argument runs the rest"
    finally:
        file.write_text(source)
    return "survived", "every test of its layer"


def fail_without(catches):
    """Of (program, test), those that fail without a mutant, too: they have noticed nothing."""
    for program in sorted({program for program, _ in catches}):
        build(program, set())
    return [(program, test) for program, test in sorted(catches) if run(program, test, float("inf"))]


def describe(mutant):
    """The lines that it changes, and what they become."""
    source = pathlib.Path(mutant.file).read_text()
    begin = source.rfind("\n", 0, mutant.begin) + 1
    end = source.find("\n", mutant.end)
    line = source.count("\n", 0, begin) + 1
    after = mutant.applied(source)[begin : end + len(mutant.text) - (mutant.end - mutant.begin)]
    changes = [f"  {sign} {each}" for sign, text in (("-", source[begin:end]), ("+", after)) for each in text.split("\n")]
    return "\n".join([f"  {mutant.file}:{line}", *changes])


def mutants_of(files):
    for file in files:
        source = pathlib.Path(file).read_text()
        if not re.search(r"^int main\(", source, re.MULTILINE):  # programs, which scripts test
            yield from mutants.mutants_of(str(file), source)


def library(paths=LAYERS):
    """Those of the library's sources that `paths` are or have in them."""
    tracked = subprocess.check_output(["git", "ls-files", "--", *paths], text=True).splitlines()
    return [each for each in tracked if each.endswith((".cc", ".h")) and each.split("/")[0] in LAYERS]


def changed_since(base):
    """The library's sources that differ from `base`: by default, from what was there twenty commits ago."""
    if not base:
        base = subprocess.check_output(["git", "rev-list", "--first-parent", "--max-count=21", "HEAD"], text=True).split()[-1]
    differ = subprocess.check_output(["git", "diff", "--name-only", "--diff-filter=d", base, "HEAD", "--"], text=True)
    return library(differ.split() or LAYERS)


def survivors():
    """The reasons why no test can notice these mutants, by their names."""
    known = {}
    for line in SURVIVORS.read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, reason = line.partition(" ")
            if not reason.strip():
                raise SystemExit(f"{SURVIVORS}: {name} has no reason")
            known[name] = reason
    return known


def by_name(names):
    files = sorted({name.split(":")[0] for name in names})
    known = {mutant.name: mutant for mutant in mutants_of(each for each in files if pathlib.Path(each).exists())}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no such mutant: {', '.join(unknown)}")
    return [known[name] for name in names]


def drawn(files, seed):
    every = list(mutants_of(files))
    random.Random(seed).shuffle(every)
    return every


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--changed", nargs="?", const="", metavar="BASE")
    parser.add_argument("--nightly", action="store_true")
    parser.add_argument("--files", nargs="+")
    parser.add_argument("--count", type=int)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    landing = options.changed is not None
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    known = survivors()
    if options.names:
        chosen, known = by_name(options.names), {}
    elif options.nightly:
        chosen = drawn(library(), f"{commit} {datetime.date.today()}")
        gone = set(known) - {mutant.name for mutant in chosen}
        if gone:
            print(f"{SURVIVORS}: there are no such mutants any more:", *sorted(gone), sep="\n  ")
    elif landing:
        chosen = drawn(changed_since(options.changed), commit)
    elif options.files:
        chosen = drawn(library(options.files), commit)
    else:
        parser.error("say --changed, --nightly, --files or the names of mutants")
    if options.list:
        for mutant in chosen:
            print(mutant.name, describe(mutant), sep="\n")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a mutant is taken back
    wanted = options.count or (len(chosen) if options.names else 50 if options.nightly else 3)
    sys.exit(try_all(chosen, wanted, known, Tests(), landing))


def try_all(chosen, wanted, known, tests, landing):
    caught = survived = skipped = broken = 0
    catches = set()
    for mutant in chosen:
        if caught + survived == wanted:
            break
        if mutant.name in known:
            print(f"skipped: {mutant.name}: {known[mutant.name]}", flush=True)
            skipped += 1
            continue
        if landing and len(tests.objects(pathlib.Path(mutant.file))) > OBJECTS_AT_A_LANDING:
            continue
        if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", mutant.file]).returncode != 0:
            raise SystemExit(f"{mutant.file} has changes: commit or stash them first")
        said, by = try_one(mutant, tests, TIME_AT_A_LANDING if landing else float("inf"))
        print(f"{said}: {mutant.name}{' by ' + by if said == 'caught' else ''}\n{describe(mutant)}", flush=True)
        caught += said == "caught"
        if said == "caught":
            catches.add(tuple(by.split(" ", 1)))
        survived += said == "survived"
        broken += said == "does not compile"
        if said == "survived":
            print(f"  It survived {by}. Add a test, or a line with its name and the reason to {SURVIVORS}.", flush=True)
        if broken > wanted + 5:
            raise SystemExit("too many mutants do not compile; does the library, without them?")
    wrong = [] if landing else fail_without(catches)
    for program, test in wrong:
        print(f"{test} of {program} fails without a mutant, too: what it caught may have survived")
    print(f"{caught} caught, {survived} survived, {skipped} skipped")
    return 1 if (survived or wrong or broken and not caught) and not landing else 0


if __name__ == "__main__":
    main()
