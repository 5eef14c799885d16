"""Formats C++ files: wraps comments of whole lines at 90 columns, then runs clang-format. See tools/format.

Usage: format_sources.py CLANG_FORMAT [--check] FILE...
"""

import pathlib
import re
import subprocess
import sys
import textwrap

COMMENT_COLUMNS = 90
PROSE = re.compile(r"^(\s*)// (\S.*)$")
# Lines that keep their line breaks: lists, tables, and what a linter or clang-format reads.
FIXED = re.compile(r"^([-*|]|\d+\.|NOLINT|clang-format)")


def wrap_paragraph(indent, texts):
    lines = [f"{indent}// {text}" for text in texts]
    if all(len(line) <= COMMENT_COLUMNS for line in lines):
        return lines
    prefix = f"{indent}// "
    return textwrap.wrap(
        " ".join(texts),
        width=COMMENT_COLUMNS,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrap_comments(source):
    wrapped, indent, texts = [], "", []

    def flush():
        if texts:
            wrapped.extend(wrap_paragraph(indent, texts))
            texts.clear()

    for line in source.split("\n"):
        prose = PROSE.match(line)
        if prose is None or FIXED.match(prose[2]):
            flush()
            wrapped.append(line)
            continue
        if prose[1] != indent:
            flush()
        indent = prose[1]
        texts.append(prose[2])
    flush()
    return "\n".join(wrapped)


def formatted(clang_format, path):
    source = wrap_comments(path.read_text())
    command = [clang_format, "--style=file", f"--assume-filename={path}"]
    result = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return wrap_comments(result.stdout)


def main():
    clang_format, *arguments = sys.argv[1:]
    check = "--check" in arguments
    unformatted = []
    for name in (argument for argument in arguments if argument != "--check"):
        path = pathlib.Path(name)
        result = formatted(clang_format, path)
        if result == path.read_text():
            continue
        unformatted.append(name)
        if not check:
            path.write_text(result)
    for name in unformatted:
        print(f"{'not formatted' if check else 'formatted'}: {name}")
    if check and unformatted:
        sys.exit("run tools/format")


if __name__ == "__main__":
    main()
