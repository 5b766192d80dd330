#!/usr/bin/env bash
# Makes a book of the documents in target/book/html, and prints the path of its first page. Readers need no network: the book
# contains search, fonts and diagrams.
. "$(dirname "$0")/lib.sh"
VERSION=0.5.4 MERMAID=0.17.1
tool=$CACHE/mdbook-$VERSION-$MERMAID
for crate in "mdbook@$VERSION --no-default-features --features search" "mdbook-mermaid@$MERMAID"; do
  [ ! -x "$tool/bin/${crate%%@*}" ] || continue
  say "building ${crate%% *} (once; some minutes)"
  # built outside the checkout, whose configuration would make it a musl program; not optimized, since it runs only for a second
  # shellcheck disable=SC2086
  (cd / && cargo install --quiet --locked --debug --no-track --root "$tool" --target "$GNU" $crate >&2)
done

# a copy of all documents, in which links to files outside of docs/ work too
book=$ROOT/target/book
rm -rf "$book"; mkdir -p "$book/source"
cd "$ROOT"
cp -a book.toml docs charts models ./*.md "$book/source"
# not the values and the state of a developer's own cluster
git ls-files -z infra | xargs -0 cp -a --parents -t "$book/source"
grep -oh '](\.\./[^)#]*' docs/*.md | sed 's|](\.\./||' | grep -v '\.md$' | sort -u | xargs cp -a --parents -t "$book/source"
# the book's root is the folder above docs/, so paths get the prefix docs/
sed -e 's|](\([a-z]\)|](docs/\1|; s|](\.\./|](|' docs/SUMMARY.md >"$book/source/SUMMARY.md"
rm "$book/source/docs/SUMMARY.md"
# a page that no file of the checkout has
options=docs/options
tools/options.sh >"$book/source/$options.md"
sed -i "s|^- \[Commands, ports, files\].*|&\n- [All options]($options.md)|" "$book/source/SUMMARY.md"
# mdBook makes index.html from README.md, and does not change the links to it
find "$book/source" -name '*.md' ! -name SUMMARY.md -exec sed -i 's|\(]([^):]*\)README\.md|\1index.md|' {} +
cd "$book/source"
"$tool/bin/mdbook-mermaid" install . 2>/dev/null
PATH=$tool/bin:$PATH mdbook build --dest-dir "$book/html" >&2
echo "$book/html/index.html"
