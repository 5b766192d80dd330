#!/usr/bin/env bash
# Checks what each program links: no asynchronous runtime, no second library for the same purpose; at most as many
# packages and lines of ours as SPECIFICATION.md promises. The modules of a crate use each other in one direction. No function is
# longer than 80 lines. The crates, the dependencies between them, and the modules of a folder are few. The picture and the table of crates in
# docs/architecture.md must match the manifests.
#
#   tools/check-deps.sh [draw]      draw: writes both
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

RUNTIMES='tokio|async-std|async-io|async-executor|async-global-executor|smol|futures|futures-executor|futures-util|mio|glommio|monoio|embassy-executor|actix-rt|hyper|tonic|h2'
# forbidden packages: TLS and cryptography come from rustls and ring, and the code for errors and arguments is ours
SECOND_WAYS='openssl|openssl-sys|native-tls|aws-lc-rs|aws-lc-sys|reqwest|anyhow|clap'
# the operator's program has about 250 options, completions and a manual page; the others have few, and each of their bytes counts
OF_CLI='clap'
# allowed only below parsers that derive their error type with it
NOT_OURS='thiserror'
# the limit for the program of the initramfs; tools/build.sh limits its bytes
UNLOCK_PACKAGES=48
# it links no client of a cloud's API or of HTTPS, and nothing for Kubernetes, archives or SSH
UNLOCK_WITHOUT='ureq|http|httpdate|httparse|roxmltree|tar|flate2|saphyr-parser|bcrypt'
UNLOCK_WITHOUT_OURS='cloud_api|http|keywrap|kubernetes|ssh'
# it links no verifier: it only proves its own machine, and the disk shows whether a key is right
JUDGES='verifier|hardware|refusal|roots|endorsement|collateral'

# Prints the crates that the programs of one of our folders link: "NAME", or "NAME (/path)" for ours.
tree() { cargo tree --locked --package "firstlight-$1" --target "$MUSL" --edges normal,no-proc-macro --prefix none --format '{p}' "${@:2}" | sed 's/ v[0-9][^ ]*//; s/ (\*)$//' | sort -u; }
# Counts the lines of code below a folder, without tests, comments and blank lines. A test module is at the end of its file, or in a
# file of its own.
lines() {
  find "$1" -name '*.rs' ! -path '*/tests/*' ! -name tests.rs ! -name testing.rs ! -path '*/examples/*' -exec awk '
    FNR == 1 { on = 1; test = 0 } /^#\[cfg\(test\)\]$/ { test = 1 }
    test && !/^#\[/ { test = 0; if (/;$/) next; on = 0 }
    on && !test && !/^[[:space:]]*(\/\/.*)?$/ { n++ } END { print n + 0 }' {} +
}

found=$(grep -rlE --include='*.rs' --include=Cargo.toml 'allow\(unsafe_code|unsafe_code = "(allow|warn)"' src | grep -v '^src/sys/' || true)
[ -z "$found" ] || die "unsafe code is allowed outside of src/sys: $found"
tools/circles.py src/* || die "these modules of one folder use each other: move what both need to a file below them"
tools/long_functions.py src || die "these functions are too long to be read at once"
tools/counts.py src || die "give the errors a type whose kind can be asked, the types a name of their own"

# lower them with each crate, dependency and module that goes
MOST_CRATES=30 MOST_DEPENDENCIES=150 MOST_MODULES=20

PACKAGES=(unlock volume bootstrapper services cli)
for package in "${PACKAGES[@]}"; do
  all=$(tree "$package")
  ours=$(sed -n 's/ (\/.*\/src\/\(.*\))$/ \1/p' <<<"$all" | awk '{print $2}')
  others=$(grep -v ' (/' <<<"$all")
  # a node computes the registers of an update, with its own boot manager, before it writes the update
  if [ "$package" != cli ] && [ "$package" != bootstrapper ] && grep -qx image <<<"$ours"; then die "$package links image, which it does not need"; fi
  found=$(grep -xE "$RUNTIMES" <<<"$others" || true)
  [ -z "$found" ] || die "$package links an asynchronous runtime, or a crate that needs one: $found"
  found=$(grep -xE "$SECOND_WAYS" <<<"$others" || true)
  if [ "$package" = cli ]; then found=$(grep -vxE "$OF_CLI" <<<"$found" || true); fi
  [ -z "$found" ] || die "$package links a second library for the same purpose: $found"
  for one in $ours; do
    found=$(tree "${one//_/-}" --depth 1 | grep -xE "$NOT_OURS" || true)
    [ -z "$found" ] || die "$one links a library for something that we have ourselves: $found"
  done
  packages=$(wc -l <<<"$others") code=0
  for one in $ours; do code=$((code + $(lines "src/$one"))); done
  printf '%-14s %3d packages of others, %6d lines of ours in %s\n' "$package" "$packages" "$code" "$(tr '\n' ' ' <<<"$ours")"
  if [ "$package" = unlock ] || [ "$package" = volume ]; then
    found=$(grep -xE "$UNLOCK_WITHOUT" <<<"$others" || true; grep -xE "$UNLOCK_WITHOUT_OURS" <<<"$ours" || true)
    [ -z "$found" ] || die "$package links crates that it does not need: $found"
    found=$(grep -xE "$JUDGES" <<<"$ours" || true)
    [ -z "$found" ] || die "$package links crates that judge evidence, which it does not do: $found"
  fi
  if [ "$package" = unlock ]; then
    [ "$packages" -le $UNLOCK_PACKAGES ] || die "unlock has $packages packages of others, more than the promised $UNLOCK_PACKAGES"
  fi
done

# One build makes all programs except unlock and firstlight-volume. In such a build Cargo gives a package all features that any of the programs wants.
features() { cargo tree --locked --target "$MUSL" --edges normal,no-proc-macro --prefix none --format '{p} {f}' "${@/#/--package=firstlight-}" | sed 's/ (\*)$//' | sort -u; }
# these change nothing for the others: bcrypt wants random numbers as an iterator, argon2 more traits of digest than ML-KEM,
# rsa wants traits of numbers with the standard library, vsss-rs integers of 128 bits of subtle, toml the part of serde for alloc,
# which std has too
TOGETHER=("${PACKAGES[@]:2}")
for package in "${TOGETHER[@]}"; do
  found=$(comm -23 <(features "$package") <(features "${TOGETHER[@]}") | grep -vE '^(getrandom|digest|num-traits|serde_core|subtle) ' || true)
  [ -z "$found" ] || die "$package gets features of another program: $found"
done

twice=$(cargo tree --locked "${PACKAGES[@]/#/--package=firstlight-}" --target "$MUSL" --edges normal,no-proc-macro --duplicates --depth 0 --prefix none --format '{p}' | sed '/^$/d' | sort -u)
[ -z "$twice" ] || { say "in more than one version:"; echo "$twice" >&2; }

# Prints the parts of docs/architecture.md that come from the manifests. `picture`: an arrow for each dependency, unless a longer
# path leads to the same crate. `table`: each crate with its description, programs first, and each crate above those that it uses.
drawing() {
  cargo metadata --locked --no-deps --format-version 1 | python3 -c '
import json, sys
def folder(path): return path.rsplit("/src/", 1)[1].removesuffix("/Cargo.toml")
packages = {folder(p["manifest_path"]): p for p in json.load(sys.stdin)["packages"] if "/src/" in p["manifest_path"]}
uses = {n: {folder(d["path"]) for d in p["dependencies"] if d["kind"] is None and "/src/" in d.get("path", "")} for n, p in packages.items()}
programs = {n: sorted(t["name"] for t in p["targets"] if "bin" in t["kind"]) for n, p in packages.items()}
def reach(n): return uses[n].union(*map(reach, uses[n])) if uses[n] else set()
def height(n): return 1 + max(map(height, uses[n]), default=0)
if sys.argv[1] == "table":
    for n in sorted(packages, key=lambda n: (not programs[n], -height(n), n)):
        print(f"| `{n}` |", packages[n]["description"] or sys.exit(f"src/{n}/Cargo.toml has no description"), "|")
elif sys.argv[1] == "count":
    print(len(packages), sum(map(len, uses.values())))
else:
    print("flowchart TD")
    for n in sorted(packages):
        for p in programs[n]: print(f"    {n} -.- {p}([{p}])" if p != n else f"    {n}([{n}])")
    for n in sorted(uses):
        for d in sorted(uses[n]):
            if not any(d in reach(o) for o in uses[n] if o != d): print(f"    {n} --> {d}")
' "$1"
}
read -r crates dependencies < <(drawing count)
# a folder's modules and folders, without what is in every crate
modules=$(find src/*/ -type d | while read -r folder; do
  printf '%d %s\n' "$(find "$folder" -mindepth 1 -maxdepth 1 \( -type d -o -name '*.rs' \) -printf '%f\n' | grep -cvxE '(lib|main|mod|tests|testing)\.rs|tests|bin|examples')" "${folder%/}"
done | sort -rn | head -n 1)
echo "$crates crates with $dependencies dependencies between them; at most ${modules% *} modules in a folder (${modules#* })"
[ "$crates" -le $MOST_CRATES ] && [ "$dependencies" -le $MOST_DEPENDENCIES ] && [ "${modules% *}" -le $MOST_MODULES ] ||
  die "allowed are $MOST_CRATES crates with $MOST_DEPENDENCIES dependencies between them, and $MOST_MODULES modules in a folder: put code into the crate of its subject, and split a folder"

page=docs/architecture.md
drawn() {
  case $1 in
    picture) awk '/^```mermaid$/ { on = 1; next } /^```$/ { on = 0 } on' "$page" ;;
    table) awk '/^\| crate \| content \|$/ { getline; on = 1; next } !/^\|/ { on = 0 } on' "$page" ;;
  esac
}
if [ "${1:-}" = draw ]; then
  awk -v picture="$(drawing picture)" -v table="$(drawing table)" '
    /^```mermaid$/ { print; print picture; in_picture = 1 } /^```$/ { in_picture = 0 }
    /^\| crate \| content \|$/ { print; getline; print; print table; in_table = 1; next } !/^\|/ { in_table = 0 }
    !in_picture && !in_table' "$page" >"$page.new"
  mv "$page.new" "$page"
fi
for part in picture table; do
  diff <(drawing $part) <(drawn $part) >&2 || die "the $part in $page does not match the manifests: run tools/check-deps.sh draw"
done
