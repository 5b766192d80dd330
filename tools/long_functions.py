#!/usr/bin/env python3
"""Finds functions that are too long to be read at once: more than 80 lines, from `fn` to the closing brace, comments included.

    tools/long_functions.py DIRECTORY..    folders with Rust files as rustfmt writes them

Tests are left out: files and folders of that name, and the rest of a file behind #[cfg(test)] on a module with a body.
"""
import pathlib
import re
import sys

LIMIT = 80

# Texts, characters and comments: their braces and semicolons are not code.
LITERAL = re.compile(r'''//[^\n]*|/\*.*?\*/|b?r(?P<hash>\#*)".*?"(?P=hash)|b?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\])\'''', re.S)
TESTS = re.compile(r"^#\[cfg\(test\)\]\n(?:#.*\n)*(?:pub(?:\(.*\))? )?mod \w+ \{", re.M)
FUNCTION = re.compile(r"( *)(?:[a-z]+(?:\([a-z: ]+\))? |extern \"\" )*fn (\w+)")


def functions(path):
    """Yields each function of a file: its first line, its name, and how many lines it has."""
    code = LITERAL.sub(lambda literal: "\n" * literal[0].count("\n"), path.read_text())
    lines = [line.rstrip() for line in TESTS.split(code)[0].splitlines()]
    for first, line in enumerate(lines):
        if found := FUNCTION.match(line):
            indent, name = found.groups()
            # rustfmt indents the body: the function ends with the first line at its own depth that ends an item.
            end = re.compile(f"{indent}(?! ).*[;}}]$")
            last = next(at for at in range(first, len(lines)) if end.match(lines[at]))
            yield first + 1, name, last - first + 1


def main():
    files = [
        path
        for folder in sys.argv[1:]
        for path in sorted(pathlib.Path(folder).rglob("*.rs"))
        if not {"tests", "tests.rs", "testing.rs"} & set(path.parts)
    ]
    found = [(lines, path, first, name) for path in files for first, name, lines in functions(path) if lines > LIMIT]
    for lines, path, first, name in sorted(found, key=lambda one: one[0], reverse=True):
        print(f"{path}:{first}: {name} has {lines} lines, {LIMIT} are allowed: split it at its steps")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
