"""Write the table of `qengine serve`'s options into docs/serving.md, from the options themselves.

python docs/serving_options.py            # fill the table between <!-- options --> and <!-- end of options -->
python docs/serving_options.py --check    # exit code 1 if it is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from qengine.cli.serve_options import PANELS, Option, options

FILE = Path(__file__).resolve().parent / "serving.md"
START, END = "<!-- options -->", "<!-- end of options -->"


def shown(option: Option) -> str:
    """A default, for people."""
    value: Any = option.default
    if value in (None, (), ""):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def table() -> str:
    """One table a panel."""
    lines: list[str] = []
    for panel in PANELS:
        lines += [f"**{panel}**", "", "| option | default | |", "|---|---|---|"]
        for option in options():
            if option.panel == panel:
                flag, text = option.flag.replace("/", "`, `"), option.help.replace("|", "\\|")
                lines.append(f"| `{flag}` | {shown(option)} | {text} |")
        lines.append("")
    return "\n".join([START, "", *lines, END])


def main() -> int:
    """Fill, or check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the table is out of date")
    check = parser.parse_args().check
    before = FILE.read_text(encoding="utf-8")
    after = re.sub(f"{START}.*?{END}", lambda _: table(), before, flags=re.DOTALL)
    if before == after:
        return 0
    if not check:
        FILE.write_text(after, encoding="utf-8")
    print(f"{FILE.name} {'is out of date; run python docs/serving_options.py' if check else 'written'}")
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
