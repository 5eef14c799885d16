"""Prints a C++ source with every example in the given files as a function of its own.

    extract_blocks.py README.md docs/tensor_parallel.md fully_shard/forward.h ...

Of Markdown files the examples are the blocks of C++; of headers they are what comments indent by
three spaces (`//   code`), with the empty comment lines between. All of it is compiled but lines
with `...` alone and what NOT_COMPILED names. Names that examples use without declaring them are in
tests/documents/preamble.h.
"""

import pathlib
import re
import sys

# Header, how the example begins, and why it is not compiled.
NOT_COMPILED = [
    ("fully_shard/describe_units.h", "l0: unsharded, 2 parameters", "It is what the call prints."),
]


def blocks_of_document(text):
    """Yields the number of the first line of each block, and its lines."""
    for found in re.finditer(r"^```cpp\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start(1)) + 1, found.group(1).splitlines()


def blocks_of_header(text):
    """As blocks_of_document."""
    first, lines = 0, []
    for number, line in enumerate(text.splitlines() + [""], 1):
        code = re.fullmatch(r"\s*//   (.*)", line)
        if code:
            first = first or number
            lines.append(code.group(1))
        elif lines and line.strip() == "//":
            lines.append("")
        elif lines:
            yield first, lines
            first, lines = 0, []


def is_left_out(line):
    return line.startswith("#include") or re.match(r"\.\.\.\s*(//.*)?$", line)


paths = [pathlib.Path(argument) for argument in sys.argv[1:]]
includes = [f'#include "{path}"' for path in paths if path.suffix == ".h"]
declarations, functions = [], []
unmet = {(path, begin) for path, begin, _ in NOT_COMPILED if pathlib.Path(path) in paths}
for path in paths:
    blocks = blocks_of_header if path.suffix == ".h" else blocks_of_document
    for number, (first_line, lines) in enumerate(blocks(path.read_text()), 1):
        met = {(of, begin) for of, begin in unmet if of == str(path) and lines[0].startswith(begin)}
        unmet -= met
        if met:
            continue
        includes += [line for line in lines if line.startswith("#include")]
        body = "\n".join("" if is_left_out(line) else line for line in lines)
        located = f'#line {first_line} "{path}"\n{body}\n'
        # What no function can have in it lies beside them.
        if re.search(r"^(template <|FSDP_API )", body, re.MULTILINE):
            declarations.append(located)
            continue
        name = re.sub(r"\W", "_", str(path))
        functions.append(f"[[maybe_unused]] void block_{number}_of_{name}() {{\n{located}}}\n")
if unmet:
    sys.exit(f"NOT_COMPILED names examples that are not there: {sorted(unmet)}")

print('#include "tests/documents/preamble.h"')
print("\n".join(sorted(set(includes))))
# Examples name results for their readers, and need not go on to use them.
print('#pragma GCC diagnostic ignored "-Wunused-variable"')
print("\n".join(declarations))
print("namespace {")
print("\n".join(functions))
print("}  // namespace")
