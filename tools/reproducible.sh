#!/usr/bin/env bash
# Builds the programs a second time in another folder, with another CARGO_HOME and a tpm2-tss compiled anew, and compares.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
tools/build.sh musl

other=$(mktemp -d); trap 'rm -rf "$other"' EXIT
say "building once more in $other"
mkdir -p "$other/somewhere/else/cargo" "$other/cache/sources"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$other/somewhere/else"
# what was downloaded is shared, by a path that differs
for part in registry git; do
  [ ! -e "${CARGO_HOME:-$HOME/.cargo}/$part" ] || ln -s "${CARGO_HOME:-$HOME/.cargo}/$part" "$other/somewhere/else/cargo/$part"
done
cp "$CACHE"/sources/*.orig.tar.* "$other/cache/sources/"
(
  cd "$other/somewhere/else"
  export FIRSTLIGHT_CACHE=$other/cache RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup} CARGO_HOME=$other/somewhere/else/cargo
  mkdir .deps; ln -s "$(tools/tss.sh musl)" .deps/musl
  tools/build.sh musl
)
different=0
for program in target/dist/*; do
  if ! cmp "$program" "$other/somewhere/else/$program"; then different=1; fi
done
[ $different = 0 ] || die "the two builds differ"
(cd target/dist && sha256sum ./*)
say "two builds in two folders gave the same bytes"
