#!/usr/bin/env python3
"""Finds circles between the modules of a crate: modules of one folder that use each other, directly or through others.

    tools/circles.py DIRECTORY..    the sources of crates, relative to the project's directory

Reads `use` items and paths as Cargo and rustc resolve them: a re-exported name belongs to the module that defines it, and a
folder's mod.rs is one more module of that folder. Tests are left out. Calls of methods name no module and are not seen.
"""
import pathlib
import re
import sys

TOKEN = re.compile(r'''//[^\n]*|/\*.*?\*/|b?r(?P<hash>\#*)".*?"(?P=hash)|b?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\])'|'?[A-Za-z_]\w*|::|[^\s\w]''', re.S)


def tokens(path):
    """Returns the tokens of a file without comments, literals and items that only tests and docs have."""
    found = [t[0] for t in TOKEN.finditer(path.read_text()) if not t[0].startswith(("//", "/*", "'")) and '"' not in t[0]]
    kept, at = [], 0
    while at < len(found):
        if found[at:at + 4] in (["#", "[", "cfg", "("],) and found[at + 4] in ("test", "doc"):
            at = end_of_item(found, found.index("]", at) + 1)
        else:
            kept.append(found[at])
            at += 1
    return kept


def end_of_item(found, at):
    """Returns where the item that begins at `at` ends: behind its semicolon or its last brace."""
    depth = 0
    while True:
        depth += (found[at] in "{([") - (found[at] in "})]")
        at += 1
        if depth == 0 and (found[at - 1] == ";" or (found[at - 1] == "}" and found[at:at + 1] != [";"])):
            return at


class Module:
    def __init__(self, path, folder, parent):
        self.path, self.folder, self.parent = path, folder, parent
        self.root = parent.root if parent else self
        self.children, self.names, self.used = {}, {}, []
        found = tokens(path)
        for at, token in enumerate(found):
            if token == "mod" and found[at + 2] == ";":
                name = found[at + 1]
                file = folder / f"{name}.rs"
                file = file if file.exists() else folder / name / "mod.rs"
                self.children[name] = Module(file, folder / name, self)
        self.read(found)

    def read(self, found):
        at, exported, words = 0, [], set()
        while at < len(found):
            if found[at] == "use":
                end = found.index(";", at)
                public = found[at - 1] in ("pub", ")")
                for path, name in tree(found[at + 1:end]):
                    self.names[name] = path
                    (exported if public else self.used).append(path)
                at = end
            elif found[at] == "mod" and found[at + 2] == ";":
                at += 2
            elif found[at + 1:at + 2] == ["::"] and found[at - 1] != "::":
                end = at + 2
                while found[end + 1:end + 2] == ["::"]:
                    end += 2
                self.used.append([t for t in found[at:end + 1] if t != "::"])
                words.add(found[at])
                at = end
            else:
                words.add(found[at])
            at += 1
        # A name that this file only re-exports is used by other files.
        self.used += [path for name, path in self.names.items() if path in exported and name in words]

    def resolve(self, path, follow=8):
        """Returns the module that defines the path's last name, or None if it is of another crate."""
        module, path = self, list(path)
        if path[0] not in ("crate", "self", "super", *self.children, *self.names):
            return None
        while path:
            name = path.pop(0)
            if name == "crate":
                module = self.root
            elif name == "super":
                module = module.parent
            elif name in module.children:
                module = module.children[name]
            elif name in module.names and follow:
                return module.resolve(module.names[name] + path, follow - 1)
            elif name != "self":
                break
        return module

    def all(self):
        yield self
        for child in self.children.values():
            yield from child.all()

    def line(self):
        return [self] if self.parent is None else [*self.parent.line(), self]


def tree(found, prefix=()):
    """Yields each path of a use item, and the name that it gets."""
    depth, part, parts = 0, [], []
    for token in [*found, ","]:
        depth += (token == "{") - (token == "}")
        if token == "," and depth == 0:
            parts.append(part)
            part = []
        else:
            part.append(token)
    for part in filter(None, parts):
        if "{" in part:
            start = part.index("{")
            yield from tree(part[start + 1:-1], (*prefix, *(t for t in part[:start] if t != "::")))
            continue
        path = [*prefix, *(t for t in part if t != "::")]
        name = path[-1]
        if "as" in path:
            path, name = path[:path.index("as")], path[-1]
        if path[-1] == "self":
            path.pop()
            name = path[-1] if name == "self" else name
        yield path, name


def circles(root):
    """Returns the circles of a crate: the folder, and the modules that use each other with one use of each."""
    arrows = {}
    for module in root.all():
        for path in module.used:
            used = module.resolve(path)
            if used is None or used is module:
                continue
            one, other = module.line(), used.line()
            shared = sum(a is b for a, b in zip(one, other))
            folder = one[shared - 1]
            ends = [line[shared].path.stem.replace("mod", line[shared].path.parent.name) if len(line) > shared else "(itself)" for line in (one, other)]
            arrows.setdefault(folder.folder, {}).setdefault(ends[0], {}).setdefault(ends[1], f"{module.path}: {'::'.join(path)}")
    found = []
    for folder, uses in arrows.items():
        def reach(name, seen):
            for other in uses.get(name, ()):
                if other not in seen:
                    seen.add(other)
                    reach(other, seen)
            return seen
        reached = {name: reach(name, set()) for name in uses}
        tied = sorted(name for name in uses if name in reached[name])
        while tied:
            ring = [name for name in tied if tied[0] in reached[name] and name in reached[tied[0]]]
            tied = [name for name in tied if name not in ring]
            found.append((folder, ring, [uses[a][b] for a in ring for b in ring if b in uses[a]]))
    return found


def main():
    found = [
        circle
        for crate in map(pathlib.Path, sys.argv[1:])
        for root in [crate / "lib.rs", crate / "main.rs", *crate.glob("bin/*.rs")]
        if root.exists()
        for circle in circles(Module(root, crate, None))
    ]
    for folder, ring, uses in found:
        print(f"{folder}: {', '.join(ring)} use each other", *uses, sep="\n    ")
    sys.exit(bool(found))


main()
