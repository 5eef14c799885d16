"""Writes page.html, with the files that it names in it, as the C++ source of page_template.h.

Usage: embed_page.py page.html FILE... > page_template.cc
"""

import pathlib
import re
import sys

END = "end_of_page"


def with_files(page, files):
    """The page with the text of each file in the place of the element that names it."""

    def element(match):
        text = files.pop(match["file"])
        tag = "style" if match["file"].endswith(".css") else "script"
        if f"</{tag}" in text or f"){END}" in text or "RUN_DATA" in text:
            raise SystemExit(f"{match['file']} has what ends the element that it is to be in")
        return f"<{tag}>\n{text}</{tag}>"

    page = re.sub(r'<link rel="stylesheet" href="(?P<file>[^"]+)">', element, page)
    page = re.sub(r'<script src="(?P<file>[^"]+)"></script>', element, page)
    if files:
        raise SystemExit(f"the page does not name {', '.join(files)}")
    return page


def main():
    page, *others = map(pathlib.Path, sys.argv[1:])
    text = with_files(page.read_text(), {path.name: path.read_text() for path in others})
    print('#include "programs/trainer/report/page/page_template.h"')
    print("namespace programs::run_report {")
    print(f'const std::string_view page_template = R"{END}({text}){END}";')
    print("}  // namespace programs::run_report")


if __name__ == "__main__":
    main()
