#!/usr/bin/env bash
# Builds the programs of the previous release once, and prints the folder with them (bin) and with its sources (source).
#
#   tools/previous.sh             builds if they are not in the cache (ten minutes on two cores)
#   tools/previous.sh --commit    prints only the commit
#
# The sources come from the history of this checkout, and its own tools/build.sh builds them.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

# 0.1.0 has no tag: this is its last commit before the objects of the cluster got admission policies and an encrypted master secret
COMMIT=db0bddb5b7b29e2cdc8e732e314ad2bde6d331e1

if [ "${1:-}" = --commit ]; then echo $COMMIT; exit; fi
prefix=$CACHE/previous-${COMMIT:0:12}
if [ -e "$prefix/done" ]; then echo "$prefix"; exit; fi

git cat-file -e "$COMMIT^{commit}" 2>/dev/null ||
  die "this checkout does not have the commit of the previous release, $COMMIT. In a shallow clone, fetch the whole history: git fetch --unshallow"
mkdir -p "$CACHE"
# two tests may ask at the same time
exec 9>"$prefix.lock"; flock 9
if [ ! -e "$prefix/done" ]; then
  say "building the programs of the previous release, ${COMMIT:0:12}"
  rm -rf "$prefix/source" "$prefix/target" "${prefix:?}/bin"
  mkdir -p "$prefix/source"
  git archive "$COMMIT" | tar x -C "$prefix/source"
  FIRSTLIGHT_COMMIT="$(git rev-parse --short=12 "$COMMIT"), $(git log -1 --format=%cs "$COMMIT")" \
    CARGO_TARGET_DIR=$prefix/target DIST=$prefix/new "$prefix/source/tools/build.sh" >&2 9>&-
  rm -rf "$prefix/target"
  mv "$prefix/new" "$prefix/bin"
  touch "$prefix/done"
fi
echo "$prefix"
