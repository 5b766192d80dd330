#!/usr/bin/env bash
# Changes single places of the crates of tests/mutants.tsv, as cargo-mutants does (another constant as a function's result, another
# comparison), and counts how many changes the crate's own tests notice. It fails if these are less than the crate's share in that file.
# A place whose change nobody can notice is in .cargo/mutants.toml, with the reason.
#
#   tools/mutants.sh [CRATE..]      SAMPLE=20 changes of each crate (0: all), chosen by SEED=0
. "$(dirname "$0")/lib.sh"
VERSION=27.1.0
SAMPLE=${SAMPLE:-20} SEED=${SEED:-0}
tool=$CACHE/cargo-mutants-$VERSION
if [ ! -x "$tool/bin/cargo-mutants" ]; then
  say "building cargo-mutants $VERSION (once; some minutes)"
  # built outside the checkout, whose configuration would make it a musl program
  (cd / && cargo install --quiet --locked --no-track --root "$tool" --target "$GNU" "cargo-mutants@$VERSION" >&2)
fi
export PATH="$tool/bin:$PATH"

# a copy of the last commit, with a build folder that the next run finds warm
tree=$CACHE/mutants/tree
export CARGO_TARGET_DIR=$CACHE/mutants/target CARGO_INCREMENTAL=1
[ -z "$(git -C "$ROOT" status --porcelain -- src)" ] || say "changes of src that are not committed are left out"
rm -rf "$tree"
git clone --quiet --shared "$ROOT" "$tree"
cd "$tree"

failed=
while IFS=$'\t' read -r crate share; do
  if [ $# -gt 0 ] && [[ " $* " != *" $crate "* ]]; then continue; fi
  package=firstlight-${crate//_/-}
  count=$(cargo mutants --list --package "$package" | wc -l)
  [ "$count" -gt 0 ] || die "$crate has no place to change"
  of=1
  if [ "$SAMPLE" -gt 0 ] && [ "$count" -gt "$SAMPLE" ]; then of=$((count / SAMPLE)); fi
  say "$crate: 1 of $of of its $count changes"
  status=0
  cargo mutants --in-place --package "$package" --shard "$((SEED % of))/$of" --sharding round-robin --output "$CACHE/mutants/$crate" \
    --no-times --colors never --cargo-test-arg=--lib >"$CACHE/mutants/$crate.log" 2>&1 || status=$?
  # 2: some were not noticed; 3: some ended by their time limit
  case $status in 0 | 2 | 3) ;; *) tail -n 30 "$CACHE/mutants/$crate.log" >&2; die "$crate: cargo mutants ended with $status" ;; esac
  results=$CACHE/mutants/$crate/mutants.out
  missed=$(wc -l <"$results/missed.txt")
  noticed=$(($(wc -l <"$results/caught.txt") + $(wc -l <"$results/timeout.txt")))
  [ $((noticed + missed)) -gt 0 ] || die "$crate: no change could be compiled"
  printf '%-14s %3d of %3d changes noticed, at least %d %%\n' "$crate" $noticed $((noticed + missed)) "$share"
  sed 's/^/    not noticed: /' "$results/missed.txt"
  [ $((noticed * 100)) -ge $((share * (noticed + missed))) ] || failed+=" $crate"
done < <(grep -v '^#' "$ROOT/tests/mutants.tsv")
[ -z "$failed" ] || die "the tests notice too few changes:$failed"
