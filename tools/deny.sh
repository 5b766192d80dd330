#!/usr/bin/env bash
# Runs cargo deny: licenses, duplicate and banned crates, sources. (Advisories need a database from the network: run
# `cargo deny check advisories` on a machine that can reach it.)
. "$(dirname "$0")/lib.sh"
VERSION=0.18.5
tool=$CACHE/cargo-deny-$VERSION
if [ ! -x "$tool/bin/cargo-deny" ]; then
  say "building cargo-deny $VERSION (once; some minutes)"
  # built outside the checkout, whose configuration would make it a musl program; not optimized, since it runs only for a second
  (cd / && cargo install --quiet --locked --debug --no-track --root "$tool" --target "$GNU" "cargo-deny@$VERSION" >&2)
fi
cd "$ROOT"
"$tool/bin/cargo-deny" --locked check bans licenses sources
