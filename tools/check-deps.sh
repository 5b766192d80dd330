#!/usr/bin/env bash
# What each program is made of: no asynchronous runtime, no second library for a job that one already does; at most so many
# packages and lines of ours as SPECIFICATION.md promises; and the picture in docs/architecture.md is that of the manifests.
#
#   tools/check-deps.sh [draw]      draw: writes the picture anew
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

RUNTIMES='tokio|async-std|async-io|async-executor|async-global-executor|smol|futures|futures-executor|futures-util|mio|glommio|monoio|embassy-executor|actix-rt|hyper|tonic|h2'
# TLS and cryptography come from rustls and ring; errors and arguments are our own
SECOND_WAYS='openssl|openssl-sys|native-tls|aws-lc-rs|aws-lc-sys|reqwest|anyhow|clap'
# what a parser that we use makes its one error type with is its own affair
NOT_OURS='thiserror'
# what runs before the operating system does is kept small: packages of others, lines of ours
UNLOCK_PACKAGES=62
UNLOCK_LINES=16200
# and has nothing to do with Kubernetes, archives, SSH
UNLOCK_WITHOUT='kubernetes|tar|flate2|saphyr-parser|ssh|bcrypt'

# The crates on the way to a package's programs, "NAME" or "NAME (/path)" for ours.
tree() { cargo tree --locked --package "$1" --target "$MUSL" --edges normal,no-proc-macro --prefix none --format '{p}' "${@:2}" | sed 's/ v[0-9][^ ]*//; s/ (\*)$//' | sort -u; }
# Lines of code below a folder: no tests, comments and blank lines. Test modules end their file.
lines() {
  find "$1" -name '*.rs' ! -path '*/tests/*' ! -name tests.rs ! -name testing.rs ! -path '*/examples/*' -exec awk '
    FNR == 1 { on = 1 } /^#\[cfg\(test\)\]$/ { on = 0 }
    on && !/^[[:space:]]*(\/\/.*)?$/ { n++ } END { print n + 0 }' {} +
}

PACKAGES=(unlock bootstrapper services cli)
for package in "${PACKAGES[@]}"; do
  all=$(tree "$package")
  ours=$(sed -n 's/ (\/.*\/src\/\(.*\))$/ \1/p' <<<"$all" | awk '{print $2}')
  others=$(grep -v ' (/' <<<"$all")
  found=$(grep -xE "$RUNTIMES" <<<"$others" || true)
  [ -z "$found" ] || die "$package: an asynchronous runtime, or what only works in one, is linked: $found"
  found=$(grep -xE "$SECOND_WAYS" <<<"$others" || true)
  [ -z "$found" ] || die "$package: a second library for a job that another already does is linked: $found"
  for one in $ours; do
    found=$(tree "$one" --depth 1 | grep -xE "$NOT_OURS" || true)
    [ -z "$found" ] || die "$one: a library for what is our own is linked: $found"
  done
  packages=$(wc -l <<<"$others") code=0
  for one in $ours; do code=$((code + $(lines "src/$one"))); done
  printf '%-14s %3d packages of others, %6d lines of ours in %s\n' "$package" "$packages" "$code" "$(tr '\n' ' ' <<<"$ours")"
  if [ "$package" = unlock ]; then
    found=$(sed 's/ (.*//' <<<"$all" | grep -xE "$UNLOCK_WITHOUT" || true)
    [ -z "$found" ] || die "unlock links what the initramfs has no need of: $found"
    [ "$packages" -le $UNLOCK_PACKAGES ] || die "unlock has $packages packages of others, more than the promised $UNLOCK_PACKAGES"
    [ "$code" -le $UNLOCK_LINES ] || die "unlock has $code lines of ours, more than the promised $UNLOCK_LINES"
  fi
done

# The programs are built in one go, in which Cargo gives a package the features that any of them wants.
features() { cargo tree --locked --target "$MUSL" --edges normal,no-proc-macro --prefix none --format '{p} {f}' "${@/#/--package=}" | sed 's/ (\*)$//' | sort -u; }
# one that bcrypt adds, and nobody else notices: random numbers as an iterator
for package in "${PACKAGES[@]}"; do
  found=$(comm -23 <(features "$package") <(features "${PACKAGES[@]}") | grep -v '^getrandom ' || true)
  [ -z "$found" ] || die "$package gets features of another program: $found"
done

twice=$(cargo tree --locked "${PACKAGES[@]/#/--package=}" --target "$MUSL" --edges normal,no-proc-macro --duplicates --depth 0 --prefix none --format '{p}' | sed '/^$/d' | sort -u)
[ -z "$twice" ] || { say "in more than one version:"; echo "$twice" >&2; }

# The picture: an arrow for each dependency that no longer way leads to.
picture() {
  cargo metadata --locked --no-deps --format-version 1 | python3 -c '
import json, sys
packages = {p["name"]: p for p in json.load(sys.stdin)["packages"] if "/src/" in p["manifest_path"]}
uses = {n: {d["name"] for d in p["dependencies"] if d["kind"] is None} & set(packages) for n, p in packages.items()}
def reach(n): return uses[n].union(*map(reach, uses[n])) if uses[n] else set()
print("flowchart TD")
for n in sorted(packages):
    programs = sorted(t["name"] for t in packages[n]["targets"] if "bin" in t["kind"])
    for p in programs: print(f"    {n} -.- {p}([{p}])" if p != n else f"    {n}([{n}])")
for n in sorted(uses):
    for d in sorted(uses[n]):
        if not any(d in reach(o) for o in uses[n] if o != d): print(f"    {n} --> {d}")
'
}
page=docs/architecture.md
drawn() { awk '/^```mermaid$/ { on = 1; next } /^```$/ { on = 0 } on' "$page"; }
if [ "${1:-}" = draw ]; then
  awk -v picture="$(picture)" '/^```mermaid$/ { print; print picture; skip = 1 } /^```$/ { skip = 0 } !skip' "$page" >"$page.new"
  mv "$page.new" "$page"
fi
diff <(picture) <(drawn) >&2 || die "the picture in $page is not that of the manifests: tools/check-deps.sh draw"
