#!/usr/bin/env bash
# Builds the programs again in another directory, with another Cargo home and target directory and a newly compiled
# tpm2-tss, and compares every byte.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
tools/build.sh

other=$(mktemp -d); trap 'rm -rf "$other"' EXIT
mkdir -p "$other"/elsewhere "$other"/home/registry "$other"/cache/sources
git ls-files -z --cached --others --exclude-standard | tar c --null -T - --ignore-failed-read | tar x -C "$other/elsewhere"
# downloads are shared, but the sources are unpacked at other paths
home=${CARGO_HOME:-$HOME/.cargo}
for shared in registry/cache registry/index config.toml config credentials.toml; do
  [ ! -e "$home/$shared" ] || ln -s "$home/$shared" "$other/home/$shared"
done
cp "$CACHE"/sources/*.orig.tar.* "$other/cache/sources/"

say "building again, in $other"
export RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}
CARGO_HOME=$other/home CARGO_TARGET_DIR=$other/target DIST=$other/dist FIRSTLIGHT_CACHE=$other/cache "$other/elsewhere/tools/build.sh"
for program in "$other"/dist/*; do
  cmp "$program" "target/dist/$(basename "$program")" || die "$(basename "$program") differs between two directories"
done
(cd "$other/dist" && sha256sum ./*)
say "two builds in different directories are identical"
