"""Prints a C++ source with every block of C++ in the given Markdown files as a function of its own.

Names that blocks use without declaring them are in tests/documents/preamble.h. Lines with `...` alone are left out.
"""

import pathlib
import re
import sys

includes, functions = [], []
for path in map(pathlib.Path, sys.argv[1:]):
    text = path.read_text()
    for number, found in enumerate(re.finditer(r"^```cpp\n(.*?)^```$", text, re.MULTILINE | re.DOTALL), 1):
        first_line = text.count("\n", 0, found.start(1)) + 1
        lines = found.group(1).splitlines()
        includes += [line for line in lines if line.startswith("#include")]
        body = ["" if line.startswith("#include") or re.match(r"\.\.\.\s*(//.*)?$", line) else line for line in lines]
        name = re.sub(r"\W", "_", str(path))
        functions.append(
            f'[[maybe_unused]] void block_{number}_of_{name}() {{\n#line {first_line} "{path}"\n'
            + "\n".join(body) + "\n}\n"
        )

print('#include "tests/documents/preamble.h"')
print("\n".join(sorted(set(includes))))
print("namespace {")
print("\n".join(functions))
print("}  // namespace")
