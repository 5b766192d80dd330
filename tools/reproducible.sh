#!/usr/bin/env bash
# Builds the programs in a second directory, with another Cargo home and target directory, and compares every byte.
. "$(dirname "$0")/lib.sh"
"$ROOT/tools/build.sh" >/dev/null
other=$(mktemp -d); trap 'rm -rf "$other"' EXIT
mkdir "$other/elsewhere" "$other/home"
(cd "$ROOT" && git ls-files -z --cached --others --exclude-standard | tar c --null -T - --ignore-failed-read) | tar x -C "$other/elsewhere"
# the registry's downloads are shared, the unpacked sources lie at other paths
home=${CARGO_HOME:-$HOME/.cargo}
for shared in registry/cache registry/index; do
  [ ! -d "$home/$shared" ] || { mkdir -p "$other/home/registry"; ln -s "$home/$shared" "$other/home/$shared"; }
done
for file in config.toml config credentials.toml; do [ ! -e "$home/$file" ] || ln -s "$home/$file" "$other/home/$file"; done
say "building once more, in $other"
CARGO_HOME=$other/home CARGO_TARGET_DIR=$other/target "$other/elsewhere/tools/build.sh" >/dev/null
for program in "$ROOT"/target/dist/*; do
  cmp "$program" "$other/target/dist/$(basename "$program")" || die "$(basename "$program") differs between two directories"
done
say "two builds in different directories are identical"
